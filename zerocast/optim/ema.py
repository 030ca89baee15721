"""EMA: an exponential moving average of the FP32 masters, cast into the weights to be looked at.

torch.optim.swa_utils averages parameters. Here parameters are low-precision copies, in which an
average would stand still: what a step adds is smaller than what the format resolves. So masters are
averaged, each rank its shard, and the average is cast into the live weights as masters are.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zerocast.optim.averages import Average
from zerocast.optim.zero_optimizer import ZeroOptimizer
from zerocast.weight.validity import Use

OUTDATED = (
    "the optimizer has loaded masters and this average has not, so it is an average of others: load its own state "
    "(average.load_state_dict), or call average.reset() to start from the masters as they are"
)


class EMA(Average):
    """`average = decay * average + (1 - decay) * master` after every step, for all masters of
    `optimizer`; starts at the masters.

    Args:
        optimizer: the ZeroAdamW or ZeroMuon whose masters are averaged. It does not keep the
            average alive: hold on to this object.
        decay: between 0 and 1; may be changed between steps. `1 - 1 / n` at the n-th step gives the
            equal average of SWA.

    FP32, sharded like the masters: 4 bytes a parameter over all ranks, and one pass over them a
    step. Captured steps count too. A step that was skipped for a gradient that is not finite
    changes nothing here either. ValueError for a decay out of range.
    """

    def __init__(self, optimizer: ZeroOptimizer, decay: float = 0.999) -> None:
        self.decay = decay
        self._averages = optimizer.averages
        self._average = self._averages.masters.clone()
        self._count = self._averages.count.clone()
        self._outdated = self._loaded = False
        self._resets = 0
        self._averages.add(self)  # whole: steps call it from now on

    @property
    def decay(self) -> float:
        """How much of the average a step keeps."""
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        if not (math.isfinite(decay) and 0 <= decay <= 1):
            raise ValueError(f"the decay of an average lies between 0 and 1, got {decay}")
        self._decay = decay

    @property
    def description(self) -> str:
        """The text that all ranks must have alike: they average elements of the same weights."""
        return f"by {self._decay:.9g} since reset {self._resets}"

    def before_step(self) -> None:
        """The optimizer calls this. RuntimeError for an average of other masters than those that
        step now.
        """
        self._check_current()
        self._loaded = False
        self._count.copy_(self._averages.count)

    def after_step(self) -> None:
        """The optimizer calls this. Whether the step was skipped is known on the device only."""
        taken = self._averages.count != self._count
        self._average.lerp_(self._averages.masters, taken.float().mul_(1 - self._decay).view(()))

    def masters_loaded(self) -> None:
        """The optimizer calls this. An average that was loaded just before belongs to the
        masters that are loaded now.
        """
        self._outdated, self._loaded = self._outdated or not self._loaded, False

    @torch.no_grad()
    def reset(self) -> None:
        """Start anew from the masters as they are."""
        self._averages.check_not_swapped(Use.LOAD)
        self._average.copy_(self._averages.masters)
        self._resets += 1
        self._outdated = self._loaded = False

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Within, the model's weights, plain parameters too, are those of the average; afterwards
        those of before, bit by bit.

        All ranks enter and leave it together: the average is cast and gathered, and the masters
        again at the end. Where scaling is delayed, weights are cast with the scales of the live
        ones, and it does not move on. Backward passes, steps, loads and saves of the optimizer
        raise meanwhile. An exception inside is raised on, with the weights as they were; one while
        weights are written leaves them partial until a state is loaded, and the average as it was.
        """
        self._check_current()
        with self._averages.swapped(self._exchange):
            yield

    def state_dict(self) -> dict[str, Any]:
        """The average by parameter name, f32 in the logical shape, as
        `optimizer.state_dict()["model"]` holds the masters.

        The tensors are views: torch.distributed.checkpoint saves them, and loads in place on any
        number of ranks; so does the `extra` of a checkpoint. Give what was loaded in place to
        `load_state_dict`, which then knows of it.
        """
        self._averages.check_not_swapped(Use.SAVE)
        self._check_current()
        return {"model": self._averages.state.masters_of(self._average)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, before or after the optimizer loads its own state.

        ValueError on every rank, with nothing changed, for missing names and other shapes.
        """
        self._averages.check_not_swapped(Use.LOAD)
        self._averages.state.load_masters(state_dict.get("model", {}), self._average)
        # in advance of the optimizer, or after it
        self._outdated, self._loaded = False, not self._outdated

    def _check_current(self) -> None:
        if self._outdated:
            raise RuntimeError(OUTDATED)

    def _exchange(self) -> None:
        """Masters and average change places. Nothing is allocated; what is interrupted in here
        must be loaded anew.
        """
        outdated, self._outdated = self._outdated, True
        masters, average = (flat.view(torch.int32) for flat in (self._averages.masters, self._average))
        masters.bitwise_xor_(average)
        average.bitwise_xor_(masters)
        masters.bitwise_xor_(average)
        self._outdated = outdated
