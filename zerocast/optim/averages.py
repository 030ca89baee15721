"""Averages: the averages of one optimizer's masters, and the swap of an average into the weights.

While an average is swapped in, masters and average are exchanged bit by bit, without further
memory. Casts, checks and `zerocast.verify` then use the average in place of the masters. Calls that
would train from it, or save it as masters, raise while it is swapped in. `ema.py` has the average
for users.
"""

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from zerocast.cast.host import CastDriver, StepCollectives
from zerocast.optim.gradients import GradientReducer
from zerocast.optim.state import ZeroState
from zerocast.weight.validity import Use

BACKWARD = (
    "a backward pass within `with average.swapped()`, where the weights are cast from an average: evaluate under "
    "torch.no_grad(), and call zero_grad() of the optimizer"
)


class Average(ABC):
    """An average of the masters of an optimizer, which calls these methods."""

    @property
    @abstractmethod
    def description(self) -> str:
        """A text that ranks compare."""

    @abstractmethod
    def before_step(self) -> None:
        """Called before a step. Raises RuntimeError if the step would be wrong, for example because
        the average belongs to different masters.
        """

    @abstractmethod
    def after_step(self) -> None:
        """Called after a step. If it was skipped, the masters have not changed; only the device
        knows.
        """

    @abstractmethod
    def masters_loaded(self) -> None:
        """Called after masters were loaded."""

    @abstractmethod
    def masters_added(self, averages: "Averages", complete: Callable[[Tensor], Tensor]) -> None:
        """Called after parameters were added to the optimizer, whose averages `averages` then are.
        `complete` converts a flat tensor from the previous layout of the masters to the current
        one, and fills in the masters of the added parameters.
        """


class Averages:
    """The averages of one optimizer's masters. It does not keep them alive.

    Attributes:
        masters: the flat f32 masters of this rank.
        count: int64[1], the steps taken.
        state: maps parameter names to parts of a flat tensor.
    """

    def __init__(
        self,
        masters: Tensor,
        count: Tensor,
        state: ZeroState,
        driver: CastDriver,
        reducer: GradientReducer,
    ) -> None:
        self.masters = masters
        self.count = count
        self.state = state
        self._driver = driver
        self._reducer = reducer
        self._all: weakref.WeakSet[Average] = weakref.WeakSet()
        # True while one of them is swapped in.
        self._swapped = False

    def add(self, average: Average) -> None:
        """Register an average, so that the optimizer calls its methods."""
        self.check_not_swapped(Use.SWAP)
        self._all.add(average)

    def move_to(self, averages: "Averages", complete: Callable[[Tensor], Tensor]) -> None:
        """Move all averages to `averages`, which replaces this object after parameters were added
        to the optimizer.
        """
        for average in self._all:
            average.masters_added(averages, complete)
            averages.add(average)

    def check_not_swapped(self, use: Use) -> None:
        """Raise RuntimeError while an average is swapped in."""
        if self._swapped:
            raise RuntimeError(
                f"{use.value} within `with average.swapped()`, where masters and weights hold an average: leave the context first"
            )

    def before_step(self) -> str:
        """Call `before_step` of all averages. Returns their descriptions, as one text that ranks
        compare. Raises RuntimeError, with nothing changed, if a step would be wrong.
        """
        descriptions = []
        for average in self._all:
            average.before_step()
            descriptions.append(f", averaged {average.description}")
        return "".join(sorted(descriptions))

    def after_step(self) -> None:
        """Call `after_step` of all averages."""
        for average in self._all:
            average.after_step()

    def masters_loaded(self) -> None:
        """Call `masters_loaded` of all averages."""
        for average in self._all:
            average.masters_loaded()

    @contextlib.contextmanager
    def swapped(self, exchange: Callable[[], None]) -> Iterator[None]:
        """A context in which the weights are cast from exchanged masters. `exchange` replaces the
        masters, and is called again at the end to restore them.
        """
        validity = self._driver.plan.validity
        validity.check(Use.SWAP)
        self._reducer.check_same_call("swaps an average in")
        self._driver.ready()
        if self._driver.plan.problem is not None:
            self._driver.join_collectives("swapping an average in", StepCollectives())
        version = validity.version
        with torch.no_grad(), validity.transaction("swapping an average in"):
            exchange()
            try:
                self._driver.refresh()
            except BaseException:
                exchange()
                raise
        validity.changed()
        self._swapped = True
        self._reducer.refusal = BACKWARD
        try:
            yield
        finally:
            self._swapped = False
            self._reducer.refusal = ""
            self._reducer.check_same_call("swaps an average out")
            with torch.no_grad(), validity.transaction("swapping an average out"):
                exchange()
                self._driver.refresh()
            validity.version = version
