"""The shards of a model in Megatron: the masters of each optimizer on this rank, their weights, and
the bucket groups that gather these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerocast import QuantizedWeight
from zerocast.cast.host import PlainShard
from zerocast.distributed.agreement import first_of, validate_across_ranks
from zerocast.distributed.group import Group
from zerocast.formats.layout import Span, byte_range

from . import host, optimizer_kinds
from .offload import memory_of
from .primary import is_primary, primary_of, weight_of
from .unattached import DetachedState, state_left_in
from .validate import has_stepped

_UNKNOWN = "a parameter of a different model"


@dataclass(frozen=True)
class OwnedShare:
    """The part of one optimizer's share that this rank owns.

    Attributes:
        optimizer, share: the host's optimizer, and the share of it that one group of ranks divides.
        detached: the state that an earlier attachment has left; None without one.
        names, params, weights: the quantized weights in the order of the share's buffers, the same
            on every rank. For a tensor of TransformerEngine the weight is a view of the parameter.
        masters: for each weight, the FP32 master of the elements that this rank owns, on the device
            or in CPU memory; None where it owns none.
        starts: for each weight, the row-major position of the master's first element, or None.
        plain: the parameters that are not quantized, keyed by id.
        bucket_groups: the host's bucket groups that gather the bytes of the share's buffers.
    """

    optimizer: Any
    share: optimizer_kinds.Share
    detached: DetachedState | None
    names: list[str] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)
    weights: list[QuantizedWeight] = field(default_factory=list)
    masters: list[Tensor | None] = field(default_factory=list)
    starts: list[int | None] = field(default_factory=list)
    plain: dict[int, PlainShard] = field(default_factory=dict)
    bucket_groups: list[Any] = field(default_factory=list)

    @property
    def group(self) -> Group:
        """The ranks that share the masters."""
        return Group.of(self.share.group)

    def span(self, index: int) -> Span:
        """Return the elements that this rank owns of a weight."""
        master, start = self.masters[index], self.starts[index]
        return Span(0, 0) if master is None or start is None else Span(start, start + master.numel())


def collect(optimizers: Sequence[Any], chunks: Sequence[Any]) -> list[OwnedShare]:
    """Return one OwnedShare for each share of each of these optimizers, over the parameters of
    `chunks`.

    Raises TypeError or ValueError for a byte buffer with a parameter that is not cast, for a
    quantized weight that is not gathered and for one that no optimizer owns.
    """
    names = _unique_names(chunks)
    groups = [group for chunk in chunks for group in host.bucket_groups(chunk)]
    shares = [(inner, share) for inner in optimizers for share in optimizer_kinds.shares(inner)]
    owned_shares = [_owned_share(inner, share, names, groups) for inner, share in shares]
    _check_gathered(chunks, groups)
    _check_owned(owned_shares, groups, names)
    return owned_shares


def _unique_names(chunks: Sequence[Any]) -> dict[int, str]:
    """Unique names of the parameters of all chunks, keyed by id of the parameter.

    Every chunk of a pipeline stage counts its layers from 0. A name that an earlier chunk has is
    therefore preceded by the number of its chunk.
    """
    names: dict[str, int] = {}
    for number, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            names[f"chunk {number}: {name}" if name in names else name] = id(param)
    return {param: name for name, param in names.items()}


def _owned_share(
    optimizer: Any, share: optimizer_kinds.Share, names: Mapping[int, str], groups: Sequence[Any]
) -> OwnedShare:
    owned = OwnedShare(optimizer, share, state_left_in(optimizer))
    index: dict[int, int] = {}  # position in `owned.weights`, by id of the parameter
    for buffer in share.buffers:
        for param in buffer.params:
            name = names.get(id(param), _UNKNOWN)
            if is_primary(param):
                index[id(param)] = len(owned.weights)
                owned.names.append(name)
                owned.params.append(param)
                owned.weights.append(_weight_of(param, name))
                owned.masters.append(None)
                owned.starts.append(None)
            elif buffer.param_dtype.itemsize == 1:
                raise TypeError(
                    f"{name} is in a byte buffer and is a {type(param).__name__}, not a QuantizedWeight, nor a tensor of "
                    "TransformerEngine that holds one weight; for grouped experts set moe_single_grouped_weight=False"
                )
            elif param.numel():
                owned.plain[id(param)] = PlainShard(name, param)
    for param, master, start, rounded in share.masters():
        if is_primary(param):
            at = index[id(param)]
            owned.masters[at], owned.starts[at] = memory_of(master), start
        else:
            name = names.get(id(param), _UNKNOWN)
            owned.plain[id(param)] = PlainShard(name, param, memory_of(master), start, rounded())
    buckets = {id(bucket) for buffer in share.buffers for bucket in buffer.buckets}
    owned.bucket_groups.extend(group for group in groups if any(id(bucket) in buckets for bucket in group.buckets))
    return owned


def _weight_of(param: Any, name: str) -> QuantizedWeight:
    """Return the weight over a parameter's bytes. Its errors begin with the parameter's name."""
    try:
        return weight_of(param)
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"{name}: {error}") from error


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
    with_owner = {id(param) for owned in owned_shares for param in owned.params}
    orphans = [names[id(param)] for group in groups for param in primary_of(group) if id(param) not in with_owner]
    if orphans:
        raise ValueError(f"no optimizer that was given owns the quantized weights {first_of(orphans)}")


def agree(owned: OwnedShare, was_detached: bool) -> None:
    """Raise, on all ranks that share masters, if one of them finds an error. Collective.

    `was_detached` is True if an earlier attachment of these optimizers was detached.
    """
    # An optimizer of plain parameters keeps no state of that attachment, under which it may have
    # stepped.
    may_have_stepped = owned.detached is not None or (was_detached and not owned.weights)
    problem: Exception | None = None
    if not may_have_stepped and has_stepped(owned.optimizer):
        problem = RuntimeError("the optimizer has stepped or was loaded already: attach before")
    elif wrong := bytes_not_sent(owned):
        problem = ValueError(wrong)
    validate_across_ranks(owned.group, owned.names, problem, "attaches zerocast")
    if wrong := elements_without_owner(owned):
        raise ValueError(wrong)


def bytes_not_sent(owned: OwnedShare) -> str | None:
    """Return the error if this rank casts bytes that it does not send, or None.

    In an all-gather each rank sends an equal part of a bucket's bytes. Bytes that a rank casts
    outside its part are overwritten by those of a different rank.
    """
    places = {
        param: (group, bucket)
        for group in owned.bucket_groups
        for bucket in group.buckets
        for param in bucket.params_list
    }
    for i, (name, param, weight) in enumerate(zip(owned.names, owned.params, owned.weights, strict=True)):
        if param not in places:
            return f"{name} is owned by the optimizer, and in no bucket of the model chunks that were given"
        group, bucket = places[param]
        data, rowwise = bucket.param_data, weight.rowwise_data
        if data is None or data.untyped_storage().data_ptr() != rowwise.untyped_storage().data_ptr():
            return f"{name} is not in the buffer of its bucket: build DistributedDataParallel inside quantized_params()"
        offset = rowwise.data_ptr() - data.data_ptr()  # of the weight in its bucket, in bytes
        span = owned.span(i)
        first, last = byte_range(weight.format, weight.shape, span, weight.dtype)
        size, rank = group.intra_distributed_optimizer_instance_size, group.intra_distributed_optimizer_instance_rank
        sent = data.numel() * data.element_size() // size
        low, high = rank * sent, (rank + 1) * sent
        if span.numel and not low <= offset + first <= offset + last <= high:
            return (
                f"{name} ({weight.format}): this rank casts elements [{span.start}, {span.stop}), bytes "
                f"[{offset + first}, {offset + last}) of bucket {bucket.bucket_id}, and sends bytes [{low}, {high}); codes "
                "outside of these would be lost. Build model, DistributedDataParallel and optimizer inside quantized_params()"
            )
    return None


def elements_without_owner(owned: OwnedShare) -> str | None:
    """Return the error if a part of a weight has no owner on any rank, or None. Collective."""
    counts = [owned.span(i).numel for i in range(len(owned.weights))]
    totals = torch.tensor(counts, dtype=torch.int64, device=owned.group.device)
    if counts:
        owned.group.all_reduce_sum(totals, "the elements that ranks own")
    for name, weight, count in zip(owned.names, owned.weights, totals.tolist(), strict=True):
        if count != weight.numel():
            return f"{name} has {weight.numel()} elements, and the ranks of its group own {count}"
    return None


@torch.no_grad()
def read_masters(owned: OwnedShare) -> None:
    """Overwrite the masters with the model's values, as at the start of a fine-tuning run.

    The values of quantized weights are dequantized.
    """
    for i, (weight, master) in enumerate(zip(owned.weights, owned.masters, strict=True)):
        if master is not None:
            span = owned.span(i)
            master.copy_(weight.dequantize().view(-1)[span.start : span.stop].view(master.shape))
    for plain in owned.plain.values():
        if plain.master is not None and plain.rounded is not None:
            plain.master.copy_(plain.rounded)
