"""Freshness: which cast the copies of a weight belong to.

One `Freshness` is shared by all weights of a plan: a step marks every weight with one write,
whatever their number, and a read compares and refuses what is stale. Columnwise copies are compared
always. In debug mode (`set_debug`) every read also looks whether the masters have changed since
their last cast: at their version counters, and at steps of torch optimizers over them, since fused
ones move no counter. Neither sees writes of masters through `.data` or by foreign kernels;
`zerocast.verify` sees everything. Weights that are served to an inference engine are looked at in
this way from then on, whatever the mode (`Freshness.observe`).

Weights whose last write broke off are not read either: `guard` knows (`write_guard.py`).
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from zerocast.weight.write_guard import WriteGuard

CAST = "call plan.cast() after the masters change, then all-gather the bytes and call plan.post_all_gather()"


_versions = itertools.count()


@dataclass(eq=False)
class Freshness:
    """Counters of casts. `finish(weight)` completes a gather in flight; `rebuild(weight)` makes
    columnwise copies on demand.

    `sharded` says whether other ranks hold masters too, `advice` which call makes weights fresh. A
    weight outlives its optimizer: nothing here keeps masters alive.
    """

    guard: WriteGuard = field(default_factory=WriteGuard)
    cast: int = 0
    columnwise: int = -1  # the cast that the columnwise copies of all of them were made from
    finish: Callable[[Any], None] | None = None
    rebuild: Callable[[Any], None] | None = None
    # a weak reference to what shows the masters to `zerocast.verify`
    owner: Callable[[], Any] | None = None
    # somebody casts the weights from masters, and so trains whatever parameters stand for them
    has_masters: bool = False
    sharded: bool = False
    advice: str = CAST
    # changes with the values of the weights, as far as their owner calls `change`
    version: int = field(default_factory=lambda: next(_versions))
    _masters: "list[weakref.ref[Tensor]]" = field(default_factory=list, init=False)
    # the masters' version counters at the last cast, in debug mode
    _versions: list[int] | None = field(default=None, init=False)
    _stepped: bool = field(default=False, init=False)
    _before_step: int = field(default=0, init=False)
    _observed: bool = field(default=False, init=False)

    def observe(self) -> None:
        """Notice from the next cast on, as in debug mode, when masters change without a cast."""
        if self.has_masters and not self._observed:
            self._observed = True
            if not _observers:
                _observers.extend(_step_hooks(lambda freshness: freshness._observed))

    def watch(self, masters: Sequence[Tensor], sharded: bool) -> None:
        """These masters are what the weights are cast from, at present and from now on."""
        self._masters, self.sharded = [weakref.ref(master) for master in masters], sharded
        _watched.add(self)
        self._note()

    def count_cast(self) -> None:
        """The weights hold a cast of the masters as they are now."""
        self.cast += 1
        self._note()

    def change(self) -> None:
        """The weights have other values than before: an optimizer has stepped, or loaded."""
        self.version = next(_versions)

    def check_recorded(self, recorded: "tuple[Freshness, int] | None") -> None:
        """RuntimeError in a backward pass through a product of a forward pass, whose (freshness,
        version) were these, if the weight has changed since. None for one that a compiler records.
        """
        if recorded is not None and recorded[0] is self and recorded[1] != self.version:
            raise RuntimeError(
                "a backward pass through a forward pass of before the last change of its weights (an optimizer step, a load, or "
                "an average that was swapped): the gradients of inputs would be those of other weights, so run it before that, "
                "or run the forward pass again"
            )

    def stale_masters(self) -> str | None:
        """The change of the masters since their last cast that debug mode has seen, or None."""
        if self._stepped:
            return "an optimizer has stepped over its masters since its last cast"
        for master, version in zip(self._masters, self._versions or (), strict=False):
            alive = master()
            if alive is not None and alive._version != version:
                return "its masters have been written since its last cast"
        return None

    def is_cast_from(self, places: set[int]) -> bool:
        """True if a master lies in one of these storages."""
        held = [reference() for reference in self._masters]
        return any(master is not None and _place(master) in places for master in held)

    def before_step(self) -> None:
        """An optimizer over these masters begins a step."""
        self._before_step = self.cast

    def after_step(self) -> None:
        """It has ended; a cast by a hook of its own has come before this."""
        self._stepped |= self.cast == self._before_step

    def _note(self) -> None:
        self._stepped, self._versions = False, None
        if _hooks or self._observed:
            held = [reference() for reference in self._masters]
            self._versions = [-1 if master is None else master._version for master in held]


_watched: "weakref.WeakSet[Freshness]" = weakref.WeakSet()
_hooks: list[RemovableHandle] = []  # the hooks of debug mode, while it is on
_observers: list[RemovableHandle] = []  # the same for what is observed, once anything is


def debugging() -> bool:
    """True if debug mode is on."""
    return bool(_hooks) and not torch.compiler.is_compiling()


def set_debug(enabled: bool) -> None:
    """Debug mode: a product with, or `dequantize` of, a weight whose bytes are older than its
    master raises, whoever changed that.

    The RuntimeError says which call is missing. It costs a look at every master's version counter a
    read, and covers what is cast from now on. Meant for a new training loop; off by default.
    """
    for handle in _hooks:
        handle.remove()
    _hooks.clear()
    if enabled:
        _hooks.extend(_step_hooks(lambda _: True))


def _step_hooks(concerns: Callable[[Freshness], bool]) -> list[RemovableHandle]:
    """Let every step of a torch optimizer tell the Freshness of its masters."""

    def each(optimizer: torch.optim.Optimizer, call: Callable[[Freshness], None]) -> None:
        found = [freshness for freshness in list(_watched) if concerns(freshness)]
        if found:
            stepped = {_place(parameter) for group in optimizer.param_groups for parameter in group["params"]} - {0}
            for freshness in found:
                if freshness.is_cast_from(stepped):
                    call(freshness)

    return [
        register_optimizer_step_pre_hook(lambda optimizer, *_: each(optimizer, Freshness.before_step)),
        register_optimizer_step_post_hook(lambda optimizer, *_: each(optimizer, Freshness.after_step)),
    ]


def _place(tensor: Tensor) -> int:
    """Zero for what has no memory of its own, as tensor subclasses may have none."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, torch.nn.Parameter) else 0
