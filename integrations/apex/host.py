"""NVIDIA Apex's optimizer class, and what it must have.

A feature is detected by the presence of its names, never by a version number.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from zerocast.integrations.patches import known_api

MODULE = "apex.contrib.optimizers.distributed_fused_adam"
UNKNOWN = "this Apex has an API that zerocast does not support (supported: July 2026)"
SOURCE = "build NVIDIA's from a checkout of github.com/NVIDIA/apex"

# The methods that are overridden here. Under a different name Apex would not call them.
_OVERRIDDEN = (
    "_broadcast_params",
    "_check_params_shard_dtypes",
    "_init_param_state",
    "_local_step",
    "_param_copy_fragments",
    "grad_norm",
    "load_state_dict",
    "param_sync",
    "state_dict",
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
        module = importlib.import_module(MODULE)
    except ImportError as error:
        raise ImportError(
            f"{MODULE} is installed and cannot be imported: {error}. Build Apex with the extensions amp_C and distributed_adam_cuda"
        ) from error
    with known_api(UNKNOWN):
        for name in _OVERRIDDEN:
            getattr(module.DistributedFusedAdam, name)
        return module.DistributedFusedAdam
