"""The names of NVIDIA Apex that this integration overrides, calls or reads, all of them.

A feature is detected by the presence of its names, never by a version number.
"""

import importlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MODULE = "apex.contrib.optimizers.distributed_fused_adam"
SOURCE = "build NVIDIA's from a checkout of github.com/NVIDIA/apex"

_OF_THE_CLASS = (
    "_broadcast_params",
    "_check_params_shard_dtypes",
    "_init_param_state",
    "_local_step",
    "_param_copy_fragments",
    "grad_norm",
    "init_params",
    "init_params_bucket",
    "load_state_dict",
    "param_sync",
    "parameter",
    "parameters",
    "state_dict",
)
_OF_AN_OPTIMIZER = (
    "_params_buckets",
    "alignment",
    "capturable",
    "contiguous_param_buffer",
    "default_shard_size",
    "device",
    "distributed_process_group",
    "distributed_size",
    "dtype",
    "grad_sync_dtype",
    "overlap_param_sync",
    "process_group",
    "process_group_root",
    "store_param_remainders",
    "store_params",
    "with_scaled_states",
)


def optimizer_class() -> Any:
    """Apex's DistributedFusedAdam.

    Raises ImportError if Apex is missing, a different project of that name is installed, or its
    compiled extensions are missing; RuntimeError with the missing names if the class has an
    unsupported API.
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
        kind = getattr(importlib.import_module(MODULE), "DistributedFusedAdam", None)
    except ImportError as error:
        raise ImportError(
            f"{MODULE} is installed and cannot be imported: {error}. Build Apex with the extensions amp_C and distributed_adam_cuda"
        ) from error
    if kind is None:
        raise RuntimeError(f"{MODULE} has no DistributedFusedAdam: this Apex has an API that zerocast does not support")
    require(kind, _OF_THE_CLASS)
    return kind


def check_optimizer(optimizer: Any) -> None:
    """Raise RuntimeError unless an optimizer has the attributes that are read and set here."""
    require(optimizer, _OF_AN_OPTIMIZER)


def require(owner: Any, names: Iterable[str]) -> None:
    """Raise RuntimeError with the missing names, unless `owner` has all of `names`."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise RuntimeError(
            f"DistributedFusedAdam has no {', '.join(missing)}: this Apex has an API that zerocast does not support (supported: "
            "July 2026)"
        )
