"""The names of megatron-core that this integration replaces or reads. No other file knows them.

A feature of the host is detected by the presence of its names, never by a version number.
"""

import contextlib
import copy
import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from zerocast.integrations import patches

FP8 = "megatron.core.fp8_utils"
FP4 = "megatron.core.fp4_utils"
BUFFER = "megatron.core.distributed.param_and_grad_buffer"
DDP = "megatron.core.distributed.distributed_data_parallel"
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
OPTIMIZER_BASES = "megatron.core.optimizer.optimizer"
HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
LAYER_WISE = "megatron.core.optimizer.layer_wise_optimizer"
FACTORIES = "megatron.core.optimizer"
WRAPPERS = "megatron.core.distributed"
CHECKPOINT_MAPPING = "megatron.core.dist_checkpointing.mapping"
CORE = "megatron.core.utils"
LAYERS = "megatron.core.tensor_parallel.layers"
TRAINING = "megatron.training.training"
MODEL_BUILDERS = "megatron.training.models.dist_utils"
CHECKPOINTING = "megatron.training.checkpointing"
ARGUMENTS = "megatron.training.arguments"

_UNKNOWN = "this megatron-core has an API that zerocast does not support (supported: 0.16 to 0.19)"
known_api = functools.partial(patches.known_api, _UNKNOWN)
# An attribute of a parameter: true if its buffer is laid out for a LayerWiseDistributedOptimizer.
_MANAGED = "is_managed_by_layer_wise_optimizer"
# The function that sets this attribute.
_TAGS = "tag_params_for_buffer_routing"
# The attribute that OptimizerConfig derives from use_precision_aware_optimizer and further
# settings.
_MASTERS_ARE_STATES = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
# The name of the CPU copy in the state of a master that a HybridDeviceOptimizer has offloaded.
HOST_COPY = "master_param"
_CALLED_BY_SETUP = ("correct_amax_history_if_needed", "get_megatron_optimizer")
# The attribute of TransformerEngine's recipe for MXFP8 that asks for tiles, since 2.20.
_TILES = "enable_2d_quantization"


def module(path: str) -> Any:
    """Return a module of megatron-core.

    Raises RuntimeError if it does not exist: too old a version, or megatron-core is not installed.
    """
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise RuntimeError(f"looked for {path} of megatron-core (0.16 to 0.19): {error}") from error


def training() -> Any:
    """Return the module of `pretrain`. Raises RuntimeError if it cannot be imported."""
    try:
        return importlib.import_module(TRAINING)
    except ImportError as error:
        raise RuntimeError(
            f"megatron.training cannot be imported: {error}. It comes with a checkout of Megatron-LM, and with megatron-core "
            "from 0.17 on; 0.18 and later need Python 3.12"
        ) from error


def model_builders() -> list[Any]:
    """Return the modules that build models, and call `correct_amax_history_if_needed` before they
    wrap them. Older releases have one.
    """
    builders = [training()]
    with contextlib.suppress(ImportError):
        builders.append(importlib.import_module(MODEL_BUILDERS))
    return builders


def require_called(called: Container[str]) -> None:
    """Raise RuntimeError unless `setup_model_and_optimizer` called the functions that quantize and
    attach.
    """
    missing = [name for name in _CALLED_BY_SETUP if name not in called]
    if missing:
        raise RuntimeError(f"{TRAINING}.setup_model_and_optimizer has not called {', '.join(missing)}: {_UNKNOWN}")


def unwrapped(chunk: Any) -> Any:
    """Return a chunk of a model without its Float16Module."""
    return module(CORE).unwrap_model(chunk)


def has_four_bit_buffers() -> bool:
    """Return True if byte buffers of this megatron-core can hold two elements per byte."""
    return hasattr(module(BUFFER), "group_params_for_buffers")


def four_bit_moves() -> list[Any]:
    """Return the modules in which the function that moves 4-bit codes is looked up.

    Newer releases import it into the module of buffers, older ones inside the function that calls
    it.
    """
    name = "modify_nvfp4_rowwise_storage"
    return [owner for owner in (module(FP4), module(BUFFER)) if hasattr(owner, name)]


