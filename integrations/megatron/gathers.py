"""The shares of optimizers in an attachment, with the gathers of their byte buffers, and the guard
of all their weights.

All weights of an attachment are partial together, since one step of the host writes them all. After
an interrupted write of masters or moments only a load helps. An interrupted cast or gather can be
repeated, since the masters are complete.

The host drops the handle of a gather as soon as the bytes have arrived, when the columnwise copies
are still to be made. A second thread that saw no handle would read stale copies. So one thread at a
time starts or finishes gathers, and threads that read weights wait (`Guard.lock`).
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from zerocast import CastPlan, QuantizedWeight
from zerocast.cast.columnwise import ColumnwiseCopies
from zerocast.cast.host import CastDriver, Gather, raising_together
from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.group import Group
from zerocast.integrations import Patch
from zerocast.weight.validity import Use, Validity, not_gathered

from .primary import TETensors, is_te_tensor, make_te_copies, primary_of, weight_of
from .shards import OwnedShare

AGAIN = "weights may be of different steps; call attachment.refresh(), or load a checkpoint, or end the run if ranks have died"
GATHER = "with overlap_param_gather, before the next forward pass, call ddp.start_param_sync(force_sync=True)"
ADVICE = (
    f"the optimizer's step casts by itself; after masters were written by hand call attachment.refresh(), and {GATHER}"
)


class Guard:
    """Guards the weights of an attachment: lets one thread gather at a time, and raises for uses of
    weights that are not valid.

    Attributes:
        validity: the validity of all weights of an attachment. Its plans have parts of it.
        lock: held by the thread that starts or finishes gathers.
        is_preparing: True while a load is prepared. The host then calls its own load methods, on
            state that the real load overwrites.
    """

    def __init__(self, validity: Validity | None = None) -> None:
        self.validity = validity or Validity("load a checkpoint", recast_remedy=AGAIN, advice=ADVICE)
        self.lock = threading.RLock()
        self.is_preparing = False

    def check(self, use: Use) -> None:
        """Raise RuntimeError if the weights are not valid for this use.

        Nothing is checked while a load is prepared: that reads state only to overwrite it.
        """
        if not self.is_preparing:
            self.validity.check(use)

    def check_save(self, groups: Sequence[Group]) -> None:
        """Raise on all ranks of these groups while masters or weights are partial on one rank. The
        others would wait for that rank otherwise.
        """
        problem: Exception | None = None
        try:
            self.check(Use.SAVE)
        except RuntimeError as error:
            problem = error
        for group in groups:
            # A rank is in each group with different ranks, which hear of the problem from it.
            try:
                validate_across_ranks(group, [], problem, "saves a checkpoint")
            except RuntimeError as error:
                problem = problem or error
        if problem is not None:
            raise problem

    @contextlib.contextmanager
    def writing(self, what: str, *, masters: bool) -> Iterator[None]:
        """Check that the weights are valid for a step. An exception while the context is open
        leaves them partial.
        """
        self.check(Use.STEP)
        with self.validity.transaction(what, masters=masters):
            yield


class Gathers(Gather):
    """The bucket groups that gather the bytes of one share of an optimizer.

    Attributes:
        te_tensors: the tensors of TransformerEngine among the weights of the share.
    """

    def __init__(self, owned: OwnedShare, guard: Guard) -> None:
        self._bucket_groups = owned.bucket_groups
        self._guard = guard
        self._is_shared = owned.group.size > 1
        self.te_tensors = TETensors((own.name, own.param, own.weight) for own in owned.weights)
        # Ids of the bucket groups that have not gathered the bytes of the last cast.
        self._due: set[int] = set()
        # The bucket group of each weight, keyed by id of the weight's state. Fixed.
        self._group_of = {
            id(weight_of(param).state): group for group in self._bucket_groups for param in primary_of(group)
        }
        primary = [param for group in self._bucket_groups for param in primary_of(group)]
        # Each QuantizedWeight with its state in the host's buffers, which `prepare` restores.
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
            # Megatron resets this after a backward pass. A forward pass between that and the step
            # would take the place of the one that gathers the bytes of the step.
            group.param_gather_dispatched = False
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
        """Wait for the gather of a weight, if one is in flight, and for its columnwise copies.

        Raises RuntimeError for bytes of a cast that was not gathered. With overlap_param_gather the
        next forward pass gathers them. Casts, gathers and loads may access them before.
        """
        group = self._group_of[id(weight.state)]
        self._finish(group)
        if id(group) in self._due and self._is_shared and not self._guard.validity.is_writing:
            raise not_gathered(weight, GATHER)

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
        # This runs at every read of a weight: without a gather it only looks whether the lock is
        # free.
        if group.param_gather_handle is None and self._guard.lock.acquire(blocking=False):
            self._guard.lock.release()
            return
        with self._guard.lock:
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
            self._guard.check(Use.READ)

    def _gathering(self, group: Any, name: str, make_copies: Callable[[], None]) -> Callable[..., Any]:
        """Wrap a method of the host that gathers: call `make_copies` once the bytes have
        arrived.
        """
        method = getattr(group, name)

        def gather(*args: Any, **kwargs: Any) -> Any:
            with self._guard.lock:
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
        raises_alone: True if an exception before a cast is raised on its rank only. That is so for
            an optimizer that owns whole matrices: its steps and loads have collectives of the host
            before the cast, in which the other ranks may be waiting.
    """

    owned: OwnedShare
    gathers: Gathers
    driver: CastDriver
    raises_alone: bool


def raising_on_all(shares: Sequence[AttachedShare]) -> AbstractContextManager[None]:
    """Raise an exception before a cast of `shares` on all ranks that share their masters, while the
    context is open.
    """
    raises_alone = any(share.raises_alone for share in shares)
    return raising_together([] if raises_alone else [share.driver for share in shares])
