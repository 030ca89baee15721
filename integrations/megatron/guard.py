"""MethodGuard: nothing uses or saves what a step, a cast, a gather or a load left partial.

All weights of an attachment are partial together, since one step of the host writes them all. A
write of masters or moments that broke off needs a load; a cast or a gather can be repeated.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from zerocast.integrations.host_adapter import Patch
from zerocast.weight.validity import Use, Validity

from . import host, ownership
from .checkpoint import saving_unpadded
from .inner_state import copy_group_steps, filling_states, prepare_states, reading_states
from .validate import check_checkpoint

AGAIN = "weights may be of different steps; call attachment.refresh(), or load a checkpoint, or end the run if ranks have died"
ADVICE = (
    "the optimizer's step casts by itself; after masters were written by hand call attachment.refresh(), and with "
    "overlap_param_gather, before the next forward pass, ddp.start_param_sync(force_sync=True)"
)

Method = Callable[..., Any]


# refused while weights are partial
USES = {"step": Use.STEP, "state_dict": Use.SAVE, "save_parameter_state": Use.SAVE}
LOAD = ("load_state_dict", "load_parameter_state")  # complete them


class MethodGuard:
    """Wraps methods of the host. `validity` is that of all weights of an attachment, of which its
    plans have parts.
    """

    def __init__(self, validity: Validity | None = None) -> None:
        self.validity = validity or Validity("load a checkpoint", recast_remedy=AGAIN, advice=ADVICE)
        self.is_preparing = False  # a load: the host loads of itself what it will overwrite

    def check(self, use: Use) -> None:
        """RuntimeError for weights that may not be used so, unless a load is prepared, which reads
        what it will overwrite.
        """
        if not self.is_preparing:
            self.validity.check(use)

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
            step = self.writing(one.step_with_ready_grads, Use.STEP, "an optimizer step", masters=True)
            yield Patch(one, "step_with_ready_grads", followed_by(step, after_step) if one is optimizer else step)
            owns = ownership.of(one)
            uses = USES | dict.fromkeys(owns.saves, Use.SAVE)
            yield from (Patch(one, name, self.checked(getattr(one, name), use)) for name, use in uses.items())
            yield Patch(one, "sharded_state_dict", self.saving(one.sharded_state_dict, distributed))
            yield from (
                Patch(one, name, self.loading(getattr(one, name), refreshed, loaded, loads_all))
                for name in (*LOAD, *owns.loads)
            )

    def refresh(self, refreshes: Iterable[Callable[[], None]]) -> None:
        """Cast and gather, also what a cast or a gather left partial.

        RuntimeError where masters are partial.
        """
        if self.validity.has_partial_masters:
            self.check(Use.STEP)
        with self.validity.transaction("a cast", masters=False):
            for refresh in refreshes:
                refresh()

    def checked(self, method: Method, use: Use) -> Method:
        """`method`, which uses weights so, refused where they may not be."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.check(use)
            return method(*args, **kwargs)

        return call

    def writing(self, method: Method, use: Use, what: str, *, masters: bool) -> Method:
        """`method`, refused where weights may not be used so; an exception leaves them partial."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.check(use)
            with self.validity.transaction(what, masters=masters):
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
                self.check(Use.SAVE)
                return sharded_state_dict(*args, **kwargs)
            with contextlib.nullcontext() if self.validity.partial else self.validity.transaction("preparing a load"):
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
            if self.is_preparing or self.validity.is_writing or (self.validity.partial and not _holds_masters(args[0])):
                return method(*args, **kwargs)  # a part of a load, or of preparing one
            if not loads_all:
                self.check(Use.STEP)
            with self.validity.transaction("loading a checkpoint"):
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
