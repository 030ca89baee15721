"""DeviceStep: what of an optimizer step runs on the device, from this rank's reduced gradients to cast weights.

Nothing in it waits for the device or asks the host, so a CUDA graph can hold all of it; whether a step is skipped is known on the
device only. What the host does before and after a step is in `zero_adamw.py`.
"""

import torch
from torch import Tensor

from zerocast.cast.adam_update import AdamUpdate
from zerocast.cast.hyperparameters import Hyperparameters
from zerocast.distributed.group import Group
from zerocast.optim.masters import Masters
from zerocast.optim.norm import LogicalOrder, clip_factor, square_sum
from zerocast.optim.weights import ShardedWeights


class DeviceStep:
    """Norm, clip, skip, and the update with its cast.

    Args:
        gradients: this rank's averaged gradients, flat f32 like the masters.
        order: that of a deterministic norm, or None for the library's.

    `count` and `skipped`, int64[1], are the steps taken and skipped; `clip`, f32[1], is what the gradients of the coming step are
    multiplied by, 1 again after it; `clipped` says that the host asked for it, outside of a graph.
    """

    def __init__(
        self,
        gradients: Tensor,
        masters: Masters,
        weights: ShardedWeights,
        hyperparameters: Hyperparameters,
        order: LogicalOrder | None,
        group: Group,
    ) -> None:
        self._gradients, self._masters, self._weights = gradients, masters, weights
        self._hyperparameters, self._order, self._group = hyperparameters, order, group
        self.count = torch.zeros(1, dtype=torch.int64, device=gradients.device)
        self.skipped = torch.zeros_like(self.count)
        self.clip = torch.ones(1, dtype=torch.float32, device=gradients.device)
        self.clipped = False

    def square_sum(self) -> Tensor:
        """Sum of squares of the averaged gradient, f64[], the same on every rank."""
        if self._order:
            return self._order.square_sum(self._gradients)
        return square_sum(self._gradients, self._group)

    def clip_to(self, max_norm: float, norm: Tensor) -> None:
        """Let the update scale gradients of f32[] `norm` so that it becomes at most `max_norm`."""
        self.clip.copy_(clip_factor(norm, max_norm))

    def apply_clip(self) -> bool:
        """Scale the gradients now, since somebody reads or changes them before the update. False if there was nothing to scale."""
        clipped, self.clipped = self.clipped, False
        if clipped:
            self._gradients.mul_(self.clip)
            self.clip.fill_(1.0)
        return clipped

    def update(self, square_sum: Tensor) -> None:
        """Adam, and the cast of what the masters become. A sum that is not finite changes nothing but `skipped`."""
        skip = ~square_sum.isfinite().view(1)
        self.count += ~skip
        self.skipped += skip
        masters, scalars = self._masters, self._hyperparameters.scalars(self.count)
        update = AdamUpdate(self._gradients, masters.exp_avg, masters.exp_avg_sq, scalars, self.clip)
        self._weights.plan.launch(skip=skip, update=update)
        self.clip.fill_(1.0)
