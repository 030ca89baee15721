"""Guard: what a step, a cast, a gather or a load that raised half-way leaves is neither used nor saved.

All weights of an attachment share one WriteGuard, since one step of the host writes them all. What
broke off while it wrote masters or moments needs a load; a cast or a gather can be made again.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerocast.weight.write_guard import WriteGuard

from .inner_state import make_ready, take_steps
from .refusal import refuse_checkpoint

AGAIN = "weights may be of different steps; call attachment.refresh(), or load a checkpoint, or end the run if ranks have died"
RELOAD = "masters, moments and weights may be of different steps; load a checkpoint, or end the run if ranks have died"

Method = Callable[..., Any]


class Guard:
    """Over the weights of one attachment, whose plans share its `writes`."""

    def __init__(self, writes: WriteGuard | None = None) -> None:
        self.writes = writes or WriteGuard(
            RELOAD, recast_remedy=AGAIN
        )  # that of an attachment before, if it is partial
        self._preparing = False

    def loads(self) -> bool:
        """Whether what is being loaded is a checkpoint, and not what the host loads of itself to prepare for one."""
        return not self._preparing

    def check_complete(self) -> None:
        """RuntimeError while masters or weights are partial; not while a load is prepared, which reads what it will overwrite."""
        if not self._preparing:
            self.writes.check_complete()

    def checked(self, method: Method) -> Method:
        """`method`, refused while anything is partial."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.check_complete()
            return method(*args, **kwargs)

        return call

    def writer(self, method: Method, what: str, *, masters: bool) -> Method:
        """`method`, refused while anything is partial; what it raises leaves everything partial."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.check_complete()
            with self.writes.transaction(what, masters=masters):
                return method(*args, **kwargs)

        return call

    def refresh(self, method: Method) -> None:
        """Cast and gather by `method`, also what a cast or a gather has left partial; RuntimeError where masters are partial."""
        if self.writes.has_partial_masters:
            self.check_complete()
        with self.writes.transaction("a cast", masters=False):
            method()

    def sharded_state_dict(self, method: Method, optimizers: Sequence[Any]) -> Method:
        """The host's `sharded_state_dict`: refused while anything is partial, unless it makes what a load fills."""

        def call(*args: Any, **kwargs: Any) -> Any:
            for one in optimizers:
                refuse_checkpoint(one, kwargs.get("metadata"))
            if not is_loading(args, kwargs):
                self.check_complete()
                return method(*args, **kwargs)
            with contextlib.nullcontext() if self.writes.is_partial else self.writes.transaction("preparing a load"):
                make_ready(optimizers)
                before, self._preparing = self._preparing, True
                try:
                    template = method(*args, **kwargs)  # which rewrites states, some of them to one tensor
                finally:
                    self._preparing = before
                take_steps(optimizers)
                return template

        return call

    def loader(self, method: Method, refresh: Callable[[], None], optimizers: Sequence[Any], of_all: bool) -> Method:
        """A method of the host that loads `optimizers`, then `refresh`; if those are all it makes whole what is partial."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._preparing or self.writes.is_open or (self.writes.is_partial and not _holds_masters(args[0])):
                return method(*args, **kwargs)  # a part of a load, or of preparing one
            if not of_all:
                self.check_complete()
            with self.writes.transaction("loading a checkpoint"):
                result = method(*args, **kwargs)
                take_steps(optimizers)
                refresh()
                return result

        return call


def is_loading(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `sharded_state_dict` is called for what a load fills."""
    return bool(kwargs.get("is_loading", args[1] if len(args) > 1 else False))


def _holds_masters(loaded: Any) -> bool:
    """Whether what is loaded has the parameters' state in it: a file of it, or a state dict of one or of several optimizers."""
    if isinstance(loaded, dict) and "optimizer" not in loaded:
        loaded = list(loaded.values())
    if isinstance(loaded, (list, tuple)):
        return all(map(_holds_masters, loaded))
    return not isinstance(loaded, dict) or "param_state" in loaded
