"""Bytes of each parameter, measured on the live buffers and the collectives that ran."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import zerocast
from zerocast.metrics import TrafficCounter


def count_parameters(model: nn.Module) -> int:
    """Count the elements of all parameters; a tied matrix counts once."""
    return sum(p.numel() for p in model.parameters())


def parameters_as_read(model: nn.Module) -> Iterator[Tensor]:
    """Yield every parameter as products read it; under FSDP2 modules are gathered one at a time."""
    sharded: list[tuple[str, Any]] = [(name, m) for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    if not sharded:
        yield from model.parameters()
    # the innermost
    owner = {name: module for prefix, module in sharded for name, _ in module.named_parameters(prefix)}
    for prefix, module in sharded:
        module.unshard()
        for name, parameter in module.named_parameters(prefix):
            if owner[name] is module:
                yield parameter.to_local() if isinstance(parameter, DTensor) else parameter
        module.reshard()


def forward_buffers(parameter: Tensor) -> list[Tensor]:
    """List the tensors that the forward pass reads: codes and scales, or the parameter itself."""
    if isinstance(parameter, zerocast.QuantizedWeight):
        return [b for b in (parameter.rowwise_data, parameter.rowwise_scale_inv) if b is not None]
    return [parameter.detach()]


def resident_buffers(parameter: Tensor) -> list[Tensor]:
    """List `forward_buffers` and the copies for the backward pass.

    Under FSDP2 they exist only while the parameter is gathered, and copies for the backward pass
    are not kept.
    """
    if isinstance(parameter, zerocast.QuantizedWeight):
        columnwise = (parameter.columnwise_data, parameter.columnwise_scale_inv)
        return forward_buffers(parameter) + [b for b in columnwise if b is not None]
    return [parameter.detach()]


def digest_of_weights(model: nn.Module) -> str:
    """Return the SHA-256 of all bytes that the forward pass reads of the parameters."""
    digest = hashlib.sha256()
    for parameter in parameters_as_read(model):
        for buffer in forward_buffers(parameter):
            # FSDP2 could not free the memory that a numpy array has seen, so hash a copy.
            copy = buffer.detach().to("cpu", copy=True).contiguous()
            digest.update(copy.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def bytes_per_parameter(model: nn.Module) -> dict[str, float]:
    """Return the mean bytes per parameter that the forward pass reads, and that are resident."""
    count = forward = resident = 0
    for parameter in parameters_as_read(model):
        count += parameter.numel()
        forward += _nbytes(forward_buffers(parameter))
        resident += _nbytes(resident_buffers(parameter))
    return {"forward": forward / count, "resident": resident / count}


def products(model: nn.Module) -> list[str]:
    """Return how products of the quantized weights run now: `dequantize` rounds weights only, every
    other path quantizes inputs too (`zerocast.gemm`).
    """
    weights = (p for p in parameters_as_read(model) if isinstance(p, zerocast.QuantizedWeight))
    return sorted({str(weight.gemm_choice().path) for weight in weights})


def traffic_counter(model: nn.Module) -> TrafficCounter:
    """Count the bytes of collectives while entered; all-gathers of weights are `weight_gather`."""
    if isinstance(model, FSDPModule):
        return TrafficCounter(None)
    return TrafficCounter(buffer for p in model.parameters() for buffer in resident_buffers(p))


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
