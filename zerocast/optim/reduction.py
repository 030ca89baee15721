"""Reductions of buckets: the buffer that fills, the collective on its way, and its result.

While buckets fill, `IdleParameters` counts which parameters get no gradient.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast.distributed.group import Flight, Group
from zerocast.optim.bucket import Bucket
from zerocast.optim.reduced_gradient import GradientPart

logger = logging.getLogger(__name__)
PATIENCE = 100  # backward passes without a gradient, until a parameter is called idle


class Reduction:
    """One bucket on its way: the filled buffer, and this rank's part of the result."""

    def __init__(
        self,
        bucket: Bucket,
        group: Group,
        filling: "Filling",
        result: Tensor,
        deterministic: bool,
        adds: bool,
        what: str,
    ) -> None:
        full = filling.buffer
        self.bucket, self.full, self.result, self.adds, self._forgotten = bucket, full, result, adds, filling.forgotten
        self._ranks, self._deterministic = group.size, deterministic
        collective = group.all_to_all if deterministic else group.reduce_scatter_mean
        self._work: Flight | None = collective(result, full, async_op=True, what=what)

    def is_complete(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> Tensor:
        """The mean over the ranks; deterministic: added in rank order in FP32."""
        if self._work is not None:
            self._work.wait()
        if not self._deterministic:
            return self.result
        first, *others = self.result.view(self._ranks, -1).unbind()
        total = first.float()
        for part in others:
            total = total + part.float()
        return total / self._ranks

    def land(self, flat: Tensor) -> None:
        """Put the result into this rank's flat shard, or add it to what is there."""
        mean = self.wait()
        target = flat[self.bucket.start : self.bucket.start + self.bucket.shard_numel]
        for part in self._forgotten:
            flat[part.start : part.start + part.span.numel].zero_()
        target.add_(mean) if self.adds else target.copy_(mean)


class Filling:
    """A bucket that backward hooks are filling. What was reduced before of `forgotten` parts is
    not added to.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.arrived: set[int] = set()
        self.forgotten: list[GradientPart] = []


class Buffers:
    """Spare buffers of buckets, by dtype."""

    def __init__(self, buckets: Sequence[Bucket], device: torch.device) -> None:
        self._buckets, self._device = buckets, device
        self._spare: list[Tensor] = []

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back, which is free again."""
        self._spare.append(buffer)

    def take(self, bucket: Bucket, numel: int) -> Tensor:
        """The first `numel` elements of a spare buffer; a new one has room for any bucket of the
        dtype, so that all are alike.
        """
        dtype = bucket.storage.grad_dtype
        largest = (
            max(b.shard_numel for b in self._buckets if b.storage.grad_dtype == dtype) * numel // bucket.shard_numel
        )
        for index, buffer in enumerate(self._spare):
            if buffer.dtype == dtype:
                return self._spare.pop(index).as_strided((numel,), (1,), 0)
        return torch.empty(largest, dtype=dtype, device=self._device)[:numel]


class IdleParameters:
    """Counts the backward passes since each parameter's last gradient on this rank.

    Experts without tokens and frozen phases are idle rightly, so this warns, and once. A parameter
    that was replaced in the model is idle too.
    """

    def __init__(self) -> None:
        self._passes: dict[str, int] = {}  # of parameters without a gradient in the last pass
        self._warned = False

    def note(self, name: str, has_gradient: bool) -> None:
        """A backward pass that is reduced has brought a gradient of this parameter, or none."""
        if has_gradient:
            if self._passes:
                self._passes.pop(name, None)
            return
        self._passes[name] = self._passes.get(name, 0) + 1
        if self._passes[name] > PATIENCE and not self._warned:
            self._warned = True
            idle = [other for other, passes in self._passes.items() if passes >= PATIENCE]
            logger.warning(
                "%d parameters of a ZeroAdamW got no gradient on this rank in %d backward passes, the first is %s: they are "
                "unused, frozen or no longer parameters of the model (this is said once)",
                len(idle),
                PATIENCE,
                idle[0],
            )