def recipe_of_tiles(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap `get_fp8_recipe`: an MXFP8 recipe quantizes weights in tiles of 32x32.

    Megatron has no setting for that. The wrapped function raises RuntimeError for a
    TransformerEngine without such tiles.
    """

    @functools.wraps(original)
    def get_fp8_recipe(config: Any) -> Any:
        recipe = original(config)
        if recipe is None or not recipe.mxfp8():
            return recipe
        if not hasattr(recipe, _TILES):
            raise RuntimeError(
                f"{type(recipe).__name__} of this TransformerEngine has no {_TILES}, which 2.20 has: use a different recipe, or "
                "leave out square_mxfp8()"
            )
        return dataclasses.replace(recipe, **{_TILES: True})

    return get_fp8_recipe


def wrappers() -> list[tuple[type, bool]]:
    """Return (class, is not DistributedDataParallel) of the classes that wrap a model."""
    distributed = module(WRAPPERS)
    others = ("FullyShardedDataParallel", "TorchFullyShardedDataParallel")
    return [
        (distributed.DistributedDataParallel, False),
        *((getattr(distributed, name), True) for name in others if hasattr(distributed, name)),
    ]


def factories() -> list[tuple[Any, str, bool]]:
    """Return (module, name of the function, is_emerging) of the functions that build optimizers.

    `is_emerging` is true for the function that builds optimizers other than Adam and SGD.
    """
    optimizers = module(FACTORIES)
    name, emerging = "_get_megatron_optimizer_based_on_param_groups", "_get_megatron_emerging_optimizer"
    if hasattr(optimizers, emerging):
        return [(optimizers, name, False), (optimizers, emerging, True)]
    return [(optimizers, name, False)]


def embedding() -> Any:
    """Return the class of embeddings whose table is split over tensor-parallel ranks."""
    return module(LAYERS).VocabParallelEmbedding


def masters_are_states(config: Any) -> bool:
    """Return True if optimizers of this configuration keep masters in the state of a fused Adam."""
    return bool(getattr(config, _MASTERS_ARE_STATES, False))


def keeping_fp32_masters(config: Any) -> Any:
    """Return a configuration whose optimizers keep FP32 masters as tensors, not in a fused Adam's
    state.

    Returns `config` where that is so already, as for most of the host's own FP8 formats, else a
    copy: an optimizer reads its configuration in every step, and other optimizers may share it.
    """
    if masters_are_states(config):
        config = copy.copy(config)
        setattr(config, _MASTERS_ARE_STATES, False)
    return config


def hybrid() -> Any:
    """Return the class of optimizers whose masters and moments are in CPU memory."""
    return module(HYBRID).HybridDeviceOptimizer


def offloads(inner: Any) -> bool:
    """Return True if an inner optimizer is a HybridDeviceOptimizer."""
    return isinstance(inner, hybrid())


def cpu_copies(inner: Any) -> Mapping[Any, Any]:
    """Return a dict from each offloaded master to its copy in CPU memory, which a step updates.

    Empty for an optimizer that offloads nothing.
    """
    return inner.gpu_params_map_cpu_copy if offloads(inner) else {}


def replace_masters(optimizer: Any, others: Mapping[Any, Any]) -> None:
    """Replace masters by the tensors in `others`, in all lists of a DistributedOptimizer."""
    inner = optimizer.optimizer
    lists = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
    for masters in (*lists, *(group["params"] for group in inner.param_groups)):
        masters[:] = [others.get(master, master) for master in masters]
    for param in (param for group in optimizer.model_float16_groups for param in group):
        param.main_param = others.get(param.main_param, param.main_param)
    for master in [master for master in inner.state if master in others]:
        inner.state[others[master]] = inner.state.pop(master)


def holds_several(param: Any) -> bool:
    """Return True for a tensor of TransformerEngine with codes of several experts (since 0.19)."""
    is_grouped = getattr(module(FP8), "is_grouped_tensor_with_quantized_storage", None)
    return is_grouped is not None and bool(is_grouped(param))


def layer_wise() -> list[type]:
    """Return the class of optimizers whose ranks own whole layers, in a list. Empty if there is
    none.
    """
    try:
        return [importlib.import_module(LAYER_WISE).LayerWiseDistributedOptimizer]
    except (ImportError, AttributeError):
        return []


def lays_out_whole_matrices() -> bool:
    """Return True if this megatron-core has a layout with each matrix in the part of one rank."""
    return any(hasattr(module(kind.__module__), _TAGS) for kind in layer_wise())


def tag_matrices(chunks: Sequence[Any]) -> None:
    """Mark the matrices of models that are not wrapped yet, so that the host gives them a layout of
    whole matrices.
    """
    getattr(module(LAYER_WISE), _TAGS)(chunks)


def wrappers_of_built_models() -> list[tuple[Any, str, str]]:
    """Return (module, function, class) where megatron.training wraps models that it builds of a
    configuration.

    Both are names in the module: the function that wraps, and the class that it asks for the layout
    of the buffers. Empty for releases without that function.
    """
    names = ("_ddp_wrap", "DistributedOptimizer")
    with contextlib.suppress(ImportError):
        builders = importlib.import_module(MODEL_BUILDERS)
        return [(builders, *names)] if all(hasattr(builders, name) for name in names) else []
    return []


def is_layer_wise(optimizer: Any) -> bool:
    """Return True for an optimizer whose ranks own whole layers."""
    return isinstance(optimizer, tuple(layer_wise()))


def is_layer_wise_buffer(buffer: Any) -> bool:
    """Return True for a buffer whose layout puts each parameter into the part of one rank."""
    return any(map(is_managed_by_layer, buffer.params))


def is_managed_by_layer(param: Any) -> bool:
    """Return True for a parameter whose buffer is laid out for ranks that own whole matrices."""
    return bool(getattr(param, _MANAGED, False))


def is_tagged(param: Any) -> bool:
    """Return True for a parameter of a model that `tag_matrices` has seen before it was wrapped."""
    return hasattr(param, _MANAGED)


def is_of_an_expert(param: Any) -> bool:
    """Return True for a parameter that ranks with different experts do not have."""
    return not getattr(param, "allreduce", True)


def float16_optimizer() -> type:
    """Return the class of optimizers that keep an unsharded FP32 master of each of their
    parameters.
    """
    kind: type = module(OPTIMIZER_BASES).Float16OptimizerWithFloat16Params
    return kind


def optimizer_bases() -> list[type]:
    """Return the classes whose constructors every optimizer of the host runs."""
    bases = module(OPTIMIZER_BASES)
    return [bases.MegatronOptimizer, bases.ChainedOptimizer]


def distributed_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers inside a chain that own masters, in order. Stubs own none and are left
    out.

    A layer-wise optimizer is a chain by its class, and counts as one optimizer here: only the chain
    knows its groups of ranks and its buffers.
    """
    owners = []
    is_single = is_layer_wise(optimizer) or not hasattr(optimizer, "chained_optimizers")
    for inner in [optimizer] if is_single else optimizer.chained_optimizers:
        if hasattr(inner, "chained_optimizers") and not is_layer_wise(inner):
            owners += distributed_optimizers(inner)
        elif not getattr(inner, "is_stub_optimizer", False):
            owners.append(inner)
    return owners


def moments_left_out(optimizer: Any) -> list[str]:
    """Return the moments of Adam that `fully_reshardable` checkpoints of a DistributedOptimizer
    leave out.

    Since 0.19 the host chooses the moments to save by the name of the configured optimizer. Under
    Muon that leaves out moments of the parameters that Adam updates.
    """
    moments = ("exp_avg", "exp_avg_sq")
    return [name for name in moments if name not in getattr(optimizer, "optimizer_state_keys", moments)]


def bucket_groups(chunk: Any) -> list[Any]:
    """Return the bucket groups of a DistributedDataParallel, including the groups of experts."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def groups_of_all_ranks(optimizers: Sequence[Any]) -> list[Any]:
    """Return process groups that connect all ranks of a model: the group over which the host
    reduces the norm of gradients, of all pipeline stages, tensor-parallel and data-parallel ranks
    of an instance, then the group of the ranks at the same place in other instances. Empty if no
    optimizer has the first.
    """
    of_norms = [getattr(optimizer, "grad_stats_parallel_group", None) for optimizer in optimizers]
    instance = next((group for group in of_norms if group is not None), None)
    if instance is None:
        return []
    chunks = [chunk for optimizer in optimizers for chunk in getattr(optimizer, "model_chunks", ())]
    # A chunk has this attribute only if there are several instances.
    of_instances = (chunk.inter_dist_opt_group for chunk in chunks if hasattr(chunk, "inter_dist_opt_group"))
    return [instance, *itertools.islice(of_instances, 1)]


def is_loading(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if `sharded_state_dict` is called for the template that a load fills."""
    return bool(kwargs.get("is_loading", args[1] if len(args) > 1 else False))


def argument_of_load(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument of a method that loads: a state dict, or the name of a file."""
    return args[0] if args else kwargs.get("state_dict", kwargs.get("filename"))
