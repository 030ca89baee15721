"""Gradient norms, the global one and those of single parameters, and the clip factor that
follows from them.
"""

import math

import torch
from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.formats.layout import SHARD_ALIGNMENT_ELEMENTS, round_up
from zerocast.optim.bucket import Bucket

FAN_IN = 64  # of the fixed tree that adds partial sums
PARTS = 64  # sums need f64 copies: of one part at a time
SMALLEST_PART = 2**16


def square_sum(shard: Tensor, group: Group) -> Tensor:
    """Sum of squares of all ranks' gradients, f64[].

    Torch and NCCL choose the order, so the last bits may differ between numbers of ranks.

    On a GPU one read of the shard: this norm widens in registers, where `vector_norm` makes an f64
    copy first.
    """
    norms = torch._foreach_norm(_parts(shard), 2.0, dtype=torch.float64)
    total = torch.stack(norms).square().sum()
    group.all_reduce_sum(total, "the gradient norm")
    return total


class LogicalOrder:
    """Sums of squares in an order that the sharding does not change.

    Chunks of `SHARD_ALIGNMENT_ELEMENTS` never straddle two ranks and are cut alike from a
    parameter, for any number of ranks. Their f64 sums are gathered, put into the order of
    registration, and added by a tree of fixed shape.
    """

    def __init__(self, buckets: list[Bucket], names: list[str], group: Group, device: torch.device) -> None:
        self._group = group
        per_rank = sum(bucket.shard_numel for bucket in buckets) // SHARD_ALIGNMENT_ELEMENTS
        self._gathered = torch.zeros(group.size * per_rank, dtype=torch.float64, device=device)
        places = {}
        for bucket in buckets:
            for slot in bucket.slots:
                first, last = (
                    slot.offset // SHARD_ALIGNMENT_ELEMENTS,
                    -(-(slot.offset + slot.numel) // SHARD_ALIGNMENT_ELEMENTS),
                )
                chunk = torch.arange(first, last)
                per_shard = bucket.shard_numel // SHARD_ALIGNMENT_ELEMENTS
                places[slot.name] = (
                    (chunk // per_shard) * per_rank + bucket.start // SHARD_ALIGNMENT_ELEMENTS + chunk % per_shard
                )
        self._order = torch.cat([places[name] for name in names]).to(device)
        self.chunks = {name: len(places[name]) for name in names}

    def power_sums(self, shard: Tensor, power: float) -> Tensor:
        """Sums of powers of each chunk of all ranks, f64[chunks], in the order of registration.
        A collective call.
        """
        self._group.all_gather_into(self._gathered, _power_sums(shard, power), what="the gradient norm")
        return self._gathered[self._order]

    def square_sum(self, shard: Tensor) -> Tensor:
        """Sum of squares of all ranks' gradients, f64[]."""
        level = self.power_sums(shard, 2.0)
        while level.numel() > 1:
            level = torch.nn.functional.pad(level, (0, -level.numel() % FAN_IN)).view(-1, FAN_IN).sum(1)
        return level.view(())


class ParameterNorms:
    """The norm of each parameter's gradient over all ranks. One collective finds those of all
    parameters, which are kept.

    What changes a gradient says so by `changed`; the next reading of that gradient then computes
    all norms anew. So whether a reading communicates follows from the calls that were made before
    it, which are the same on every rank.

    Args:
        order: that of a deterministic norm, or None for the library's.
    """

    def __init__(self, buckets: list[Bucket], group: Group, order: LogicalOrder | None, device: torch.device) -> None:
        self._group, self._order = group, order
        lengths, self._flat = _segments(buckets, group.rank)
        self._lengths = torch.tensor(lengths, device=device)
        if order:
            self._logical = {name: index for index, name in enumerate(order.chunks)}
            self._logical_lengths = torch.tensor(list(order.chunks.values()), device=device)
        self._kept: dict[float, dict[str, Tensor]] = {}

    def read(self, shard: Tensor, name: str, norm_type: float) -> Tensor:
        """The norm of one parameter's gradient, f32[]; a collective call if it is not known.
        ValueError below 0.
        """
        if not norm_type >= 0.0:
            raise ValueError(
                f"norm_type of a reduced gradient is 0, positive or inf, got {norm_type}: for others take full_tensor()"
            )
        kept = self._kept.get(norm_type, {})
        if name not in kept:
            places, norms = self._all(shard, norm_type)
            rows = norms.unbind()
            kept = self._kept[norm_type] = {each: rows[place] for each, place in places.items()}
        return kept[name].clone()  # what the caller does to it is none of ours

    def changed(self, name: str | None = None) -> None:
        """The gradient of `name` is another one now; None: all of them are."""
        for kept in self._kept.values():
            if name is None:
                kept.clear()
            else:
                kept.pop(name, None)

    def _all(self, shard: Tensor, norm_type: float) -> tuple[dict[str, int], Tensor]:
        if norm_type == math.inf:
            return self._flat, self._largest(shard)
        if self._order:
            sums = _reduce_segments(self._order.power_sums(shard, norm_type), "sum", self._logical_lengths)
        else:
            sums = _reduce_segments(_power_sums(shard, norm_type), "sum", self._lengths)
            self._group.all_reduce_sum(sums, "the norms of gradients")
        root = sums.sqrt() if norm_type == 2.0 else sums if norm_type == 0.0 else sums.pow(1.0 / norm_type)
        return self._logical if self._order else self._flat, root.float()

    def _largest(self, shard: Tensor) -> Tensor:
        """MAX drops NaN on some ranks, so it is reduced as a flag."""
        largest = torch.cat([part.view(-1, SHARD_ALIGNMENT_ELEMENTS).abs().amax(1) for part in _parts(shard)])
        nan = largest.isnan()
        both = torch.stack([largest.masked_fill(nan, 0.0), nan.float()])
        both = torch.stack([_reduce_segments(row, "max", self._lengths) for row in both])
        self._group.all_reduce_max(both, "the norms of gradients")
        return both[0].masked_fill(both[1] > 0, math.nan)


def _segments(buckets: list[Bucket], rank: int) -> tuple[list[int], dict[str, int]]:
    """(chunks of each segment of a rank's shard, the segment of each parameter); padding is a
    segment of each bucket.
    """
    lengths: list[int] = []
    places: dict[str, int] = {}
    for bucket in sorted(buckets, key=lambda bucket: bucket.start):  # as the shard holds them
        first = len(lengths)
        for slot in bucket.slots:
            places[slot.name] = len(lengths)
            lengths.append(-(-bucket.owned(slot, rank)[0].numel // SHARD_ALIGNMENT_ELEMENTS))
        lengths.append(bucket.shard_numel // SHARD_ALIGNMENT_ELEMENTS - sum(lengths[first:]))
    return lengths, places


def _reduce_segments(values: Tensor, how: str, lengths: Tensor) -> Tensor:
    return torch.segment_reduce(values, how, lengths=lengths, unsafe=True, initial=0.0)


def _power_sums(shard: Tensor, power: float) -> Tensor:
    """Sums of |x| ** power of each chunk of `SHARD_ALIGNMENT_ELEMENTS` elements, f64."""
    return torch.cat(
        [_powers(part.view(-1, SHARD_ALIGNMENT_ELEMENTS).double(), power).sum(1) for part in _parts(shard)]
    )


def _powers(values: Tensor, power: float) -> Tensor:
    if power == 2.0:
        return values.square()
    return values.ne(0.0).double() if power == 0.0 else values.abs().pow(power)


def _parts(shard: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = shard.split(
        max(SMALLEST_PART, round_up(shard.numel() // PARTS, SHARD_ALIGNMENT_ELEMENTS))
    )
    return parts


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor, f32[1], that clips gradients of f32[] `norm`: `min(1, max_norm / (norm + 1e-6))`,
    as in torch.
    """
    # a tensor above: torch's `scalar / tensor` rounds twice
    factor = torch.full_like(norm, max_norm) / (norm + 1e-6)
    return factor.clamp(max=1.0).view(1)
