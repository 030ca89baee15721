"""Bytes a parameter, measured and not computed: from the live buffers and from the collectives that really ran."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import zerocast
from zerocast.metrics import TrafficCounter


def count_parameters(model: nn.Module) -> int:
    """Count the elements of all parameters; a tied matrix counts once."""
    return sum(p.numel() for p in model.parameters())


def parameters_as_read(model: nn.Module) -> Iterator[Tensor]:
    """Give every parameter as products read it: under FSDP2 one module after another is gathered, and sharded again."""
    sharded: list[tuple[str, Any]] = [(name, m) for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    if not sharded:
        yield from model.parameters()
    owner = {name: module for prefix, module in sharded for name, _ in module.named_parameters(prefix)}  # the innermost
    for prefix, module in sharded:
        module.unshard()
        for name, parameter in module.named_parameters(prefix):
            if owner[name] is module:
                yield parameter.to_local() if isinstance(parameter, DTensor) else parameter
        module.reshard()


def forward_buffers(parameter: Tensor) -> list[Tensor]:
    """List what the forward pass reads of a parameter: codes and scales of a quantized weight, else the parameter."""
    if isinstance(parameter, zerocast.QuantizedWeight):
        return [b for b in (parameter.rowwise_data, parameter.rowwise_scale_inv) if b is not None]
    return [parameter.detach()]


def resident_buffers(parameter: Tensor) -> list[Tensor]:
    """List all that is kept of a parameter to compute with: `forward_buffers` and copies for the backward pass.

    Under FSDP2 only while it is gathered, and there copies for the backward pass are not kept.
    """
    if isinstance(parameter, zerocast.QuantizedWeight):
        columnwise = (parameter.columnwise_data, parameter.columnwise_scale_inv)
        return forward_buffers(parameter) + [b for b in columnwise if b is not None]
    return [parameter.detach()]


def bytes_per_parameter(model: nn.Module) -> dict[str, float]:
    """Weigh all parameters, quantized or not: bytes that the forward pass reads, and bytes that are resident."""
    count = forward = resident = 0
    for parameter in parameters_as_read(model):
        count += parameter.numel()
        forward += _nbytes(forward_buffers(parameter))
        resident += _nbytes(resident_buffers(parameter))
    return {"forward": forward / count, "resident": resident / count}


def traffic_counter(model: nn.Module) -> TrafficCounter:
    """Count bytes of collectives while entered, those that gather weights as `weight_gather`; FSDP2 gathers nothing else."""
    if isinstance(model, FSDPModule):
        return TrafficCounter(None)
    return TrafficCounter(buffer for p in model.parameters() for buffer in resident_buffers(p))


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
