"""The private names of torch that this package uses, by the module or class that has them.

`docs/tested.md` says which tests ran with which release. A test fails on a private name that is
neither here nor among the names of instances, which the test itself has
(`tests/test_torch_names.py`). `zerocast.fsdp2.prepare` and `zerocast doctor` check whether the
installed torch has the names.
"""

import functools
import importlib
import re
import warnings
from collections.abc import Mapping, Sequence

import torch

Release = tuple[int, int]

# The first and the last release of torch that the names were seen to work with.
FIRST: Release = (2, 11)
LAST: Release = (2, 15)

# Names by the module that has them, or by "module:class".
Names = Mapping[str, Sequence[str]]

_FSDP = "torch.distributed.fsdp"

# The names that `zerocast.fsdp2` reads.
FSDP2: Names = {
    # The parameter groups of a module.
    f"{_FSDP}:FSDPModule": ["_get_fsdp_state"],
    _FSDP: ["_fully_shard"],
    # The default reduce-scatter is put back; a gather is for a forward or a backward pass; all
    # weights of a group are gathered in one call.
    f"{_FSDP}._fully_shard": ["_fsdp_collectives", "_fsdp_common", "_fsdp_param"],
    # The modules that see a parameter.
    f"{_FSDP}._fully_shard._fsdp_param:FSDPParam": ["_setattr_on_modules"],
    # A hook of a user runs as without zerocast.
    "torch:Tensor": ["_post_accumulate_grad_hooks"],
    "torch._C": [
        # Lay gradients out for a reduction.
        "_DisableTorchDispatch",
        # Know the backward pass that runs.
        "_current_graph_task_id",
        # Find views of a master.
        "_is_alias_of",
        # Views share a version counter.
        "_SetExcludeDispatchKeyGuard",
    ],
    # Refill memory that autograd saved.
    "torch.autograd": ["_unsafe_preserve_version_counter"],
}

# The names that the rest of the package uses.
OTHERS: Names = {
    "torch": [
        "_C",
        # Know that a compiler traces.
        "_guards",
        # The types of operators.
        "_ops",
        # Reset compiled functions between benchmarks.
        "_dynamo",
        # Know a FakeTensor.
        "_subclasses",
        # Graphs of torch 2.11 unwrap weights in one call.
        "_functorch",
        # Keep steps out of graphs. `torch.compiler.disable` would import the compiler.
        "_disable_dynamo",
        # GradScaler over shards.
        "_amp_foreach_non_finite_check_and_unscale_",
        # One launch for many tensors.
        "_foreach_add_",
        "_foreach_copy_",
        "_foreach_norm",
        "_foreach_zero_",
        # Products of FP8 and FP4 codes, and of experts.
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_grouped_mm",
    ],
    "torch._functorch": ["_aot_autograd"],
    "torch._C": [
        # Know that a mode observes ops, and that a profiler records them.
        "_len_torch_dispatch_stack",
        "_autograd",
        # A subclass by dispatch only.
        "_disabled_torch_function_impl",
        # Keep the compiler out of the inside of a product.
        "_dynamo",
        # Name the reader of a gradient.
        "_current_autograd_node",
        # Raise on products in transforms.
        "_are_functorch_transforms_active",
        # No address of a weight without memory.
        "_set_throw_on_mutable_data_ptr",
        # Which products a CPU has.
        "_dispatch_has_kernel_for_dispatch_key",
    ],
    "torch._C._autograd": ["_profiler_enabled"],
    "torch._C._dynamo.eval_frame": ["_FrameAction", "_FrameExecStrategy"],
    "torch:Tensor": [
        # Constructors of subclasses, and of a shard that checkpoints know.
        "_make_wrapper_subclass",
        "_make_subclass",
        # Notice writes to masters.
        "_version",
        "_is_view",
    ],
    # Tell storages apart.
    "torch:UntypedStorage": ["_cdata"],
    # Modes and subclasses of dispatch, and the tensors among arguments.
    "torch.utils": ["_python_dispatch", "_pytree"],
    # Raise on kernels of convolutions.
    "torch.nn.modules.conv": ["_ConvNd"],
    # Call back at the end of a backward pass.
    "torch.autograd:Variable": ["_execution_engine"],
    # The options and the devices of a process group.
    "torch.distributed.distributed_c10d": ["_world"],
    "torch.distributed:ProcessGroup": ["_get_backend", "_device_types"],
    # Shards that torch.distributed.checkpoint saves; checkpoints at URLs; reading them without
    # running code of theirs.
    "torch.distributed": ["_checkpointable"],
    "torch.distributed.checkpoint": ["_fsspec_filesystem"],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.distributed.checkpoint.metadata": ["_MEM_FORMAT_ENCODING"],
    "torch.serialization": ["_get_layout"],
    # Which products a CPU has.
    "torch.cpu": ["_is_avx2_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"],
}


def missing_names(*tables: Names) -> list[str]:
    """Return the dotted names of those in the tables that the installed torch lacks."""
    pairs = [(owner, name) for names in tables for owner, of_owner in names.items() for name in of_owner]
    return [f"{owner.replace(':', '.')}.{name}" for owner, name in pairs if not _has(owner, name)]


def _has(owner: str, name: str) -> bool:
    """Return True if a module, or the class in it, has a name, which may be a module."""
    module, _, kind = owner.partition(":")
    try:
        found = importlib.import_module(module)
        if not kind and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return hasattr(getattr(found, kind, None) if kind else found, name)


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
