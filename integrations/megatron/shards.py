"""The facts of a model in Megatron: what each optimizer owns here, and what gathers it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerocast import QuantizedWeight
from zerocast.distributed.group import Group
from zerocast.formats.layout import Span, byte_range
from zerocast.integrations.host_adapter import PlainShard

from . import host, ownership
from .offload import memory_of
from .primary import is_primary, is_te_tensor, primary_of, weight_of
from .unattached import DetachedState, state_left_in

_UNKNOWN = "a parameter of another model"


@dataclass(frozen=True)
class OptimizerShards:
    """The part of one optimizer's share that this rank owns.

    Quantized weights stand in the order of its buffers, the same on every rank.

    `params` are the parameters that `weights` stand for, `masters` and `starts` hold None where
    this rank owns nothing, `bucket_groups` gather the bytes of its buffers, and `detached` is what
    an attachment before this one has left.
    """

    optimizer: Any
    share: ownership.Share
    detached: DetachedState | None
    names: list[str] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)
    weights: list[QuantizedWeight] = field(default_factory=list)
    masters: list[Tensor | None] = field(default_factory=list)
    starts: list[int | None] = field(default_factory=list)
    plain: dict[int, PlainShard] = field(default_factory=dict)  # by id of the parameter
    bucket_groups: list[Any] = field(default_factory=list)

    @property
    def group(self) -> Group:
        """The ranks that share the masters."""
        return Group.of(self.share.group)

    def span(self, index: int) -> Span:
        """The elements that this rank owns of a weight."""
        master, start = self.masters[index], self.starts[index]
        return Span(0, 0) if master is None or start is None else Span(start, start + master.numel())


def collect(optimizer: Any, chunks: Sequence[Any]) -> list[OptimizerShards]:
    """The shards of every optimizer inside `optimizer`, one a share of it, over the parameters of
    `chunks`.

    TypeError or ValueError for a byte buffer with something in it that is not cast, for a quantized
    weight that no gather brings and for one that no optimizer owns; RuntimeError for a host without
    the names that are read.
    """
    names = _unique_names(chunks)
    groups = [group for chunk in chunks for group in host.bucket_groups(chunk)]
    optimizers = host.distributed_optimizers(optimizer)
    found = [_shards_of(one, share, names, groups) for one in optimizers for share in ownership.shares(one)]
    host.check_groups(group for group in groups if any(map(is_te_tensor, primary_of(group))))
    _check_gathered(chunks, groups)
    _check_owned(found, groups, names)
    return found


def _unique_names(chunks: Sequence[Any]) -> dict[int, str]:
    """Names by id of the parameter.

    Chunks of one pipeline stage count their layers alike: a later one is named too.
    """
    names: dict[str, int] = {}
    for number, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            names[f"chunk {number}: {name}" if name in names else name] = id(param)
    return {param: name for name, param in names.items()}


def _shards_of(
    optimizer: Any, share: ownership.Share, names: Mapping[int, str], groups: Sequence[Any]
) -> OptimizerShards:
    found = OptimizerShards(optimizer, share, state_left_in(optimizer))
    index: dict[int, int] = {}
    for buffer in share.buffers:
        for param in buffer.params:
            name = names.get(id(param), _UNKNOWN)
            if is_primary(param):
                index[id(param)] = len(found.weights)
                found.names.append(name)
                found.params.append(param)
                found.weights.append(_weight_of(param, name))
                found.masters.append(None)
                found.starts.append(None)
            elif buffer.param_dtype.itemsize == 1:
                raise TypeError(
                    f"{name} lies in a byte buffer and is a {type(param).__name__}, not a QuantizedWeight, nor a tensor of "
                    "TransformerEngine that holds one weight; for grouped experts set moe_single_grouped_weight=False"
                )
            elif param.numel():
                found.plain[id(param)] = PlainShard(name, param)
    for param, master, start, rounded in share.masters():
        if is_primary(param):
            at = index[id(param)]
            found.masters[at], found.starts[at] = memory_of(master), start
        else:
            name = names.get(id(param), _UNKNOWN)
            found.plain[id(param)] = PlainShard(name, param, memory_of(master), start, rounded())
    buckets = {id(bucket) for buffer in share.buffers for bucket in buffer.buckets}
    found.bucket_groups.extend(group for group in groups if any(id(bucket) in buckets for bucket in group.buckets))
    return found


def _weight_of(param: Any, name: str) -> QuantizedWeight:
    try:
        return weight_of(param)
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"{name}: {error}") from error


def _check_gathered(chunks: Sequence[Any], groups: Sequence[Any]) -> None:
    """ValueError for a trained quantized weight that no gather brings, as one that was quantized
    after DistributedDataParallel was built.
    """
    gathered = {id(param) for group in groups for bucket in group.buckets for param in bucket.params_list}
    for name, param in (named for chunk in chunks for named in chunk.named_parameters()):
        if is_primary(param) and param.requires_grad and id(param) not in gathered:
            raise ValueError(
                f"{name} is quantized and in no bucket of DistributedDataParallel, which would never train it: call quantize_ "
                "before DistributedDataParallel is built"
            )


def _check_owned(found: Sequence[OptimizerShards], groups: Sequence[Any], names: Mapping[int, str]) -> None:
    owned = {id(param) for shards in found for param in shards.params}
    orphans = [names[id(param)] for group in groups for param in primary_of(group) if id(param) not in owned]
    if orphans:
        raise ValueError(f"no optimizer that was given owns the quantized weights {', '.join(orphans[:4])}")


def bytes_not_sent(shards: OptimizerShards) -> str | None:
    """The error if this rank casts bytes that it does not send, or None."""
    places = {
        param: (group, bucket)
        for group in shards.bucket_groups
        for bucket in group.buckets
        for param in bucket.params_list
    }
    for i, (name, param, weight) in enumerate(zip(shards.names, shards.params, shards.weights, strict=True)):
        if param not in places:
            return f"{name} is owned by the optimizer, and in no bucket of the model chunks that were given"
        group, bucket = places[param]
        data, rowwise = bucket.param_data, weight.rowwise_data
        if data is None or data.untyped_storage().data_ptr() != rowwise.untyped_storage().data_ptr():
            return f"{name} does not lie in the buffer of its bucket: build DistributedDataParallel inside quantized_params()"
        offset = rowwise.data_ptr() - data.data_ptr()
        span = shards.span(i)
        first, last = byte_range(weight.format, weight.shape, span, weight.dtype)
        size, rank = group.intra_distributed_optimizer_instance_size, group.intra_distributed_optimizer_instance_rank
        sent = data.numel() * data.element_size() // size
        low, high = rank * sent, (rank + 1) * sent
        if span.numel and not low <= offset + first <= offset + last <= high:
            return (
                f"{name} ({weight.format}): this rank casts elements [{span.start}, {span.stop}), bytes "
                f"[{offset + first}, {offset + last}) of bucket {bucket.bucket_id}, and sends bytes [{low}, {high}); what "
                "lies outside would be lost. Build model, DistributedDataParallel and optimizer inside quantized_params()"
            )
    return None


def elements_without_owner(shards: OptimizerShards) -> str | None:
    """The error if a part of a weight has no owner on any rank, or None. Collective."""
    counts = [shards.span(i).numel for i in range(len(shards.weights))]
    owned = torch.tensor(counts, dtype=torch.int64, device=shards.group.device)
    if counts:
        shards.group.all_reduce_sum(owned, "the elements that ranks own")
    for name, weight, count in zip(shards.names, shards.weights, owned.tolist(), strict=True):
        if count != weight.numel():
            return f"{name} has {weight.numel()} elements, and the ranks of its group own {count}"
    return None


@torch.no_grad()
def read_masters(shards: OptimizerShards) -> None:
    """Make masters of the model as it is, as at the start of a fine-tuning run.

    Those of quantized weights are dequantized.
    """
    for i, (weight, master) in enumerate(zip(shards.weights, shards.masters, strict=True)):
        if master is not None:
            span = shards.span(i)
            master.copy_(weight.dequantize().view(-1)[span.start : span.stop].view(master.shape))
    for part in shards.plain.values():
        if part.master is not None and part.rounded is not None:
            part.master.copy_(part.rounded)
