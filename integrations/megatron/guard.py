"""MethodGuard: nothing uses or saves what a step, a cast, a gather or a load left partial.

All weights of an attachment are partial together, since one step of the host writes them all. A
write of masters or moments that broke off needs a load; a cast or a gather can be repeated.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from zerocast.integrations.host_adapter import Patch
from zerocast.weight.write_guard import WriteGuard

from . import host, ownership
from .checkpoint import saving_unpadded
from .inner_state import copy_group_steps, filling_states, prepare_states, reading_states
from .validate import check_checkpoint

AGAIN = "weights may be of different steps; call attachment.refresh(), or load a checkpoint, or end the run if ranks have died"
RELOAD = "masters, moments and weights may be of different steps; load a checkpoint, or end the run if ranks have died"

Method = Callable[..., Any]


READ = ("step", "state_dict", "save_parameter_state")  # refused while weights are partial
LOAD = ("load_state_dict", "load_parameter_state")  # complete them


class MethodGuard:
    """Wraps methods of the host, which share `writes` with the plans of an attachment."""

    def __init__(self, writes: WriteGuard | None = None) -> None:
        self.writes = writes or WriteGuard(RELOAD, recast_remedy=AGAIN)
        self.is_preparing = False  # a load: the host loads of itself what it will overwrite

    def check_complete(self) -> None:
        """RuntimeError while masters or weights are partial, unless a load is prepared, which reads
        what it will overwrite.
        """
        if not self.is_preparing:
            self.writes.check_complete()

    def patches(
        self,
        optimizer: Any,
        distributed: Sequence[Any],
        refreshes: Mapping[int, Callable[[], None]],
        after_step: Callable[[], None],
    ) -> Iterator[Patch]:
        """Guard whatever steps, saves and loads.

        `optimizer` is the one that was given to `attach`, `distributed` are those inside it, and
        `refreshes` cast and gather the weights of each of these, by its id.
        """
        for one in (one for one in distributed if ownership.of(one).saves_shards):
            yield Patch(one, "_set_main_param_and_optimizer_states", filling_states(one))
            yield Patch(one, "_get_main_param_and_optimizer_states", reading_states(one))
            yield Patch(one, "sharded_state_dict", saving_unpadded(one))
        for one in {id(one): one for one in (optimizer, *distributed)}.values():
            loads_all = one is optimizer or len(distributed) == 1
            loaded = distributed if loads_all else [one]
            refreshed = list(refreshes.values()) if loads_all else [refreshes[id(one)]] if id(one) in refreshes else []
            step = self.writing(one.step_with_ready_grads, "an optimizer step", masters=True)
            yield Patch(one, "step_with_ready_grads", followed_by(step, after_step) if one is optimizer else step)
            owns = ownership.of(one)
            yield from (Patch(one, name, self.checked(getattr(one, name))) for name in (*READ, *owns.saves))
            yield Patch(one, "sharded_state_dict", self.saving(one.sharded_state_dict, distributed))
            yield from (
                Patch(one, name, self.loading(getattr(one, name), refreshed, loaded, loads_all))
                for name in (*LOAD, *owns.loads)
            )

    def refresh(self, refreshes: Iterable[Callable[[], None]]) -> None:
        """Cast and gather, also what a cast or a gather left partial.

        RuntimeError where masters are partial.
        """
        if self.writes.has_partial_masters:
            self.check_complete()
        with self.writes.transaction("a cast", masters=False):
            for refresh in refreshes:
                refresh()

    def checked(self, method: Method) -> Method:
        """`method`, refused while anything is partial."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.check_complete()
            return method(*args, **kwargs)

        return call

    def writing(self, method: Method, what: str, *, masters: bool) -> Method:
        """`method`, refused while anything is partial; an exception leaves everything partial."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.check_complete()
            with self.writes.transaction(what, masters=masters):
                return method(*args, **kwargs)

        return call

    def saving(self, sharded_state_dict: Method, optimizers: Sequence[Any]) -> Method:
        """The host's method, refused while anything is partial, unless it makes what a load
        fills.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            for one in optimizers:
                check_checkpoint(one, kwargs.get("metadata"))
            if not host.is_loading(args, kwargs):
                self.check_complete()
                return sharded_state_dict(*args, **kwargs)
            with contextlib.nullcontext() if self.writes.is_partial else self.writes.transaction("preparing a load"):
                prepare_states(optimizers)
                before, self.is_preparing = self.is_preparing, True
                try:
                    # rewrites states, some of them to one tensor
                    template = sharded_state_dict(*args, **kwargs)
                finally:
                    self.is_preparing = before
                copy_group_steps(optimizers)
                return template

        return call

    def loading(
        self, method: Method, refreshes: Sequence[Callable[[], None]], optimizers: Sequence[Any], loads_all: bool
    ) -> Method:
        """A method of the host that loads `optimizers`, then `refreshes`.

        A load of all optimizers completes what is partial.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_preparing or self.writes.is_open or (self.writes.is_partial and not _holds_masters(args[0])):
                return method(*args, **kwargs)  # a part of a load, or of preparing one
            if not loads_all:
                self.check_complete()
            with self.writes.transaction("loading a checkpoint"):
                result = method(*args, **kwargs)
                copy_group_steps(optimizers)
                for refresh in refreshes:
                    refresh()
                return result

        return call


def _holds_masters(loaded: Any) -> bool:
    """True if what is loaded, a file's name or a state dict of one or several optimizers, holds the
    state of the parameters.
    """
    if isinstance(loaded, dict) and "optimizer" not in loaded:
        loaded = list(loaded.values())
    if isinstance(loaded, (list, tuple)):
        return all(map(_holds_masters, loaded))
    return not isinstance(loaded, dict) or "param_state" in loaded or "fp32_from_fp16_params" in loaded


def followed_by(first: Method, second: Callable[[], None]) -> Method:
    """`first`, then `second`, which is not called if `first` raises."""

    def both(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        second()
        return result

    return both
