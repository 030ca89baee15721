"""The private names of torch that this package uses, and the releases with which they were seen to
work.

`docs/tested.md` says which tests ran with which release. A test fails on a private name that is not
known (`tests/test_torch_names.py`, which also has those of instances, where they cannot be looked
up). `zerocast.fsdp2.prepare` and `zerocast doctor` check whether the installed torch has the names.
"""

import functools
import importlib
import re
import warnings
from collections.abc import Mapping, Sequence

import torch

Release = tuple[int, int]

FIRST: Release = (2, 11)
LAST: Release = (2, 15)

# Names by their owner, which is a module or "module:class". First those of FSDP2 and DTensor that
# `zerocast.fsdp2` reads.
Names = Mapping[str, Sequence[str]]
FSDP2: Names = {
    "torch.distributed.fsdp": ("_fully_shard",),
    "torch.distributed.fsdp:FSDPModule": ("_get_fsdp_state",),
    "torch.distributed.fsdp._fully_shard": ("_fsdp_collectives", "_fsdp_common", "_fsdp_param"),
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam": ("_setattr_on_modules",),
    "torch.autograd": ("_unsafe_preserve_version_counter",),
    "torch:Tensor": ("_post_accumulate_grad_hooks",),
    "torch._C": ("_DisableTorchDispatch", "_SetExcludeDispatchKeyGuard", "_current_graph_task_id", "_is_alias_of"),
}
OTHERS: Names = {
    "torch": (
        "_C",
        "_amp_foreach_non_finite_check_and_unscale_",
        "_disable_dynamo",
        "_dynamo",
        "_foreach_add_",
        "_foreach_copy_",
        "_foreach_norm",
        "_foreach_zero_",
        "_functorch",
        "_grouped_mm",
        "_guards",
        "_ops",
        "_scaled_grouped_mm",
        "_scaled_mm",
        "_subclasses",
    ),
    "torch:Tensor": ("_is_view", "_make_subclass", "_make_wrapper_subclass", "_version"),
    "torch:UntypedStorage": ("_cdata",),
    "torch._C": (
        "_are_functorch_transforms_active",
        "_autograd",
        "_current_autograd_node",
        "_disabled_torch_function_impl",
        "_dispatch_has_kernel_for_dispatch_key",
        "_dynamo",
        "_is_tracing",
        "_len_torch_dispatch_stack",
        "_set_throw_on_mutable_data_ptr",
    ),
    "torch._C._autograd": ("_profiler_enabled",),
    "torch._C._dynamo.eval_frame": ("_FrameAction", "_FrameExecStrategy"),
    "torch._functorch": ("_aot_autograd",),
    "torch.autograd:Variable": ("_execution_engine",),
    "torch.cpu": ("_is_amx_tile_supported", "_is_avx2_supported", "_is_avx512_bf16_supported"),
    "torch.distributed": ("_checkpointable",),
    "torch.distributed:ProcessGroup": ("_device_types", "_get_backend"),
    "torch.distributed.checkpoint": ("_fsspec_filesystem",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": ("_MEM_FORMAT_ENCODING",),
    "torch.distributed.distributed_c10d": ("_world",),
    "torch.nn.modules.conv": ("_ConvNd",),
    "torch.serialization": ("_get_layout",),
    "torch.utils": ("_python_dispatch", "_pytree"),
}


def missing_names(*tables: Names) -> list[str]:
    """Return the dotted names of those that the installed torch lacks."""
    pairs = [(owner, name) for table in tables for owner, names in table.items() for name in names]
    return [f"{owner.replace(':', '.')}.{name}" for owner, name in pairs if not _is_there(owner, name)]


def _is_there(owner: str, name: str) -> bool:
    module_name, _, kind = owner.partition(":")
    try:
        module = importlib.import_module(module_name)
        if not kind and not hasattr(module, name):
            importlib.import_module(f"{module_name}.{name}")
    except ImportError:
        return False
    return hasattr(getattr(module, kind, None) if kind else module, name)


@functools.cache
def check_fsdp2() -> None:
    """Look once whether FSDP2 can be used. Raises RuntimeError for a torch that lacks a private
    name that `zerocast.fsdp2` needs, and a warning for a release of torch that it was never tested
    with.
    """
    untested = untested_release()
    missing = missing_names(FSDP2)
    if missing:
        tested = (
            untested or f"it was tested with this torch {torch.__version__}, so another package may have changed that"
        )
        raise RuntimeError(f"zerocast.fsdp2 needs {', '.join(missing)}, which this torch lacks: {tested}")
    if untested:
        warnings.warn(f"{untested}: compare a few steps with zerocast.verify", stacklevel=3)


def installed_release() -> Release:
    """Return the release of torch, as (major, minor)."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    assert found is not None, torch.__version__
    return int(found[1]), int(found[2])


def untested_release() -> str | None:
    """Say that the tests never ran with the installed torch, if so."""
    release = installed_release()
    if FIRST <= release <= LAST:
        return None
    first, last = (".".join(map(str, end)) for end in (FIRST, LAST))
    return f"zerocast uses private names of torch, and was tested with torch {first} to {last}, not with {torch.__version__}"
