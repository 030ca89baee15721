"""Clipping of gradients within the pass of FusedAdamW over them.

torch.nn.utils.clip_grad_norm_ reads all gradients for their norm, then reads and writes them to
scale them, through DTensor's dispatch. Here only the norm is computed, from local parts, and the
step multiplies each gradient by the factor as it reads it, which gives the same bits.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from zerocast.distributed.group import Group
from zerocast.fsdp2.parameter import flat_local
from zerocast.optim.norm import clip_factor

CHANGED = (
    "gradients have changed since clip_grad_norm_ of this optimizer: call it after the last backward pass of a step, and after "
    "GradScaler.unscale_ and changes by hand"
)


class PendingClip(NamedTuple):
    """A factor for the gradients of the coming step.

    Attributes:
        factor: f32[1].
        gradients: the gradients whose norm has given it, each with its version.
    """

    factor: Tensor
    gradients: list[tuple["weakref.ref[Tensor]", tuple[int, int]]]

    @staticmethod
    def of(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> "PendingClip":
        """Return the clip of gradients of f32[] `norm` to at most `max_norm`."""
        versions = [(weakref.ref(gradient), _version(gradient)) for gradient in gradients]
        return PendingClip(clip_factor(norm, max_norm), versions)

    def check(self, gradients: Sequence[Tensor]) -> None:
        """Raise ValueError unless these are the gradients that were clipped, unchanged."""
        same = len(gradients) == len(self.gradients) and all(
            clipped() is gradient and version == _version(gradient)
            for gradient, (clipped, version) in zip(gradients, self.gradients, strict=True)
        )
        if not same:
            raise ValueError(CHANGED)


def total_norm(parameters: Iterable[Any]) -> Tensor:
    """Return the 2-norm of the gradients of `parameters` over all ranks, f32[]. Collective.

    Sums are f64. The communication library chooses their order. Raises ValueError for a gradient
    that is not sharded like its parameter.
    """
    # Parameters without a gradient count too: every rank reduces the same sums in the same order.
    by_layout: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, list[Tensor]] = {}
    device = torch.device("cpu")
    for parameter in parameters:
        device = parameter.device
        sharded = isinstance(parameter, DTensor)
        present = by_layout.setdefault((parameter.device_mesh, parameter.placements) if sharded else None, [])
        if parameter.grad is None:
            continue
        if sharded and parameter.grad.placements != parameter.placements:
            raise ValueError(
                f"the gradient of a parameter that is laid out as {parameter.placements} is laid out as {parameter.grad.placements}"
            )
        present.append(flat_local(parameter.grad))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for layout, gradients in by_layout.items():
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float64) if gradients else [total.new_zeros(())]
        square_sum = torch.stack(norms).square().sum()
        for group in _groups_that_shard(*layout) if layout else ():
            group.all_reduce_sum(square_sum, "the gradient norm")
        total += square_sum
    return total.sqrt().float()


def _groups_that_shard(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> list[Group]:
    """Return the groups of this rank along the dimensions of a mesh that split a tensor."""
    groups = mesh.get_all_groups()
    split = [group for group, placement in zip(groups, placements, strict=True) if not placement.is_replicate()]
    return [Group.of(group) for group in split]


def _version(gradient: Tensor) -> tuple[int, int]:
    # Operators of a DTensor advance its own counter alone, those of its local part the other.
    return gradient._version, flat_local(gradient)._version
