"""MethodGuard: weights that a step, cast, gather or load left partial are neither used nor saved.

All weights of an attachment are partial together, since one step of the host writes them all. After
an interrupted write of masters or moments only a load helps. An interrupted cast or gather can be
repeated, since the masters are complete.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.group import Group
from zerocast.weight.validity import Use, Validity

from . import host

AGAIN = "weights may be of different steps; call attachment.refresh(), or load a checkpoint, or end the run if ranks have died"
ADVICE = (
    "the optimizer's step casts by itself; after masters were written by hand call attachment.refresh(), and with "
    "overlap_param_gather, before the next forward pass, ddp.start_param_sync(force_sync=True)"
)

Method = Callable[..., Any]


class GatherLock:
    """A lock by which one thread at a time is in the gathers of an attachment."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # The number of nested calls that hold the lock. `is_held` reads it without the lock.
        self._calls = 0

    @property
    def is_held(self) -> bool:
        """True if any thread starts or finishes a gather now."""
        return self._calls > 0

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock while the context is open."""
        with self._lock:
            self._calls += 1
            try:
                yield
            finally:
                self._calls -= 1


class MethodGuard:
    """Wraps methods of the host so that they check or write the validity of an attachment.

    Attributes:
        validity: the validity of all weights of an attachment. Its plans have parts of it.
        lock: held by the thread that starts or finishes gathers.
        is_preparing: True while a load is prepared. The host then calls its own load methods, on
            state that the real load overwrites.
    """

    def __init__(self, validity: Validity | None = None) -> None:
        self.validity = validity or Validity("load a checkpoint", recast_remedy=AGAIN, advice=ADVICE)
        self.lock = GatherLock()
        self.is_preparing = False

    def check(self, use: Use) -> None:
        """Raise RuntimeError if the weights are not valid for this use.

        Nothing is checked while a load is prepared: that reads state only to overwrite it.
        """
        if not self.is_preparing:
            self.validity.check(use)

    def checked(self, method: Method, use: Use) -> Method:
        """Wrap `method`: it raises if the weights are not valid for `use`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.check(use)
            return method(*args, **kwargs)

        return call

    def writing(self, method: Method, use: Use, what: str, *, masters: bool) -> Method:
        """Wrap `method` as `checked` does. An exception in it leaves the weights partial."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.check(use)
            with self.validity.transaction(what, masters=masters):
                return method(*args, **kwargs)

        return call

    def saving(self, method: Method, groups: Sequence[Group]) -> Method:
        """Wrap a method that all ranks of these groups call to save: while masters or weights are
        partial on one rank, it raises on all. The others would wait for that rank otherwise.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            if not host.is_loading(args, kwargs):
                self._check_save(groups)
            return method(*args, **kwargs)

        return call

    def _check_save(self, groups: Sequence[Group]) -> None:
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

    def loading(self, method: Method, load_and_cast: Method, loads_all: bool) -> Method:
        """Wrap a method that loads: `load_and_cast` calls it, then casts and gathers.

        A load of all optimizers makes partial weights complete.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            # One load of the host consists of several calls. A call inside another one, or one
            # without masters, completes nothing: the outer or the later call does.
            completes = not self.validity.partial or _holds_masters(host.argument_of_load(args, kwargs))
            if self.is_preparing or self.validity.is_writing or not completes:
                return method(*args, **kwargs)
            if not loads_all:
                self.check(Use.STEP)
            with self.validity.transaction("loading a checkpoint"):
                return load_and_cast(*args, **kwargs)

        return call


def _holds_masters(state: Any) -> bool:
    """Return True if `state` has the state of the parameters: masters and moments.

    `state` is the name of a file, or the state dict of one optimizer or of several.
    """
    if isinstance(state, dict) and "optimizer" not in state:
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        return all(map(_holds_masters, state))
    return not isinstance(state, dict) or "param_state" in state or "fp32_from_fp16_params" in state
