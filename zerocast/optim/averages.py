"""Averages: what follows the masters of one optimizer, and the swap of an average into its weights.

While an average is looked at, masters and average change places, bit by bit and without further
memory; casts, checks and `zerocast.verify` then take the average for the masters. What would train
from it, or save it as masters, raises meanwhile. `ema.py` has the average that users make.
"""

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from zerocast.cast.host import CastDriver
from zerocast.optim.gradients import GradientReducer
from zerocast.optim.state import ZeroState
from zerocast.weight.validity import Use

BACKWARD = (
    "a backward pass within `with average.swapped()`, where weights are those of an average: evaluate under torch.no_grad(), and "
    "call zero_grad() of the optimizer"
)


class Average(ABC):
    """Something that follows the masters of an optimizer, which calls it."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The text that all ranks must have alike."""

    @abstractmethod
    def before_step(self) -> None:
        """RuntimeError where a step would be wrong, such as for an average of other masters."""

    @abstractmethod
    def after_step(self) -> None:
        """The masters have changed, unless the step was skipped: only the device knows."""

    @abstractmethod
    def masters_loaded(self) -> None:
        """The masters are others now."""


class Averages:
    """The averages of one optimizer's masters, and whether one of them is swapped in. It keeps
    none of them alive.
    """

    def __init__(
        self,
        masters: Tensor,
        count: Tensor,
        state: ZeroState,
        driver: CastDriver,
        reducer: GradientReducer,
    ) -> None:
        self.masters, self.count, self.state = masters, count, state
        self._driver, self._reducer = driver, reducer
        self._all: weakref.WeakSet[Average] = weakref.WeakSet()
        self._swapped = False

    def add(self, average: Average) -> None:
        """Let it follow the masters from now on."""
        self.check_not_swapped(Use.SWAP)
        self._all.add(average)

    def check_not_swapped(self, use: Use) -> None:
        """RuntimeError while the weights are those of an average."""
        if self._swapped:
            raise RuntimeError(
                f"{use.value} within `with average.swapped()`, where masters and weights are those of an average: leave it first"
            )

    @property
    def description(self) -> str:
        """The text of all averages that all ranks must have alike."""
        return "".join(sorted(f", averaged {average.description}" for average in self._all))

    def before_step(self) -> None:
        """RuntimeError, with nothing changed, where a step would be wrong."""
        for average in self._all:
            average.before_step()

    def after_step(self) -> None:
        """The masters have changed, unless the step was skipped."""
        for average in self._all:
            average.after_step()

    def masters_loaded(self) -> None:
        """The masters are others now."""
        for average in self._all:
            average.masters_loaded()

    @contextlib.contextmanager
    def swapped(self, exchange: Callable[[], None]) -> Iterator[None]:
        """Within, the weights are cast from what `exchange` makes the masters; it is called
        again to undo that.
        """
        validity = self._driver.plan.validity
        validity.check(Use.SWAP)
        self._reducer.check_same_call("swaps an average in")
        self._driver.ready()
        version = validity.version
        with torch.no_grad(), validity.transaction("swapping an average in"):
            exchange()
            try:
                self._driver.refresh()
            except BaseException:
                exchange()
                raise
        validity.changed()
        self._swapped, self._reducer.refusal = True, BACKWARD
        try:
            yield
        finally:
            self._swapped, self._reducer.refusal = False, ""
            self._reducer.check_same_call("swaps an average out")
            with torch.no_grad(), validity.transaction("swapping an average out"):
                exchange()
                self._driver.refresh()
            validity.version = version
