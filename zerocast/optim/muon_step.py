"""Muon's update of the matrices that this rank owns in whole, by torch's own optimizer.

Momentum, the orthogonalization by Newton-Schulz (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/) and the adjustment of the learning rate are those of
`torch.optim.Muon`, over FP32 masters and FP32 momentum, in whatever version of torch runs: one of
them steps each matrix. The function behind it would have less around it, but is private, and its
arguments have changed before. What is added is the factor of a clip, and that a step with a
gradient that is not finite is undone on the device, which alone knows of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zerocast.distributed.group import Group
from zerocast.optim.bucket import Bucket, Layout
from zerocast.optim.flat_masters import FlatMasters
from zerocast.optim.gradient_exchange import GradientExchange, owned_matrices

ARGUMENTS = ("weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
STATE = "momentum_buffer"


@dataclass(frozen=True)
class SteppedMatrix:
    """One matrix, or one of a stack: its parameter group, its f32 `[m, n]` master, a view of the
    flat masters, and torch's Muon for it, whose momentum is one of the flat momentum.
    """

    param_group: int
    master: nn.Parameter
    muon: torch.optim.Muon

    @staticmethod
    def of(param_group: int, master: Tensor, momentum_buffer: Tensor) -> "SteppedMatrix":
        """A matrix whose master and momentum lie there."""
        parameter = nn.Parameter(master)
        muon = torch.optim.Muon([parameter])
        muon.state[parameter][STATE] = momentum_buffer
        return SteppedMatrix(param_group, parameter, muon)

    def step(self, gradient: Tensor, group: Mapping[str, Any]) -> None:
        """One step with an f32 `[m, n]` gradient and the hyper-parameters of a parameter group."""
        self.muon.param_groups[0].update({name: group[name] for name in ARGUMENTS}, lr=float(group["lr"]))
        self.master.grad = gradient
        self.muon.step()
        self.master.grad = None


class MuonStep:
    """One step of all matrices of this rank, one after the other, with the hyper-parameters that
    their groups have then. `limit`: elements of gradients that a rank is sent at a time.
    """

    def __init__(
        self,
        layout: Layout,
        masters: FlatMasters,
        param_groups: Sequence[Mapping[str, Any]],
        group: Group,
        limit: int,
    ) -> None:
        self._param_groups = param_groups
        self._exchange = GradientExchange(layout, group, limit)
        self._matrices = [m for b in layout.buckets if b.storage.whole for m in _matrices(b, masters, group)]

    def __call__(self, gradients: Tensor, clip: Tensor, skip: Tensor) -> None:
        """Step with this rank's flat f32 shard of the `gradients` times `clip`, f32[1]; nothing
        changes where `skip`, bool[1], holds True. Collective calls, of ranks without a matrix too.

        The host waits for a learning rate that is a tensor on a device, as torch's does. Beside a
        matrix there are three more of its size in FP32 for as long as it is stepped, and what
        Newton-Schulz takes in bf16; on several ranks also the gradients that were sent together.
        """
        left = iter(self._matrices)
        self._exchange.deliver(gradients, lambda gradient: self._step(next(left), gradient, clip, skip))
        assert next(left, None) is None

    def _step(self, matrix: SteppedMatrix, gradient: Tensor, clip: Tensor, skip: Tensor) -> None:
        master = matrix.master.detach()
        held = master, matrix.muon.state[matrix.master][STATE]
        before = [tensor.clone() for tensor in held]
        matrix.step(gradient.view(master.shape) * clip, self._param_groups[matrix.param_group])
        for now, then in zip(held, before, strict=True):
            torch.where(skip, then, now, out=now)


def newton_schulz_flops(shape: Sequence[int], steps: int) -> int:
    """Operations of Newton-Schulz for a matrix, or all of a stack: each step takes products of
    m x n with n x m, m x m with m x m, and m x m with m x n, m being the smaller side.
    """
    *stack, rows, columns = shape
    m, n = sorted((rows, columns))
    flops = steps * (4 * m * m * n + 2 * m**3)
    for count in stack:
        flops *= count
    return flops


def _matrices(bucket: Bucket, masters: FlatMasters, group: Group) -> Iterator[SteppedMatrix]:
    """The matrices of a bucket that this rank owns, in the order of `owned_matrices`."""
    for owner, (slot, where) in owned_matrices(bucket):
        if owner != group.rank:
            continue
        span, views = masters.owned(bucket, slot)
        assert span.numel == slot.numel, slot.name
        master, momentum = (views[name][where.start : where.stop].view(slot.shape[-2:]) for name in ("master", STATE))
        yield SteppedMatrix.of(slot.param_group, master, momentum)
