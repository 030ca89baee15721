"""The private names of torch that this package uses: why, with which releases they were seen to
work, and the public way that would replace each.

`docs/tested.md` says which tests ran with which release. A test fails on a private name that is not
in this table (`tests/test_torch_names.py`). `zerocast.fsdp2.prepare` and `zerocast doctor` check
whether the installed torch has the names.

`REPLACED` has the methods of torch that `prepare` replaces for the whole process.
"""

import functools
import importlib
import re
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch

Release = tuple[int, int]

FIRST: Release = (2, 11)
LAST: Release = (2, 15)


class PrivateName(NamedTuple):
    """A private name of torch.

    Attributes:
        name: the name by which code refers to it.
        owner: the module that has it, or "module:class". Empty where an instance has it, or where
            code asks whether it is there.
        why: its use.
        instead: the public way that would replace it.
        first, last: the releases with which it was seen to work.
    """

    name: str
    owner: str
    why: str
    instead: str
    first: Release = FIRST
    last: Release = LAST

    @property
    def is_there(self) -> bool:
        """True unless its owner is known and lacks it."""
        if not self.owner:
            return True
        module, _, kind = self.owner.partition(":")
        try:
            owner = importlib.import_module(module)
            if not kind and not hasattr(owner, self.name):
                importlib.import_module(f"{module}.{self.name}")
        except ImportError:
            return False
        return hasattr(getattr(owner, kind, None) if kind else owner, self.name)


_FSDP = "torch.distributed.fsdp"
_GROUP = f"{_FSDP}._fully_shard._fsdp_param_group:FSDPParamGroup"
_DTENSOR = "torch.distributed.tensor:DTensor"
_EXTENSIONS = "extension points of FSDP2 for subclasses that are gathered as different bytes"
_GROUPS = "a public way to the parameter groups of an FSDPModule and their state"
_FUSED = "a public name of the foreach operators"

# The names of FSDP2 and DTensor that `zerocast.fsdp2` reads.
FSDP2 = (
    PrivateName("_get_fsdp_state", f"{_FSDP}:FSDPModule", "the parameter groups of a module", _GROUPS),
    PrivateName("_fsdp_param_group", "", "the parameter group of a module", _GROUPS, last=(2, 12)),
    PrivateName("_fsdp_param_groups", "", "the parameter groups of a module", _GROUPS, first=(2, 13)),
    PrivateName("_state_ctx", "", "notice that a backward pass raised", "a public query of it"),
    PrivateName("_training_state", "", "whether a group is within a pass", _GROUPS),
    PrivateName(
        "_to_sharded", _GROUP, "free the groups that a forward pass left gathered", "FSDPModule.reshard for one group"
    ),
    PrivateName("_to_unsharded", _GROUP, "read attributes of gathered weights without __torch_function__", _EXTENSIONS),
    PrivateName("_all_reduce_hook", "", "a user's hook runs as without zerocast", _GROUPS),
    PrivateName("_post_accumulate_grad_hooks", "torch:Tensor", "the same", "a public query of hooks"),
    PrivateName("_all_gather_result", "", "drop gathers of a pass that raised", "FSDPModule.reshard, if it did so"),
    PrivateName("_use_post_forward_mesh", "", "refuse reshard_after_forward=<int>", _EXTENSIONS),
    PrivateName("_reduce_scatter_process_group", "", "ranks of a reduction agree on its wire", _GROUPS),
    PrivateName("_reduce_scatter_comm", "", "lay gradients out for a reduction", "a cheaper fsdp::chunk_cat"),
    PrivateName("_DisableTorchDispatch", "torch._C", "the same", "a documented context"),
    PrivateName("_fully_shard", _FSDP, "the modules below", "public names of them"),
    PrivateName("_fsdp_collectives", f"{_FSDP}._fully_shard", "put the default reduce-scatter back", "a reset"),
    PrivateName("_fsdp_common", f"{_FSDP}._fully_shard", "whether a gather is for a forward pass", _GROUPS),
    PrivateName("_fsdp_param", f"{_FSDP}._fully_shard", "gather all weights of a group in one call", _EXTENSIONS),
    PrivateName("_sharded_local_tensor", "", "the master behind an FSDPParam", _EXTENSIONS),
    PrivateName("_unsharded_param", "", "the parameter that modules see", _EXTENSIONS),
    PrivateName("_unsharded_inner_tensors", "", "gather in a different format after a switch", _EXTENSIONS),
    PrivateName("_module_info", "", "the modules that see a parameter", _EXTENSIONS),
    PrivateName("_setattr_on_modules", f"{_FSDP}._fully_shard._fsdp_param:FSDPParam", "the same", _EXTENSIONS),
    PrivateName("_orig_size", "", "the shape before FSDP2 sharded the weight", _EXTENSIONS),
    PrivateName("_param_fqn", "", "the name of a parameter, for an error", _EXTENSIONS),
    PrivateName(
        "_local_tensor", "", "the local tensor of a DTensor, outside of autograd", "to_local(), if it cost less"
    ),
    PrivateName("_stable_hash_for_caching", "", "key compiled graphs by local tensors", "a hash that has them"),
    PrivateName("_current_graph_task_id", "torch._C", "know the backward pass that runs", "a public number of it"),
    PrivateName("_is_alias_of", "torch._C", "find views of a master", "a public query of storages"),
    PrivateName(
        "_SetExcludeDispatchKeyGuard", "torch._C", "views share a version counter", "a public detach that does"
    ),
    PrivateName(
        "_unsafe_preserve_version_counter", "torch.autograd", "refill memory that autograd saved", "a public context"
    ),
)

