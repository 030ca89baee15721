"""Gathers: the all-gathers of one optimizer's byte buffers, and the columnwise copies after them.

The host drops the handle of a gather as soon as the bytes have arrived, when the columnwise copies
are still to be made. A second thread that saw no handle would read stale copies. So one thread at a
time starts or finishes gathers, and threads that read weights wait (`guard.GatherLock`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zerocast import CastPlan, QuantizedWeight
from zerocast.cast.columnwise import ColumnwiseCopies
from zerocast.cast.host import CastDriver, Gather
from zerocast.integrations.patches import Patch
from zerocast.weight.validity import Use

from .guard import MethodGuard
from .primary import TETensors, is_te_tensor, make_te_copies, primary_of, weight_of
from .shards import OwnedShare


class Gathers(Gather):
    """The bucket groups that gather the bytes of one share of an optimizer.

    Attributes:
        te_tensors: the tensors of TransformerEngine among the weights of the share.
    """

    def __init__(self, owned: OwnedShare, guard: MethodGuard) -> None:
        self._bucket_groups, self._guard = owned.bucket_groups, guard
        self.te_tensors = TETensors(owned.names, owned.params, owned.weights)
        # Ids of the bucket groups that have not gathered the bytes of the last cast.
        self._due: set[int] = set()
        # The bucket group of each weight, keyed by id of the weight's state.
        self._group_of = {
            id(weight_of(param).state): group for group in self._bucket_groups for param in primary_of(group)
        }
        primary = [param for group in self._bucket_groups for param in primary_of(group)]
        self._placed = [(param, param.state) for param in primary if isinstance(param, QuantizedWeight)]

    def prepare(self) -> None:
        """Finish the gathers in flight, mark every bucket group as due, and find the buffers that
        the host may have moved.

        Weights that `.data =` or `Module.to` moved to a different storage are moved back into the
        host's buffers. The cast writes all of their bytes.
        """
        # First, since a gather that ends later would be taken for the gather of the next cast.
        for group in self._bucket_groups:
            self._finish(group)
        self._due = set(map(id, self._bucket_groups))
        for weight, state in self._placed:
            if weight.state is not state:
                weight.restate(state)
        self.te_tensors.locate()

    def start(self, plan: CastPlan) -> None:
        """Finish the gathers in flight, then gather all bytes. Collective."""
        for group in self._bucket_groups:
            self._finish(group)
            group.start_param_sync(force_sync=True)

    def complete(self) -> None:
        """Gather the bytes of the last cast that were not gathered yet, and find the copies that
        TransformerEngine's tensors have of them. Collective.
        """
        self.start_due()
        self.te_tensors.locate_copies()

    def start_due(self) -> None:
        """Gather the bytes of the last cast that were not gathered yet. Collective.

        The next forward pass would do the same.
        """
        for group in self._bucket_groups:
            self._finish(group)
            if id(group) in self._due:
                group.start_param_sync(force_sync=True)

    def wait_for(self, weight: Any) -> None:
        """Wait for the gather of a weight, if one is in flight, and for its columnwise copies."""
        self._finish(self._group_of[id(weight.state)])

    def patches(self, plan: CastPlan) -> Iterator[Patch]:
        """Yield patches of the methods that start or finish a gather of bytes that `plan` casts.

        Columnwise copies follow; an exception leaves weights partial.
        """
        for group in self._bucket_groups:
            make_copies = self._making_copies(group, plan.backend)
            for name in ("start_param_sync", "finish_param_sync"):
                yield Patch(group, name, self._gathering(group, name, make_copies))
            # Megatron's own method would have TransformerEngine make the columnwise copies, which
            # `make_copies` has made already.
            if any(map(is_te_tensor, primary_of(group))):
                yield Patch(group, "_post_param_sync", lambda: None)
        # The bytes of a weight can be read while its gather is in flight (overlap_param_gather), so
        # reading them calls `before_read` first.
        yield Patch(plan.validity, "before_read", self.wait_for)

    def _finish(self, group: Any) -> None:
        """Wait for a gather in flight, and make the columnwise copies of its weights.

        If another thread is finishing the gather, wait for that thread.
        """
        # Without the lock first: this runs at every read of a weight.
        if group.param_gather_handle is None and not self._guard.lock.is_held:
            return
        with self._guard.lock.hold():
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
            self._guard.check(Use.READ)

    def _gathering(self, group: Any, name: str, make_copies: Callable[[], None]) -> Callable[..., Any]:
        """Wrap a method of the host that gathers: call `make_copies` once the bytes have
        arrived.
        """
        method = getattr(group, name)

        def gather(*args: Any, **kwargs: Any) -> Any:
            with self._guard.lock.hold():
                self._guard.check(Use.READ)
                with self._guard.validity.transaction("an all-gather", masters=False):
                    # Megatron calls `finish_param_sync` for groups that are finished already.
                    # Copies are made once, by the call that ends a gather: a synchronous start, or
                    # a finish with one to end.
                    pending = group.param_gather_handle is not None or not group.param_gather_dispatched
                    result = method(*args, **kwargs)
                    if group.param_gather_handle is None and (pending or name == "start_param_sync"):
                        make_copies()
                    return result

        return gather

    def _making_copies(self, group: Any, backend: str) -> Callable[[], None]:
        """Return the function that makes the columnwise copies of a bucket group."""
        params = primary_of(group)
        copies = ColumnwiseCopies([param for param in params if isinstance(param, QuantizedWeight)], backend)
        te_tensors = [param for param in params if is_te_tensor(param)]

        def make_copies() -> None:
            copies.make()
            make_te_copies(te_tensors)
            for tensor in te_tensors:
                weight_of(tensor).state.mark_columnwise()
            self._due.discard(id(group))

        return make_copies


@dataclass(frozen=True)
class AttachedShare:
    """A share of an optimizer under an attachment.

    Attributes:
        owned: its weights and the masters that this rank owns.
        gathers: the all-gathers of its byte buffers.
        driver: its casts.
    """

    owned: OwnedShare
    gathers: Gathers
    driver: CastDriver
