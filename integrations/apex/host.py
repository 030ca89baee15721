"""NVIDIA Apex's optimizer class: what it must have, and which of its options and parameters are not
supported.

A feature is detected by the presence of its names, never by a version number.
"""

import gc
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerocast import QuantizedWeight
from zerocast.integrations import known_api

MODULE = "apex.contrib.optimizers.distributed_fused_adam"
UNKNOWN = "this Apex has an API that zerocast does not support (supported: July 2026)"
SOURCE = "build NVIDIA's from a checkout of github.com/NVIDIA/apex"


def optimizer_class() -> Any:
    """Apex's DistributedFusedAdam.

    Raises ImportError if Apex is missing, a different project of that name is installed, or its
    compiled extensions are missing; RuntimeError if it has no such class.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        raise ImportError(f"NVIDIA Apex is not installed, and is on no package index: {SOURCE}")
    # Look for the file before importing: another project's `apex` would run on import.
    folders = list(spec.submodule_search_locations or ())
    if not any(Path(folder, *MODULE.split(".")[1:]).with_suffix(".py").is_file() for folder in folders):
        raise ImportError(
            f"looked for {MODULE} and found another apex at {folders or spec.origin}: the package index's `apex` is a "
            f"toolkit for logins, not NVIDIA's; uninstall it and {SOURCE}"
        )
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        raise ImportError(
            f"{MODULE} is installed and cannot be imported: {error}. Build Apex with the extensions amp_C and distributed_adam_cuda"
        ) from error
    with known_api(UNKNOWN):
        return module.DistributedFusedAdam


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