_MODE = "a public name in torch.utils"
_TRACED = "a public query of the tracing context"

# The names that the rest of the package uses.
OTHERS = (
    PrivateName("_C", "torch", "the bindings below", "public names of them"),
    PrivateName(
        "_fsspec_filesystem", "torch.distributed.checkpoint", "checkpoints at URLs", "a public name of its FileSystem"
    ),
    PrivateName("_guards", "torch", "know that a compiler traces", _TRACED),
    PrivateName("_ops", "torch", "the types of operators", "torch.library names"),
    PrivateName("_dynamo", "torch", "reset compiled functions between benchmarks", "torch.compiler.reset"),
    PrivateName("_subclasses", "torch", "know a FakeTensor", "a public name of it"),
    PrivateName("_functorch", "torch", "graphs unwrap weights in one call", "torch 2.12", last=(2, 11)),
    PrivateName("_aot_autograd", "torch._functorch", "graphs unwrap weights in one call", "torch 2.12", last=(2, 11)),
    PrivateName("_python_dispatch", "torch.utils", "modes and subclasses of dispatch", _MODE),
    PrivateName("_pytree", "torch.utils", "the tensors among arguments", _MODE),
    PrivateName("_len_torch_dispatch_stack", "torch._C", "know that a mode observes ops", _MODE),
    PrivateName("_autograd", "torch._C", "know that a profiler records ops", "a public query"),
    PrivateName("_profiler_enabled", "torch._C._autograd", "know that a profiler records ops", "a public query"),
    PrivateName("_disabled_torch_function_impl", "torch._C", "a subclass by dispatch only", "a documented constant"),
    PrivateName("_make_wrapper_subclass", "torch:Tensor", "tensor subclasses", "a documented constructor"),
    PrivateName("_make_subclass", "torch:Tensor", "a shard that checkpoints know", "a documented constructor"),
    PrivateName("_version", "torch:Tensor", "notice writes to masters", "a public version counter"),
    PrivateName("_is_view", "torch:Tensor", "whether a tensor has its own version counter", "a public query"),
    PrivateName("_cdata", "torch:UntypedStorage", "tell storages apart", "a public identity"),
    PrivateName("_is_param", "", "parameters that are subclasses", "nn.Parameter of subclasses"),
    PrivateName(
        "_parameters", "", "put a parameter of a different class into a module", "register_parameter with a class"
    ),
    PrivateName(
        "_non_persistent_buffers_set", "", "the entries that a state dict leaves out", "a public query of a module"
    ),
    PrivateName("_ConvNd", "torch.nn.modules.conv", "raise on kernels of convolutions", "a public base class"),
    PrivateName("_opt_called", "", "schedulers know of a captured step", "a public mark"),
    PrivateName("_optimizer_step_post_hooks", "", "the first or last hook of a step casts", "an order of hooks"),
    PrivateName(
        "_disable_dynamo", "torch", "keep steps out of graphs", "torch.compiler.disable, once it imports no compiler"
    ),
    PrivateName("_dynamo", "torch._C", "compile no inside of a product by itself", "a frame that the compiler skips"),
    PrivateName("_FrameAction", "torch._C._dynamo.eval_frame", "the same", "a frame that the compiler skips"),
    PrivateName("_FrameExecStrategy", "torch._C._dynamo.eval_frame", "the same", "a frame that the compiler skips"),
    PrivateName("_optimizer_state_dict_pre_hooks", "", "run the hooks of states by name", "a call that runs them"),
    PrivateName("_optimizer_state_dict_post_hooks", "", "run the hooks of states by name", "a call that runs them"),
    PrivateName("_optimizer_load_state_dict_pre_hooks", "", "run the hooks of states by name", "a call that runs them"),
    PrivateName(
        "_optimizer_load_state_dict_post_hooks", "", "run the hooks of states by name", "a call that runs them"
    ),
    PrivateName(
        "_execution_engine", "torch.autograd:Variable", "call back at the end of a backward pass", "a public hook"
    ),
    PrivateName("_current_autograd_node", "torch._C", "name who reads a gradient", "torch.autograd.graph"),
    PrivateName("_are_functorch_transforms_active", "torch._C", "raise on products in transforms", "torch.func query"),
    PrivateName("_set_throw_on_mutable_data_ptr", "torch._C", "no address of a weight without memory", "a public flag"),
    PrivateName("_dispatch_has_kernel_for_dispatch_key", "torch._C", "which products a CPU has", "a public query"),
    PrivateName("_cuda_getCurrentRawStream", "", "the stream of a launch, faster", "torch.cuda.current_stream"),
    PrivateName("_schema", "", "which arguments an operator writes", "torch.library schemas"),
    PrivateName("_overloadname", "", "distinguish overloads of an operator", "torch.library schemas"),
    PrivateName("_world", "torch.distributed.distributed_c10d", "the options of a process group", "public options"),
    PrivateName("_get_backend", "torch.distributed:ProcessGroup", "the options of a process group", "public options"),
    PrivateName("_device_types", "torch.distributed:ProcessGroup", "the devices of a process group", "public options"),
    PrivateName("_checkpointable", "torch.distributed", "shards that DCP saves", "a documented protocol"),
    PrivateName("_StorageInfo", "torch.distributed.checkpoint.filesystem", "read DCP without running it", "a reader"),
    PrivateName("_MEM_FORMAT_ENCODING", "torch.distributed.checkpoint.metadata", "the same", "a reader"),
    PrivateName("_get_layout", "torch.serialization", "the same", "a reader"),
    PrivateName("_amp_foreach_non_finite_check_and_unscale_", "torch", "GradScaler over shards", "GradScaler hooks"),
    PrivateName("_foreach_add_", "torch", "one launch for many tensors", _FUSED),
    PrivateName("_foreach_copy_", "torch", "one launch for many tensors", _FUSED),
    PrivateName("_foreach_norm", "torch", "one launch for many tensors", _FUSED),
    PrivateName("_foreach_zero_", "torch", "one launch for many tensors", _FUSED),
    PrivateName("_scaled_mm", "torch", "products of FP8 and FP4 codes", "torch.nn.functional.scaled_mm"),
    PrivateName("_scaled_mm_v2", "torch", "products by two scales", "torch.nn.functional.scaled_mm, if it cost less"),
    PrivateName("_grouped_mm", "torch", "products of experts", "torch.nn.functional.grouped_mm"),
    PrivateName("_scaled_grouped_mm", "torch", "products of experts in FP8", "torch.nn.functional.scaled_grouped_mm"),
    PrivateName("_is_avx2_supported", "torch.cpu", "which products a CPU has", "torch.backends.cpu"),
    PrivateName("_is_avx512_bf16_supported", "torch.cpu", "which products a CPU has", "torch.backends.cpu"),
    PrivateName("_is_amx_tile_supported", "torch.cpu", "which products a CPU has", "torch.backends.cpu"),
    PrivateName("_is_mkldnn_bf16_supported", "", "which products a CPU has", "torch.backends.cpu"),
    *(
        PrivateName(name, "", "raise on, or run, operators by name", "public operators")
        for name in (
            "_c10d_functional",
            "_c10d_functional_autograd",
            "_foreach_",
            "_foreach_lerp",
            "_foreach_lerp_",
            "_foreach_sub",
            "_foreach_sub_",
            "_fused_",
            "_lazy_clone",
            "_local_scalar_dense",
            "_pin_memory",
            "_to_copy",
            "_to_dense",
            "_to_sparse",
        )
    ),
)


class Replaced(NamedTuple):
    """A method of torch that `zerocast.fsdp2.prepare` replaces for the whole process.

    Attributes:
        name: the method.
        owner: the "module:class" that has it.
        why: the reason why no subclass, hook or argument can do it.
        shown_by: the test that fails once torch needs it no longer, as "file::test".
    """

    name: str
    owner: str
    why: str
    shown_by: str


REPLACED = (
    Replaced(
        "redistribute",
        _DTENSOR,
        "full_tensor and torch's getters of full states call it, and over one rank it returns the shard itself",
        "tests/fsdp2/test_full_state.py::test_a_full_tensor_is_a_copy",
    ),
    Replaced(
        "_stable_hash_for_caching",
        _DTENSOR,
        "the cache of compiled graphs asks the class, whose key lacks the local tensor",
        "tests/fsdp2/test_optimizers.py::test_the_key_of_a_compiled_graph",
    ),
)


def missing_names(names: Iterable[PrivateName]) -> list[str]:
    """Return the dotted names of those that the installed torch lacks."""
    return [f"{name.owner.replace(':', '.')}.{name.name}" for name in names if not name.is_there]


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
