"""What one DistributedOptimizer owns: shards of quantized weights, plain parameters, and whether their bytes are sent from here."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zerocast import QuantizedWeight, get_format
from zerocast.formats.layout import Span, byte_range
from zerocast.verification.master_views import MasterView

from .primary import is_primary, weight_of

IDENTITY = get_format("identity")


@dataclass(frozen=True)
class Shards:
    """Of one optimizer on this rank, quantized weights in the order of its buffers, the same on every rank.

    `params` are the parameters that `weights` stand for. `masters` and `starts` hold None where this rank owns nothing; `plain`
    holds (slice of the buffer, FP32 master) of the rest, `others` all parameters that are not quantized, by name, with the master
    and its start where this rank owns a part.
    """

    names: list[str]
    params: list[Any]
    weights: list[QuantizedWeight]
    masters: list[Tensor | None]
    starts: list[int | None]
    plain: list[tuple[Tensor, Tensor]]
    others: dict[str, tuple[Tensor, Tensor | None, int]]

    def span(self, index: int) -> Span:
        """The elements that this rank owns of a weight."""
        master, start = self.masters[index], self.starts[index]
        return Span(0, 0) if master is None or start is None else Span(start, start + master.numel())

    def owned(self, scales: Mapping[int, Tensor | None]) -> Iterator[MasterView]:
        """All parameters with their masters, for `zerocast.verify`; plain ones as they are rounded to their dtype.

        `scales` are what delayed scaling cast weights with, by id of the weight.
        """
        for i, (name, weight) in enumerate(zip(self.names, self.weights, strict=True)):
            yield MasterView(name, weight, self.masters[i], self.span(i), scales.get(id(weight)))
        for name, (param, master, start) in self.others.items():
            shape = tuple(param.shape) or (1,)
            live = {"rowwise_data": param.detach().view(-1, shape[-1])}
            weight = QuantizedWeight.of_buffers(shape, IDENTITY, param.dtype, live)
            yield MasterView(name, weight, master, Span(start, start + (0 if master is None else master.numel())))


def shards_of(optimizer: Any, names: Mapping[int, str]) -> Shards:
    """Read an optimizer's shards; `names` are those of the parameters of the model, by id.

    TypeError or ValueError for a byte buffer with something in it that is not cast.
    """
    found = Shards([], [], [], [], [], [], {})
    index: dict[int, int] = {}
    for buffer in optimizer.buffers:
        for param in buffer.params:
            name = names.get(id(param), "a parameter of another model")
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
                found.others[name] = (param, None, 0)
    pairs = (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    )
    for models, mains in pairs:
        for model_group, main_group in zip(models, mains, strict=True):
            for param, master in zip(model_group, main_group, strict=True):
                ranges = optimizer._get_model_param_range_map(param)
                if is_primary(param):
                    at = index[id(param)]
                    found.masters[at], found.starts[at] = master, ranges["param"].start
                else:
                    name = names.get(id(param), "a parameter of another model")
                    found.others[name] = (param, master, ranges["param"].start)
                    found.plain.append((_slice(optimizer, param, ranges["gbuf_world_in_bucket"]), master))
    return found


def _weight_of(param: Any, name: str) -> QuantizedWeight:
    try:
        return weight_of(param)
    except (TypeError, ValueError, RuntimeError) as error:
        raise type(error)(f"{name}: {error}") from error


def _slice(optimizer: Any, param: Any, place: Any) -> Tensor:
    """The part of a plain parameter that this rank owns, in the buffer."""
    buffer, _, bucket = optimizer.model_param_gbuf_map[param]
    data: Tensor = optimizer.buffers[buffer].buckets[bucket].param_data
    return data.view(-1)[place.start : place.end]


def misplaced(shards: Shards, bucket_groups: Sequence[Any]) -> str | None:
    """What is wrong if bytes of an owned span lie outside the slice of the bucket that this rank sends; None if all is well."""
    places = {
        param: (group, bucket) for group in bucket_groups for bucket in group.buckets for param in bucket.params_list
    }
    for i, (name, param, weight) in enumerate(zip(shards.names, shards.params, shards.weights, strict=True)):
        if param not in places:
            return f"{name} is owned by the optimizer, and in no bucket of the model chunks that were given"
        group, bucket = places[param]
        data, rowwise = bucket.param_data, weight.rowwise_data
        if data is None or data.untyped_storage().data_ptr() != rowwise.untyped_storage().data_ptr():
            return f"{name} does not lie in the buffer of its bucket: build DistributedDataParallel inside building()"
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
                "lies outside would be lost. Build model, DistributedDataParallel and optimizer inside building()"
            )
    return None


def uncovered(shards: Shards, by_rank: Sequence[Sequence[tuple[int, int]]]) -> str | None:
    """What is wrong if a part of a weight has no owner; None if all is well. `by_rank` holds the spans of every rank."""
    for i, (name, weight) in enumerate(zip(shards.names, shards.weights, strict=True)):
        owned = sum(stop - start for start, stop in (spans[i] for spans in by_rank))
        if owned != weight.numel():
            return f"{name} has {weight.numel()} elements, and the ranks of its group own {owned}"
    return None
