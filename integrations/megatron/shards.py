"""The shards of a model in Megatron: the masters of each optimizer on this rank, their weights, and
the bucket groups that gather these.

An optimizer is divided into shares, one for each group of ranks. Each rank of a
DistributedOptimizer owns a part of every bucket. Each rank of a LayerWiseDistributedOptimizer owns
whole matrices: matrices of dense layers are divided over all data-parallel ranks, matrices of
experts over the ranks with the same experts.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerocast import QuantizedWeight
from zerocast.cast.host import PlainShard
from zerocast.distributed.agreement import first_of
from zerocast.distributed.group import Group
from zerocast.formats.layout import Span

from . import host
from .offload import memory_of
from .primary import errors_of, is_primary, is_te_tensor, primary_of, weight_of

_UNKNOWN = "a parameter of a different model"


class OwnedMaster(NamedTuple):
    """The elements of a parameter that this rank owns.

    Attributes:
        param: the unsharded parameter.
        master: their FP32 master, the host's own contiguous tensor. It is flat, or has the shape of
            the parameter if the rank owns all of it.
        start: the row-major position of the first element.
        rounded: returns the same elements in the host's buffer, in the dtype of the parameter.
            Called for plain parameters only.
    """

    param: Any
    master: Tensor
    start: int
    rounded: Callable[[], Tensor]


@dataclass(frozen=True)
class Share:
    """The parameters of an optimizer whose masters one group of ranks owns together.

    A DistributedOptimizer has one share. A LayerWiseDistributedOptimizer has one for dense layers,
    and one for experts if it updates any.

    Attributes:
        optimizer: the host's optimizer.
        process_group: the ranks that own the masters.
        buffers: the host's buffers with these parameters, the same on every rank of the group.
        masters: iterates over the masters that this rank owns.
        replica: (index of the group, index of the optimizer instance), which identify the
            checkpoint entries that are saved once for the group.
        suffix: the end of the names of those entries. It is not empty for experts, since one
            optimizer then saves the entries of two shares.
    """

    optimizer: Any
    process_group: Any
    buffers: list[Any]
    masters: Callable[[], Iterator[OwnedMaster]]
    replica: tuple[int, int]
    suffix: str


@dataclass
class OwnedWeight:
    """A quantized weight, and the part of it that this rank owns.

    Attributes:
        name, param: the host's parameter.
        weight: the parameter itself, or a view of a tensor of TransformerEngine.
        master: the FP32 master of the elements that this rank owns, on the device or in CPU memory;
            None if it owns none.
        start: the row-major position of the master's first element, or None.
    """

    name: str
    param: Any
    weight: QuantizedWeight
    master: Tensor | None = None
    start: int | None = None

    @property
    def span(self) -> Span:
        """The elements that this rank owns."""
        if self.master is None or self.start is None:
            return Span(0, 0)
        return Span(self.start, self.start + self.master.numel())


@dataclass(frozen=True)
class OwnedShare(Share):
    """A share, and the part of it that this rank owns.

    Attributes:
        weights: the quantized weights in the order of the share's buffers, the same on every rank.
        plain: the parameters that are not quantized.
        bucket_groups: the host's bucket groups that gather the bytes of the share's buffers.
    """

    weights: list[OwnedWeight]
    plain: list[PlainShard]
    bucket_groups: list[Any]

    @property
    def group(self) -> Group:
        """The ranks that share the masters."""
        return Group.of(self.process_group)


def collect(optimizers: Sequence[Any], chunks: Sequence[Any]) -> list[OwnedShare]:
    """Return one OwnedShare for each share of each of these optimizers, over the parameters of
    `chunks`.

    Raises TypeError or ValueError for a byte buffer with a parameter that is not cast, for a
    quantized weight that is not gathered and for one that no optimizer owns.
    """
    names = _unique_names(chunks)
    groups = host.bucket_groups(chunks)
    owned_shares = [_owned_share(share, names, groups) for inner in optimizers for share in shares(inner)]
    _check_gathered(chunks, groups)
    _check_owned(owned_shares, groups, names)
    return owned_shares


def _unique_names(chunks: Sequence[Any]) -> dict[int, str]:
    """Return unique names of the parameters of all chunks, keyed by id of the parameter.

    Every chunk of a pipeline stage counts its layers from 0, so chunks repeat names. A name that an
    earlier chunk has gets the number of its own chunk as a prefix.
    """
    names: dict[str, int] = {}
    for number, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            names[f"chunk {number}: {name}" if name in names else name] = id(param)
    return {param: name for name, param in names.items()}


def _owned_share(share: Share, names: Mapping[int, str], groups: Sequence[Any]) -> OwnedShare:
    weights: dict[int, OwnedWeight] = {}  # both by id of the parameter
    plain: dict[int, PlainShard] = {}
    for buffer in share.buffers:
        for param in buffer.params:
            name = names.get(id(param), _UNKNOWN)
            if is_primary(param):
                with errors_of(name):
                    weights[id(param)] = OwnedWeight(name, param, weight_of(param))
            elif buffer.param_dtype.itemsize == 1:
                raise TypeError(
                    f"{name} is in a byte buffer and is a {type(param).__name__}, not a QuantizedWeight, nor a tensor of "
                    "TransformerEngine that holds one weight; for grouped experts set moe_single_grouped_weight=False"
                )
            elif param.numel():
                plain[id(param)] = PlainShard(name, param)
    for param, master, start, rounded in share.masters():
        if is_primary(param):
            owned = weights[id(param)]
            owned.master = memory_of(master)
            owned.start = start
        else:
            name = names.get(id(param), _UNKNOWN)
            plain[id(param)] = PlainShard(name, param, memory_of(master), start, rounded())
    buckets = {id(bucket) for buffer in share.buffers for bucket in buffer.buckets}
    gathering = [group for group in groups if any(id(bucket) in buckets for bucket in group.buckets)]
    return OwnedShare(
        **vars(share), weights=list(weights.values()), plain=list(plain.values()), bucket_groups=gathering
    )


def _check_gathered(chunks: Sequence[Any], groups: Sequence[Any]) -> None:
    """Raise ValueError for a trained quantized weight in no bucket, such as one that was quantized
    after DistributedDataParallel was built.
    """
    gathered = {id(param) for group in groups for bucket in group.buckets for param in bucket.params_list}
    for name, param in (named for chunk in chunks for named in chunk.named_parameters()):
        if is_primary(param) and param.requires_grad and id(param) not in gathered:
            raise ValueError(
                f"{name} is quantized and in no bucket of DistributedDataParallel, which would never train it: call quantize_ "
                "before DistributedDataParallel is built"
            )


def _check_owned(owned_shares: Sequence[OwnedShare], groups: Sequence[Any], names: Mapping[int, str]) -> None:
    """Raise ValueError for a quantized weight that is gathered and that no given optimizer owns."""
    with_owner = {id(weight.param) for owned in owned_shares for weight in owned.weights}
    orphans = [names[id(param)] for group in groups for param in primary_of(group) if id(param) not in with_owner]
    if orphans:
        raise ValueError(f"no optimizer that was given owns the quantized weights {first_of(orphans)}")


@torch.no_grad()
def read_from_model(owned: OwnedShare) -> None:
    """Overwrite the masters with the model's values, as at the start of a fine-tuning run.

    The values of quantized weights are dequantized.
    """
    for own in owned.weights:
        if own.master is not None:
            values = own.weight.dequantize().view(-1)[own.span.start : own.span.stop]
            own.master.copy_(values.view(own.master.shape))
    for plain in owned.plain:
        if plain.master is not None and plain.rounded is not None:
            plain.master.copy_(plain.rounded)


# -- the shares of each kind of optimizer


def shares(optimizer: Any) -> list[Share]:
    """Return the shares of an optimizer that `distributed_optimizers` returned: one for each group
    of ranks, in the same order on all ranks of a group.
    """
    return _whole_matrices(optimizer) if host.is_layer_wise(optimizer) else _parts(optimizer)


def _parts(optimizer: Any) -> list[Share]:
    replica = optimizer.data_parallel_group_idx, optimizer.distributed_optimizer_instance_id
    masters = functools.partial(_masters_of_parts, optimizer)
    return [Share(optimizer, optimizer.data_parallel_group, list(optimizer.buffers), masters, replica, suffix="")]


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
            divided.append(Share(optimizer, group, mine, masters, (saved_by.rank(), 0), suffix))
    return divided


def _masters_of_matrices(optimizer: Any, buffers: Sequence[Any]) -> Iterator[OwnedMaster]:
    inner = holder_of_masters(optimizer)
    in_buffers = {id(param) for buffer in buffers for param in buffer.params}
    for models, mains in zip(inner.float16_groups, inner.fp32_from_float16_groups, strict=True):
        for param, master in zip(models, mains, strict=True):
            if id(param) in in_buffers:
                yield OwnedMaster(param, master, 0, functools.partial(getattr, param, "data"))


def holder_of_masters(optimizer: Any) -> Any:
    """Return the optimizer that keeps the masters, and whose methods copy them: the inner one of a
    layer-wise optimizer. Raises ValueError if that has several.
    """
    if not host.is_layer_wise(optimizer):
        return optimizer
    inner = optimizer.chained_optimizers
    if len(inner) != 1:
        raise ValueError(
            f"a {type(optimizer).__name__} of {len(inner)} optimizers is not supported: pass it the matrices only, as "
            "get_megatron_optimizer does where use_distributed_optimizer=True is set in DistributedDataParallelConfig"
        )
    return inner[0]


def read_from_state_dict(optimizer: Any, state_dict: Any) -> None:
    """Overwrite the masters with the values of a model's state dict."""
    # The class of a DistributedOptimizer looks up names. That needs nothing of its instance but the
    # model chunks, and a layer-wise optimizer has no such method.
    kind = host.module(host.OPTIMIZER).DistributedOptimizer
    finder = kind.__new__(kind)
    finder.model_chunks = optimizer.model_chunks
    values = finder._build_model_param_to_state_dict_param_map(state_dict)
    for share in shares(optimizer):
        for param, master, start, _ in share.masters():
            value = values[param].dequantize() if is_te_tensor(values[param]) else values[param]
            master.copy_(value.view(-1)[start : start + master.numel()].view(master.shape))
