"""Options and parameters of Apex's optimizer that are not supported, and why."""

import gc
from typing import Any

import torch
from torch import Tensor

from zerocast import QuantizedWeight

_OPTIONS = (
    (
        "overlap_param_sync",
        "it starts to gather the first buckets before the masters of the others have stepped, and no byte is known before "
        "one all-reduce over the amaxes of all",
    ),
    ("capturable", "a CUDA graph would replay the kernels of a cast and not the work of the CPU"),
    ("contiguous_param_buffer", "it makes views of all parameters; bytes are in one buffer a bucket already"),
    ("store_param_remainders", "the masters would be in bf16 parameters, which quantized weights are not"),
    ("with_scaled_states", "its masters are FP16 or BF16 times a scale, and a cast needs them in FP32"),
)


def problem_of(optimizer: Any, named: list[tuple[str, Tensor]]) -> Exception | None:
    """Return the error if this optimizer cannot own these parameters, or None. Local."""
    for name, reason in _OPTIONS:
        if getattr(optimizer, name):
            return ValueError(f"{name} is not supported with quantized weights: {reason}")
    if optimizer.dtype is not torch.float32 or not optimizer.store_params:
        return ValueError(
            f"quantized weights need FP32 masters: dtype=torch.float32 and store_params=True, got {optimizer.dtype} and "
            f"{optimizer.store_params}"
        )
    seen: set[int] = set()
    for name, parameter in named:
        problem = _problem_of_parameter(optimizer, name, parameter)
        if problem is not None:
            return problem
        if id(parameter) in seen:
            return ValueError(f"{name} is listed twice: a parameter has one master")
        seen.add(id(parameter))
    return None


def _problem_of_parameter(optimizer: Any, name: str, parameter: Tensor) -> Exception | None:
    if not isinstance(parameter, QuantizedWeight):
        if type(parameter).__torch_dispatch__ is Tensor.__torch_dispatch__:
            return None
        return TypeError(
            f"{name} is a {type(parameter).__name__}, which zerocast does not know: pass plain parameters and QuantizedWeights"
        )
    if not parameter.requires_grad:
        return ValueError(f"{name} needs no gradient, but weight decay would change it: pass only trained parameters")
    # An optimizer is in reference cycles with its own hooks, so that one without references stays
    # the owner until a collection.
    if parameter.master_owner is not None:
        gc.collect()
    owner = parameter.master_owner
    if owner is not None and owner is not optimizer:
        return RuntimeError(
            f"{name} belongs to a {type(owner).__name__} already, the only owner of its masters: save its state, delete it, build "
            "this optimizer and load the state"
        )
    return None
