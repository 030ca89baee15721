"""Bytes a parameter, measured and not computed: from the live buffers and from the collectives that really ran."""

from torch import Tensor, nn

import zerocast
from zerocast.metrics import TrafficCounter


def count_parameters(model: nn.Module) -> int:
    """Count the elements of all parameters; a tied matrix counts once."""
    return sum(p.numel() for p in model.parameters())


def forward_buffers(parameter: nn.Parameter) -> list[Tensor]:
    """List what the forward pass reads of a parameter: codes and scales of a quantized weight, else the parameter."""
    if isinstance(parameter, zerocast.QuantizedWeight):
        return [b for b in (parameter.rowwise_data, parameter.rowwise_scale_inv) if b is not None]
    return [parameter.detach()]


def resident_buffers(parameter: nn.Parameter) -> list[Tensor]:
    """List all that stays of a parameter between steps: `forward_buffers` and the copies for the backward pass."""
    if isinstance(parameter, zerocast.QuantizedWeight):
        columnwise = (parameter.columnwise_data, parameter.columnwise_scale_inv)
        return forward_buffers(parameter) + [b for b in columnwise if b is not None]
    return [parameter.detach()]


def bytes_per_parameter(model: nn.Module) -> dict[str, float]:
    """Weigh all parameters, quantized or not: bytes that the forward pass reads, and bytes that are resident."""
    count = count_parameters(model)
    return {
        "forward": sum(_nbytes(forward_buffers(p)) for p in model.parameters()) / count,
        "resident": sum(_nbytes(resident_buffers(p)) for p in model.parameters()) / count,
    }


def traffic_counter(model: nn.Module) -> TrafficCounter:
    """Count bytes of collectives while entered, those into the buffers of parameters as `weight_gather`."""
    return TrafficCounter(buffer for p in model.parameters() for buffer in resident_buffers(p))


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
