"""FSDP2's gradients as FP8 on the wire, through the interface that torch has for it.

`FSDPModule.set_custom_reduce_scatter` takes an object that allocates memory for FSDP2, and that
FSDP2 calls in place of its reduce-scatter, on the stream of its reductions. That call has all
arguments that ours needs: the gradients of a unit in `reduce_dtype`, one part per rank, the group,
and whether to average.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.gradient_wire import RankOrderReduceScatter, check_grad_wire
from zerocast.distributed.group import Group
from zerocast.fsdp2 import torch_fsdp


def set_grad_wire(model: nn.Module, grad_wire: str | None) -> None:
    """Set how the gradients of every FSDP module within `model` are sent: with None as FSDP2
    reduces them, with "fp8_1x128" as E4M3 codes with one FP32 scale for 128 elements
    (docs/formats/fp8_1x128.md).

    Call it on all ranks after `fully_shard`. The owner adds in FP32 in rank order, and rounds once
    to the `reduce_dtype` of the policy. Groups of 128 are counted in the elements that a unit of
    FSDP2 sends to one rank, so other units or numbers of ranks round differently. FSDP2 does not
    reduce over a shard group of one rank, and nothing is rounded then. The all-reduce of HSDP's
    replicas follows in `reduce_dtype`, as before.

    Raises ValueError for an unknown name, for settings that differ between ranks, on all of them,
    and for a model that `fully_shard` has not sharded: there another program reduces the gradients.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(
            "set_grad_wire needs a model that fully_shard has sharded: other frameworks reduce gradients themselves"
        )
    problem = None
    try:
        check_grad_wire(grad_wire)
    except ValueError as error:
        problem = error
    for group in {id(group): group for group in torch_fsdp.reduction_groups(model)}.values():
        validate_across_ranks(Group.of(group), [], problem, "sets grad_wire", {"grad_wire": grad_wire})
    reduce_scatter: Any = _ReduceScatter(grad_wire) if grad_wire else torch_fsdp.default_reduce_scatter()
    for module in modules:
        module.set_custom_reduce_scatter(reduce_scatter)


class _ReduceScatter:
    """The reduce-scatter that FSDP2 calls. It keeps nothing between calls but the name of the wire
    format.
    """

    def __init__(self, wire: str) -> None:
        self._wire = wire

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for gradients that are reduced, and for the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's part of the sum, or of the mean, of `input_tensor` over the ranks."""
        divisors = {dist.ReduceOp.SUM: 1, dist.ReduceOp.AVG: group.size()}
        divisor = next((divisor for known, divisor in divisors.items() if op == known), None)
        if divisor is None:
            raise RuntimeError(
                "set_gradient_divide_factor asks for a product with each gradient, which fp8_1x128 does not carry: "
                "scale the loss, or set_grad_wire(model, None)"
            )
        what = "the gradients of an FSDP unit"
        reduction = RankOrderReduceScatter(input_tensor, Group.of(group), self._wire, None, what)
        is_exact = output_tensor.dtype is torch.float32
        exact = output_tensor if is_exact else torch.empty_like(output_tensor, dtype=torch.float32)
        reduction.land(exact, divisor, adds=False)
        if not is_exact:
            output_tensor.copy_(exact)
