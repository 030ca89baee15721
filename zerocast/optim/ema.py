"""EMA: an exponential moving average of the FP32 masters, which is cast into the weights for
evaluation. Averages: all averages of one optimizer's masters, and the swap of one into the weights.

torch.optim.swa_utils averages parameters. Here parameters are low-precision copies, and an average
of them would not move, since the change of a step is smaller than the resolution of the format. So
each rank averages its shard of the masters, and the average is cast into the live weights in the
way that masters are.

While an average is swapped in, masters and average are exchanged bit by bit, without further
memory. Casts, checks and `zerocast.verify` then use the average in place of the masters. Calls that
would train from it, or save it as masters, raise while it is swapped in.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerocast.cast.host import CastDriver, StepCollectives
from zerocast.optim.gradients import GradientReducer
from zerocast.optim.state import ZeroState
from zerocast.weight.validity import Use

if TYPE_CHECKING:
    from zerocast.optim.zero_optimizer import ZeroOptimizer

BACKWARD = (
    "a backward pass within `with average.swapped()`, where the weights are cast from an average: evaluate under "
    "torch.no_grad(), and call zero_grad() of the optimizer"
)
OUTDATED = (
    "the optimizer has loaded other masters since this average was last loaded, so the average does not belong to them: call "
    "average.load_state_dict(...), or average.reset() to start from the current masters"
)


class EMA:
    """An exponential moving average of all masters of an optimizer. It starts at the masters, and
    after every step `average = decay * average + (1 - decay) * master`.

    Args:
        optimizer: the ZeroAdamW or ZeroMuon whose masters are averaged. It does not keep the
            average alive: hold on to this object.
        decay: between 0 and 1; may be changed between steps. `1 - 1 / n` at the n-th step gives the
            equal average of SWA.

    The average is FP32 and sharded like the masters: 4 bytes per parameter over all ranks, and one
    pass over them per step. Captured steps count, too. A step that is skipped for a gradient that
    is not finite does not change the average. Raises ValueError for a decay out of range.
    """

    def __init__(self, optimizer: "ZeroOptimizer", decay: float = 0.999) -> None:
        self.decay = decay
        self._averages = optimizer.averages
        # This rank's part of the average, flat f32 like the masters.
        self._average = self._averages.masters.clone()
        # The count of steps taken before the current step.
        self._count = self._averages.count.clone()
        # True from the beginning of a step until the average has followed it. Ctrl-C between the
        # step and the average leaves it True.
        self._is_behind = False
        # True if the optimizer has loaded masters that differ from the averaged ones.
        self._outdated = False
        # True if the average was loaded and the masters were not yet.
        self._loaded = False
        self._resets = 0
        # This comes last, since steps then call the average.
        self._averages.add(self)

    @property
    def decay(self) -> float:
        """The factor of the average in a step."""
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        if not (math.isfinite(decay) and 0 <= decay <= 1):
            raise ValueError(f"the decay of an average must be in [0, 1], got {decay}")
        self._decay = decay

    def before_step(self) -> str:
        """Called before a step. Returns a text that ranks compare, since they average elements of
        the same weights. Raises RuntimeError if the average does not belong to the masters of this
        step.
        """
        self._check_current()
        self._loaded = False
        self._count.copy_(self._averages.count)
        self._is_behind = True
        return f", averaged by {self._decay:.9g} since reset {self._resets}"

    def after_step(self) -> None:
        """Called after a step. Only the device knows if it was skipped."""
        taken = self._averages.count != self._count
        self._average.lerp_(self._averages.masters, taken.float().mul_(1 - self._decay).view(()))
        self._is_behind = False

    def masters_loaded(self) -> None:
        """Called after masters were loaded. An average that was loaded just before belongs to
        these.
        """
        self._outdated = self._outdated or not self._loaded
        self._loaded = False
        self._is_behind = False

    def masters_added(self, averages: "Averages", complete: Callable[[Tensor], Tensor]) -> None:
        """Called after parameters were added to the optimizer, whose averages `averages` then are.
        The average of added parameters starts at their masters: `complete` converts a flat tensor
        from the previous layout of the masters to the current one, and fills these in.
        """
        self._averages = averages
        self._average = complete(self._average)

    @torch.no_grad()
    def reset(self) -> None:
        """Start again from the current masters."""
        self._averages.check_not_swapped(Use.LOAD)
        self._average.copy_(self._averages.masters)
        self._resets += 1
        self._is_behind = False
        self._outdated = False
        self._loaded = False

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """A context in which the model's weights, including plain parameters, hold the average.
        Afterwards they have their previous values, bit by bit.

        All ranks enter and leave it together: the average is cast and gathered, and so are the
        masters at the end. With delayed scaling the weights are cast with the live scales, and the
        amax history does not change. Backward passes, steps, loads and saves of the optimizer raise
        inside the context. An exception in the body propagates after the weights were restored. An
        exception while weights are written leaves them partial until a state is loaded; the average
        is not changed.
        """
        with self._averages.swapped(self._check_current, self._exchange):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the average keyed by parameter name, f32 in the logical shape, as
        `optimizer.state_dict()["model"]` holds the masters.

        The tensors are views. torch.distributed.checkpoint saves them, and loads in place on any
        number of ranks; so does the `extra` of a checkpoint. Pass a state that was loaded in place
        to `load_state_dict`, which records that it was loaded.
        """
        self._averages.check_not_swapped(Use.SAVE)
        self._check_current()
        return {"model": self._averages.state.masters_of(self._average)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, before or after the optimizer loads its own state.

        Raises ValueError on every rank, with nothing changed, if names are missing or shapes
        differ.
        """
        self._averages.check_not_swapped(Use.LOAD)
        self._averages.state.load_masters(state_dict.get("model", {}), self._average)
        # If the optimizer has already loaded its masters, the average belongs to these. If not, it
        # belongs to the masters that the optimizer loads next.
        self._loaded = not self._outdated
        self._is_behind = False
        self._outdated = False

    def _check_current(self) -> None:
        """Raise RuntimeError for an average of other masters. If the last step was interrupted
        after it, and before the average had followed, let it follow now.
        """
        if self._outdated:
            raise RuntimeError(OUTDATED)
        if self._is_behind and not self._averages.is_partial:
            with torch.no_grad():
                self.after_step()

    def _exchange(self) -> None:
        """Exchange masters and average without allocating memory. If this is interrupted, both must
        be loaded again.
        """
        outdated = self._outdated
        self._outdated = True
        masters = self._averages.masters.view(torch.int32)
        average = self._average.view(torch.int32)
        masters.bitwise_xor_(average)
        average.bitwise_xor_(masters)
        masters.bitwise_xor_(average)
        self._outdated = outdated


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
        self._all: weakref.WeakSet[EMA] = weakref.WeakSet()
        # True while one of them is swapped in.
        self._swapped = False

    @property
    def is_partial(self) -> bool:
        """True after a write of the masters that failed partway."""
        return self._driver.plan.validity.partial is not None

    def add(self, average: EMA) -> None:
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
        """Call `before_step` of all averages, and return their texts as one. Raises RuntimeError,
        with nothing changed, if a step would be wrong.
        """
        return "".join(sorted(map(EMA.before_step, self._all)))

    def after_step(self) -> None:
        """Call `after_step` of all averages."""
        for average in self._all:
            average.after_step()

    def masters_loaded(self) -> None:
        """Call `masters_loaded` of all averages."""
        for average in self._all:
            average.masters_loaded()

    @contextlib.contextmanager
    def swapped(self, check: Callable[[], None], exchange: Callable[[], None]) -> Iterator[None]:
        """A context in which the weights are cast from exchanged masters. `exchange` replaces the
        masters, and is called again at the end to restore them. A RuntimeError of `check` on one
        rank is raised on all, and so are partial weights.
        """
        validity = self._driver.plan.validity
        problem: RuntimeError | None = validity.partial
        if problem is None:
            validity.check(Use.SWAP)
        self._reducer.check_same_call("swaps an average in")
        try:
            check()
        except RuntimeError as error:
            problem = problem or error
        self._driver.ready(problem=problem)
        if self._driver.plan.problem is not None:
            self._driver.join_collectives("swapping an average in", StepCollectives())
        version = validity.version
        # An exception at any moment swaps the average out again, or leaves everything partial, so
        # that nothing trains from it.
        try:
            with torch.no_grad(), validity.transaction("swapping an average in"):
                exchange()
                try:
                    self._driver.refresh()
                except BaseException:
                    exchange()
                    raise
                self._swapped = True
            validity.changed()
            self._reducer.refusal = BACKWARD
            yield
        finally:
            if self._swapped:
                try:
                    self._swap_out(exchange)
                except BaseException:
                    validity.failed_partway("swapping an average out")
                    raise
                finally:
                    self._swapped = False
                validity.version = version

    def _swap_out(self, exchange: Callable[[], None]) -> None:
        self._reducer.refusal = ""
        self._reducer.check_same_call("swaps an average out")
        with torch.no_grad(), self._driver.plan.validity.transaction("swapping an average out"):
            exchange()
            self._driver.refresh()
