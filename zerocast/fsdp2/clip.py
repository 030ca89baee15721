"""Clipping of the gradients of a FusedAdamW by their norm, on local parts.

torch.nn.utils.clip_grad_norm_ does the same through DTensor's dispatch, which takes the CPU's time
for every gradient.

The step could multiply gradients as it reads them. But torch's clips and GradScaler.unscale_ change
DTensors without advancing a version, so a factor that waits for the step could become wrong without
a sign of it.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from zerocast.distributed.group import Group
from zerocast.fsdp2.parameter import check_layout, flat_local
from zerocast.optim.norm import clip_factor


def clip_grad_norm_(parameters: Iterable[Any], max_norm: float) -> Tensor:
    """Scale the gradients of `parameters` so that their 2-norm over all ranks is at most
    `max_norm`. Return the norm before, f32[]. Collective.

    Sums are f64. The communication library chooses their order. Raises ValueError for a gradient
    that is not laid out like its parameter, and RuntimeError for one that is not contiguous; on
    other ranks the norm is NaN then.
    """
    # Parameters without a gradient count too: every rank reduces the same sums in the same order.
    by_layout: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, list[Tensor]] = {}
    device = torch.device("cpu")
    problem: Exception | None = None
    for parameter in parameters:
        device, sharded = parameter.device, isinstance(parameter, DTensor)
        present = by_layout.setdefault((parameter.device_mesh, parameter.placements) if sharded else None, [])
        if parameter.grad is None:
            continue
        try:
            check_layout(parameter)
            present.append(flat_local(parameter.grad))
        except (RuntimeError, ValueError) as error:
            # The others wait for this rank's sums.
            problem = error
            present.append(torch.full((), math.nan, device=device))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for layout, gradients in by_layout.items():
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float64) if gradients else [total.new_zeros(())]
        square_sum = torch.stack(norms).square().sum()
        for group in _groups_that_shard(*layout) if layout else ():
            group.all_reduce_sum(square_sum, "the gradient norm")
        total += square_sum
    if problem is not None:
        raise problem
    norm = total.sqrt().float()
    factor = clip_factor(norm, max_norm)[0]
    for gradients in by_layout.values():
        if gradients:
            torch._foreach_mul_(gradients, factor)
    return norm


def _groups_that_shard(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> list[Group]:
    """Return the groups of this rank along the dimensions of a mesh that split a tensor."""
    groups = mesh.get_all_groups()
    split = [group for group, placement in zip(groups, placements, strict=True) if not placement.is_replicate()]
    return [Group.of(group) for group in split]
