"""Facts about megatron-core that several files use: its modules, its optimizers and its parameters.

A feature of the host is detected by the presence of its names, never by a version number.
"""

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from zerocast import integrations

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

UNKNOWN = "this megatron-core has an API that zerocast does not support (supported: 0.16 to 0.19)"
known_api = functools.partial(integrations.known_api, UNKNOWN)
# An attribute of a parameter that `tag_params_for_buffer_routing` has seen: true if its buffer is
# laid out for a LayerWiseDistributedOptimizer.
MANAGED = "is_managed_by_layer_wise_optimizer"


def module(path: str) -> Any:
    """Return a module of megatron-core.

    Raises RuntimeError if it does not exist: too old a version, or megatron-core is not installed.
    """
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise RuntimeError(f"looked for {path} of megatron-core (0.16 to 0.19): {error}") from error


def has_four_bit_buffers() -> bool:
    """Return True if byte buffers of this megatron-core can hold two elements per byte."""
    return hasattr(module(BUFFER), "group_params_for_buffers")


def layer_wise() -> list[type]:
    """Return the class of optimizers whose ranks own whole layers, in a list. Empty if there is
    none.
    """
    try:
        return [importlib.import_module(LAYER_WISE).LayerWiseDistributedOptimizer]
    except (ImportError, AttributeError):
        return []


def is_layer_wise(optimizer: Any) -> bool:
    """Return True for an optimizer whose ranks own whole layers."""
    return isinstance(optimizer, tuple(layer_wise()))


def is_layer_wise_buffer(buffer: Any) -> bool:
    """Return True for a buffer whose layout puts each parameter into the part of one rank."""
    return any(map(is_managed_by_layer, buffer.params))


def is_managed_by_layer(param: Any) -> bool:
    """Return True for a parameter whose buffer is laid out for ranks that own whole matrices."""
    return bool(getattr(param, MANAGED, False))


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


def bucket_groups(chunks: Sequence[Any]) -> list[Any]:
    """Return the bucket groups of DistributedDataParallels, including the groups of experts."""
    return [group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]


def is_loading(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if `sharded_state_dict` is called for the template that a load fills."""
    return bool(kwargs.get("is_loading", args[1] if len(args) > 1 else False))
