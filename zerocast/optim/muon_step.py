"""Muon's update of the matrices that this rank owns in whole, by torch's own function.

Momentum, the orthogonalization by Newton-Schulz (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/) and the adjustment of the learning rate are
`torch.optim.Muon`'s, over FP32 masters and FP32 momentum, in whatever version of torch runs. What
is added is the factor of a clip, and that a step with a gradient that is not finite is undone on
the device, which alone knows of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import muon

from zerocast.distributed.group import Group
from zerocast.optim.bucket import Bucket
from zerocast.optim.flat_masters import FlatMasters

ARGUMENTS = ("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")


@dataclass(frozen=True)
class Matrix:
    """One matrix, or one of a stack: its parameter group, where its gradient starts in this rank's
    shard, and its f32 `[m, n]` master and momentum, views of the flat tensors.
    """

    param_group: int
    start: int
    master: Tensor
    momentum_buffer: Tensor


class MuonStep:
    """One step of all matrices of this rank, one after the other, with the hyper-parameters that
    their groups have then.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        masters: FlatMasters,
        param_groups: Sequence[Mapping[str, Any]],
        group: Group,
    ) -> None:
        self._param_groups = param_groups
        self._matrices = [m for b in buckets if b.storage.whole for m in _matrices(b, masters, group)]

    def __call__(self, gradients: Tensor, clip: Tensor, skip: Tensor) -> None:
        """Step with this rank's flat f32 `gradients` times `clip`, f32[1]; nothing changes where
        `skip`, bool[1], holds True.

        The host waits for a learning rate that is a tensor on a device, as torch's does. Beside a
        matrix there are three more of its size in FP32 for as long as it is stepped, and what
        Newton-Schulz takes in bf16.
        """
        for matrix in self._matrices:
            master, momentum_buffer = matrix.master, matrix.momentum_buffer
            before = master.clone(), momentum_buffer.clone()
            part = gradients[matrix.start : matrix.start + master.numel()]
            group = self._param_groups[matrix.param_group]
            muon(
                [master],
                [part.view(master.shape) * clip],
                [momentum_buffer],
                lr=float(group["lr"]),
                weight_decay=float(group["weight_decay"]),
                has_complex=False,
                **{name: group[name] for name in ARGUMENTS},
            )
            for now, then in zip((master, momentum_buffer), before, strict=True):
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


def _matrices(bucket: Bucket, masters: FlatMasters, group: Group) -> Iterator[Matrix]:
    """The matrices of a bucket that this rank owns."""
    for slot in bucket.slots:
        span, views = masters.owned(bucket, slot)
        if not span.numel:
            continue
        assert span.numel == slot.numel, slot.name
        _, start = bucket.owned(slot, group.rank)
        shape = torch.Size(slot.shape[-2:])
        master, momentum = (views[name].view(-1, *shape).unbind() for name in ("master", "momentum_buffer"))
        for number, pair in enumerate(zip(master, momentum, strict=True)):
            yield Matrix(slot.param_group, start + number * shape.numel(), *pair)
