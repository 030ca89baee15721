"""OptimizerKind: which masters a rank has under each kind of Megatron's optimizers.

Each rank of a DistributedOptimizer owns a part of every bucket. Each rank of a
LayerWiseDistributedOptimizer owns whole matrices: matrices of dense layers are divided over all
data-parallel ranks, matrices of experts over the ranks with the same experts.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from . import host


class OwnedMaster(NamedTuple):
    """The elements of a parameter that this rank owns.

    Attributes:
        param: the unsharded parameter.
        master: their FP32 master, the host's own tensor.
        start: the row-major position of the first element.
        rounded: returns the same elements in the host's buffer. Called for plain parameters only.
    """

    param: Any
    master: Tensor
    start: int
    rounded: Callable[[], Tensor]


@dataclass(frozen=True)
class Share:
    """The part of an optimizer that one group of ranks divides.

    Attributes:
        group: the process group.
        buffers: the host's buffers, with the parameters of all ranks of `group`.
        masters: iterates over the masters that this rank owns.
        replica: (index of the group, instance), which identifies entries that the group saves once.
        suffix: is appended to the names of entries where one optimizer saves several shares.
    """

    group: Any
    buffers: list[Any]
    masters: Callable[[], Iterator[OwnedMaster]]
    replica: tuple[int, int]
    suffix: str = ""


@dataclass(frozen=True)
class OptimizerKind:
    """One kind of optimizer: the shares that its ranks have, and its methods that are replaced.

    Attributes:
        shares: lists one share for each group of ranks, in the same order on all ranks of a group.
        copier: returns the object whose `_copy_main_params_to_model_params` copies masters.
        reads: lists the methods that read masters from the parameters, as (owner, name).
        read_given: reads masters from a state dict, the second argument.
        saves_shards: True if a checkpoint has shards of a parameter's state, False if it has the
            unsharded state.
        saves, loads: names of further methods that save and load, of this kind only.
    """

    shares: Callable[[Any], list[Share]]
    copier: Callable[[Any], Any]
    reads: Callable[[Any], list[tuple[Any, str]]]
    read_given: Callable[[Any, Any], None]
    saves_shards: bool
    saves: tuple[str, ...] = ()
    loads: tuple[str, ...] = ()


def kind_of(optimizer: Any) -> OptimizerKind:
    """Return the kind of an optimizer that `distributed_optimizers` returned."""
    return LAYER_WISE if host.is_layer_wise(optimizer) else DISTRIBUTED


def shares(optimizer: Any) -> list[Share]:
    """Return the shares of an optimizer that `distributed_optimizers` returned, one per group of
    ranks.
    """
    return kind_of(optimizer).shares(optimizer)


def _parts(optimizer: Any) -> list[Share]:
    replica = optimizer.data_parallel_group_idx, optimizer.distributed_optimizer_instance_id
    masters = functools.partial(_masters_of_parts, optimizer)
    return [Share(optimizer.data_parallel_group, list(optimizer.buffers), masters, replica)]


def _masters_of_parts(optimizer: Any) -> Iterator[OwnedMaster]:
    pairs = (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    )
    for models, mains in pairs:
        for model_group, main_group in zip(models, mains, strict=True):
            for param, master in zip(model_group, main_group, strict=True):
                ranges = optimizer._get_model_param_range_map(param)
                rounded = functools.partial(_in_bucket, optimizer, param, ranges["gbuf_world_in_bucket"])
                yield OwnedMaster(param, master, ranges["param"].start, rounded)


def _in_bucket(optimizer: Any, param: Any, span: Any) -> Tensor:
    buffer, _, bucket = optimizer.model_param_gbuf_map[param]
    data: Tensor = optimizer.buffers[buffer].buckets[bucket].param_data
    return data.view(-1)[span.start : span.end]


def _read_given(optimizer: Any, state_dict: Any) -> None:
    """Read masters from a model's state dict, by the method of the class, since an attachment
    replaces that of the instance.
    """
    inner = optimizer.optimizer
    if host.offloads(inner):
        # The host's method returns early for a HybridDeviceOptimizer.
        optimizer.optimizer = None
    try:
        type(optimizer)._copy_model_params_to_main_params(optimizer, state_dict)
    finally:
        optimizer.optimizer = inner


def _whole_matrices(optimizer: Any) -> list[Share]:
    """Return two shares: dense layers over the data-parallel ranks, and experts over the ranks with
    the same experts.
    """
    groups, divided = optimizer.pg_collection, []
    for name, group, saved_by, suffix in (
        ("buffers", optimizer.dp_cp, groups.mp, ""),
        ("expert_parallel_buffers", optimizer.expt_dp, groups.tp_ep_pp, "_of_experts"),
    ):
        mine = [b for chunk in optimizer.model_chunks for b in getattr(chunk, name) if host.is_layer_wise_buffer(b)]
        # The dense share is there even without buffers: callers take the first one for it.
        if mine or not suffix:
            masters = functools.partial(_masters_of_matrices, optimizer, mine)
            divided.append(Share(group, mine, masters, (saved_by.rank(), 0), suffix))
    return divided


def _masters_of_matrices(optimizer: Any, buffers: Sequence[Any]) -> Iterator[OwnedMaster]:
    inner = _inner(optimizer)
    in_buffers = {id(param) for buffer in buffers for param in buffer.params}
    for models, mains in zip(inner.float16_groups, inner.fp32_from_float16_groups, strict=True):
        for param, master in zip(models, mains, strict=True):
            if id(param) in in_buffers:
                yield OwnedMaster(param, master, 0, functools.partial(getattr, param, "data"))


def _inner(optimizer: Any) -> Any:
    """Return the inner optimizer of a layer-wise one, which keeps the masters. Raises ValueError if
    there are several.
    """
    inner = optimizer.chained_optimizers
    if len(inner) != 1:
        raise ValueError(
            f"a {type(optimizer).__name__} of {len(inner)} optimizers is not supported: pass it the matrices only, as "
            "get_megatron_optimizer does where use_distributed_optimizer=True is set in DistributedDataParallelConfig"
        )
    return inner[0]


def _read_given_by_name(optimizer: Any, state_dict: Any) -> None:
    """Read masters of whole matrices from a model's state dict.

    The host's layer-wise optimizer has no such method. A DistributedOptimizer has the lookup of
    names, which needs nothing of its instance but the model chunks.
    """
    kind = host.module(host.OPTIMIZER).DistributedOptimizer
    finder = kind.__new__(kind)
    finder.model_chunks = optimizer.model_chunks
    values = finder._build_model_param_to_state_dict_param_map(state_dict)
    for share in shares(optimizer):
        for param, master, *_ in share.masters():
            master.copy_(values[param].view(master.shape))


DISTRIBUTED = OptimizerKind(
    shares=_parts,
    copier=lambda optimizer: optimizer,
    reads=lambda optimizer: [(optimizer, "_copy_model_params_to_main_params")],
    read_given=_read_given,
    saves_shards=True,
)
LAYER_WISE = OptimizerKind(
    shares=_whole_matrices,
    copier=_inner,
    reads=lambda optimizer: [
        (optimizer, "reload_model_params"),
        (_inner(optimizer), "_copy_model_params_to_main_params"),
    ],
    read_given=_read_given_by_name,
    saves_shards=False,
    saves=("save_state_dict_to_file",),
    loads=("load_state_dict_from_file",),
)
