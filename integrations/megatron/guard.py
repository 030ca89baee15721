"""Guard: what a step, a cast, a gather or a load that raised half-way leaves is not used and not saved until it is whole again.

All weights of an attachment are torn together, since one step of the host writes them all. Whatever has written masters or moments
leaves them to a load; a cast or a gather can be made again.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zerocast.weight.freshness import Freshness

from .inner_state import make_ready, take_steps
from .refusal import refuse_checkpoint

AGAIN = "weights may be of different steps; call attachment.refresh(), or load a checkpoint, or end the run if ranks have died"
RELOAD = "masters, moments and weights may be of different steps; load a checkpoint, or end the run if ranks have died"

Method = Callable[..., Any]


class Guard:
    """Over the weights of one attachment; `watch` names their Freshness, one a plan."""

    def __init__(self) -> None:
        self._watched: list[Freshness] = []
        self._remedy = ""
        self._preparing = self._writing = False

    def watch(self, freshness: Freshness) -> None:
        """Weights of this plan are torn when any are."""
        self._watched.append(freshness)

    @property
    def is_torn(self) -> bool:
        """Whether something died while it wrote, and nothing has been written whole since."""
        return any(freshness.is_torn for freshness in self._watched)

    def tear(self, torn: str, remedy: str) -> None:
        """Weights are torn as an attachment before this one has left them."""
        self._remedy = remedy
        for freshness in self._watched:
            freshness.torn = torn

    @property
    def torn(self) -> tuple[str | None, str]:
        """What died while it wrote, and which remedy there is; None and nothing where all is whole."""
        said = next((freshness.torn for freshness in self._watched if freshness.is_torn), None)
        return said, self._remedy if said else ""

    def loads(self) -> bool:
        """Whether what is being loaded is a checkpoint, and not what the host loads of itself to prepare for one."""
        return not self._preparing

    def check_whole(self) -> None:
        """RuntimeError while masters or weights are torn; not while a load is prepared, which reads what it will overwrite."""
        for freshness in () if self._preparing else self._watched:
            freshness.check_whole()

    @contextlib.contextmanager
    def writing(self, what: str, remedy: str) -> Iterator[None]:
        """Within, `what` writes; an exception leaves everything torn, and `remedy` says what makes it whole."""
        if self._writing:
            yield  # a part of something larger
            return
        self._writing, self._remedy = True, remedy
        try:
            with contextlib.ExitStack() as stack:
                for freshness in self._watched:
                    stack.enter_context(freshness.writing(what, remedy))
                yield
        finally:
            self._writing = False

    def checked(self, method: Method) -> Method:
        """`method`, refused while anything is torn."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.check_whole()
            return method(*args, **kwargs)

        return call

    def writer(self, method: Method, what: str, remedy: str) -> Method:
        """`method`, refused while anything is torn; what it raises leaves everything torn."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.check_whole()
            with self.writing(what, remedy):
                return method(*args, **kwargs)

        return call

    def refresh(self, method: Method) -> None:
        """Cast and gather by `method`, also what a cast or a gather has torn; RuntimeError where masters are torn."""
        if self._remedy == RELOAD:
            self.check_whole()
        with self.writing("a cast", AGAIN):
            method()

    def sharded_state_dict(self, method: Method, optimizers: Sequence[Any]) -> Method:
        """The host's `sharded_state_dict`: refused while anything is torn, unless it makes what a load fills."""

        def call(*args: Any, **kwargs: Any) -> Any:
            for one in optimizers:
                refuse_checkpoint(one, kwargs.get("metadata"))
            if not is_loading(args, kwargs):
                self.check_whole()
                return method(*args, **kwargs)
            with contextlib.nullcontext() if self.is_torn else self.writing("preparing a load", RELOAD):
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
        """A method of the host that loads `optimizers`, then `refresh`; if those are all it makes whole what is torn."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._preparing or self._writing or (self.is_torn and not _holds_masters(args[0])):
                return method(*args, **kwargs)  # a part of a load, or of preparing one
            if not of_all:
                self.check_whole()
            with self.writing("loading a checkpoint", RELOAD):
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
