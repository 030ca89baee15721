"""Averages: the averages that follow the masters of one optimizer, and the swap of one into its
weights.

While an average is swapped in, masters and average have changed places, bit by bit and without
further memory. Casts, checks and `zerocast.verify` then take the average for the masters. Calls
that would train from it, or save it as masters, raise meanwhile. `ema.py` has the average that
users make.
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
        """The text of this average that all ranks must have alike."""

    @abstractmethod
    def before_step(self) -> None:
        """RuntimeError if a step would be wrong, such as for an average of other masters."""

    @abstractmethod
    def after_step(self) -> None:
        """Follow masters that have changed, unless the step was skipped, which only the device
        knows.
        """

    @abstractmethod
    def masters_loaded(self) -> None:
        """Follow masters that were loaded."""


class Averages:
    """The averages of one optimizer's masters, none of which it keeps alive.

    Attributes:
        masters: f32, flat: all masters of this rank.
        count: i64[1], the steps taken.
        state: reads and writes the optimizer's state by name.
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
        # True while one of them is swapped in.
        self._swapped = False

    def add(self, average: Average) -> None:
        """Let an average follow the masters from now on."""
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
        """RuntimeError, with nothing changed, if a step would be wrong."""
        for average in self._all:
            average.before_step()

    def after_step(self) -> None:
        """Let all averages follow masters that have changed, unless the step was skipped."""
        for average in self._all:
            average.after_step()

    def masters_loaded(self) -> None:
        """Let all averages follow masters that were loaded."""
        for average in self._all:
            average.masters_loaded()

    @contextlib.contextmanager
    def swapped(self, exchange: Callable[[], None]) -> Iterator[None]:
        """Cast the weights from an average while the context is open.

        `exchange` swaps masters and average. It is called once more at the end.
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
