"""Gradient norms, global and of single parameters, and the clip factor."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast.distributed.bucket import Bucket
from zerocast.distributed.group import Group
from zerocast.formats.layout import SHARD_ALIGNMENT_ELEMENTS

# The number of values that a node of the fixed tree adds.
FAN_IN = 64
# A shard is read in about this number of parts, since sums need an f64 copy of a part. Smaller
# parts, which fit in the L2 cache of a GPU, are not faster and need more launches.
PARTS = 64
SMALLEST_PART = 2**16


class LibraryOrder:
    """Sums of squares in an order that torch and NCCL choose, so the last bits may differ between
    numbers of ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def squares(self, elements: Tensor) -> Tensor:
        """Return the sums of squares of parts of the elements, f64, one-dimensional."""
        if not elements.numel():
            return elements.new_empty(0, dtype=torch.float64)
        # On a GPU `_foreach_norm` widens to f64 in registers and reads the elements once.
        # `vector_norm` would make an f64 copy first.
        return torch.stack(torch._foreach_norm(_parts(elements), 2.0, dtype=torch.float64)).square()

    def total(self, squares: Sequence[Tensor]) -> Tensor:
        """Return the sum of the `squares` of this rank's whole shard and of all other ranks,
        f64[]. Collective.
        """
        total = torch.cat([*squares]).sum()
        self._group.all_reduce_sum(total, "the gradient norm")
        return total


class LogicalOrder:
    """Sums of squares in an order that does not depend on the sharding.

    Chunks of `SHARD_ALIGNMENT_ELEMENTS` never span two ranks, and a parameter is split into the
    same chunks for any number of ranks. The f64 sums of chunks are gathered, put into the order of
    registration, and added by a tree of fixed shape.

    Attributes:
        chunks: the number of chunks of each parameter keyed by name.
    """

    def __init__(self, buckets: list[Bucket], names: list[str], group: Group, device: torch.device) -> None:
        self._group = group
        chunks_per_rank = sum(bucket.shard_numel for bucket in buckets) // SHARD_ALIGNMENT_ELEMENTS
        self._gathered = torch.zeros(group.size * chunks_per_rank, dtype=torch.float64, device=device)
        # The indices of each parameter's chunks in the gathered sums.
        indices = {}
        for bucket in buckets:
            chunks_per_shard = bucket.shard_numel // SHARD_ALIGNMENT_ELEMENTS
            bucket_start = bucket.start // SHARD_ALIGNMENT_ELEMENTS
            for slot in bucket.slots:
                first = slot.offset // SHARD_ALIGNMENT_ELEMENTS
                last = -(-(slot.offset + slot.numel) // SHARD_ALIGNMENT_ELEMENTS)
                chunk = torch.arange(first, last)
                rank = chunk // chunks_per_shard
                indices[slot.name] = rank * chunks_per_rank + bucket_start + chunk % chunks_per_shard
        self._order = torch.cat([indices[name] for name in names]).to(device)
        self.chunks = {name: len(indices[name]) for name in names}

    def power_sums(self, shard: Tensor, power: float) -> Tensor:
        """Return the sums of powers of each chunk of all ranks, f64[chunks], in the order of
        registration. Collective.
        """
        return self._of_all_ranks(_power_sums(shard, power))

    def _of_all_ranks(self, sums: Tensor) -> Tensor:
        self._group.all_gather_into(self._gathered, sums, what="the gradient norm")
        return self._gathered[self._order]

    def squares(self, elements: Tensor) -> Tensor:
        """Return the sum of squares of each chunk of the elements, f64[chunks]."""
        return _power_sums(elements, 2.0)

    def total(self, squares: Sequence[Tensor]) -> Tensor:
        """Return the sum of the `squares` of this rank's whole shard, in its order, and of all
        other ranks, f64[]. Collective.
        """
        sums = self._of_all_ranks(torch.cat([*squares]))
        while sums.numel() > 1:
            sums = torch.nn.functional.pad(sums, (0, -sums.numel() % FAN_IN)).view(-1, FAN_IN).sum(1)
        return sums.view(())


class GradientNorms:
    """The norm of all gradients over all ranks, and of each parameter's gradient.

    At the end of a backward pass the last buckets are still being reduced, and the device would be
    idle. Meanwhile the squares of the others are added up (`begin_square_sum`).

    Norms of parameters are cached. One collective computes the norms of all parameters. Code that
    changes a gradient calls `changed`. The next read of that gradient's norm then computes all
    norms again. So only the calls before a read, which are the same on every rank, determine
    whether the read communicates.

    Args:
        buckets: the buckets in the order of reductions.
        group: the ranks.
        order: the order of summation, LogicalOrder for a deterministic norm.
    """

    def __init__(
        self, buckets: list[Bucket], group: Group, order: LibraryOrder | LogicalOrder, device: torch.device
    ) -> None:
        self._group = group
        self._squares = order
        # The first elements of the shard whose squares were added up, and the sums. 0 elements if
        # that was not begun, or if elements have changed since.
        self._begun: tuple[int, list[Tensor]] = 0, []
        # None in the library's order.
        self._order = order if isinstance(order, LogicalOrder) else None
        # The index of each parameter's segment in this rank's shard, and the number of chunks of
        # each segment. Fixed.
        lengths, self._segment_of = _segments(buckets, group.rank)
        self._lengths = torch.tensor(lengths, device=device)
        if self._order:
            # The same for the sums in logical order, where each parameter is a segment.
            self._logical_segment_of = {name: index for index, name in enumerate(self._order.chunks)}
            self._logical_lengths = torch.tensor(list(self._order.chunks.values()), device=device)
        # The norms that are still valid, by norm_type and name of the parameter.
        self._kept: dict[float, dict[str, Tensor]] = {}

    def begin_square_sum(self, shard: Tensor, stop: int) -> None:
        """Add up the squares of the first `stop` elements. The others need not be reduced yet."""
        self._begun = stop, [self._squares.squares(shard[:stop])]

    def drop_begun(self) -> None:
        """Forget what `begin_square_sum` has added up, because elements of this rank change."""
        self._begun = 0, []

    def square_sum(self, shard: Tensor, *, begun: bool) -> Tensor:
        """Return the sum of squares of all ranks' gradients, f64[]. With `begun` it uses what
        `begin_square_sum` has added up. Collective.
        """
        first, sums = self._begun if begun else (0, [])
        return self._squares.total([*sums, self._squares.squares(shard[first:])])

    def read(self, shard: Tensor, name: str, norm_type: float) -> Tensor:
        """Return the norm of one parameter's gradient, f32[]. Collective if it is not known. Raises
        ValueError for a negative `norm_type`.
        """
        if not norm_type >= 0.0:
            raise ValueError(
                f"norm_type of a reduced gradient is 0, positive or inf, got {norm_type}: for others use full_tensor()"
            )
        kept = self._kept.get(norm_type, {})
        if name not in kept:
            kept = self._kept[norm_type] = self._all(shard, norm_type)
        # A copy, since the caller may change it in place.
        return kept[name].clone()

    def changed(self, name: str | None = None) -> None:
        """Forget the norms of the gradient of `name`, or of all gradients if it is None."""
        self._begun = 0, []
        for kept in self._kept.values():
            if name is None:
                kept.clear()
            else:
                kept.pop(name, None)

    def _all(self, shard: Tensor, norm_type: float) -> dict[str, Tensor]:
        """Return the norms of all parameters, f32[] keyed by name. Collective."""
        segment_of = self._segment_of
        if norm_type == math.inf:
            norms = self._largest(shard)
        else:
            if self._order:
                segment_of = self._logical_segment_of
                sums = _reduce_segments(self._order.power_sums(shard, norm_type), "sum", self._logical_lengths)
            else:
                sums = _reduce_segments(_power_sums(shard, norm_type), "sum", self._lengths)
                self._group.all_reduce_sum(sums, "the norms of gradients")
            norms = _root(sums, norm_type).float()
        rows = norms.unbind()
        return {name: rows[segment] for name, segment in segment_of.items()}

    def _largest(self, shard: Tensor) -> Tensor:
        """Return the largest |x| of each segment over all ranks; NaN if any element is.
        Collective.
        """
        chunks = [part.view(-1, SHARD_ALIGNMENT_ELEMENTS).abs().amax(1) for part in _parts(shard)]
        largest = torch.cat(chunks).float()
        # A reduction with MAX loses NaN on some ranks, so NaN is reduced as a flag.
        is_nan = largest.isnan()
        rows = (largest.masked_fill(is_nan, 0.0), is_nan.float())
        reduced = torch.stack([_reduce_segments(row, "max", self._lengths) for row in rows])
        self._group.all_reduce_max(reduced, "the norms of gradients")
        largest, has_nan = reduced.unbind()
        return largest.masked_fill(has_nan > 0, math.nan)


def _segments(buckets: list[Bucket], rank: int) -> tuple[list[int], dict[str, int]]:
    """Return (chunks of each segment of a rank's shard, segment of each parameter keyed by name). A
    segment is this rank's part of a parameter, or the padding of a bucket.
    """
    lengths: list[int] = []
    segment_of: dict[str, int] = {}
    # The shard has the buckets in this order.
    for bucket in sorted(buckets, key=lambda bucket: bucket.start):
        first = len(lengths)
        for slot in bucket.slots:
            segment_of[slot.name] = len(lengths)
            lengths.append(-(-bucket.owned(slot, rank)[0].numel // SHARD_ALIGNMENT_ELEMENTS))
        lengths.append(bucket.shard_numel // SHARD_ALIGNMENT_ELEMENTS - sum(lengths[first:]))
    return lengths, segment_of


def _reduce_segments(values: Tensor, reduction: str, lengths: Tensor) -> Tensor:
    return torch.segment_reduce(values, reduction, lengths=lengths, unsafe=True, initial=0.0)


def _power_sums(shard: Tensor, power: float) -> Tensor:
    """Return the sums of |x| ** power of each chunk of `SHARD_ALIGNMENT_ELEMENTS` elements, f64."""
    return torch.cat(
        [_powers(part.view(-1, SHARD_ALIGNMENT_ELEMENTS).double(), power).sum(1) for part in _parts(shard)]
    )


def _powers(values: Tensor, power: float) -> Tensor:
    """Return |x| ** power. Overwrites the values."""
    if power == 0.0:
        return values.ne_(0.0)
    return values.square_() if power == 2.0 else values.abs_().pow_(power)


def _root(sums: Tensor, norm_type: float) -> Tensor:
    if norm_type == 0.0:
        return sums
    return sums.sqrt() if norm_type == 2.0 else sums.pow(1.0 / norm_type)


def _parts(shard: Tensor) -> tuple[Tensor, ...]:
    size = max(SMALLEST_PART, (shard.numel() // (PARTS * SHARD_ALIGNMENT_ELEMENTS) + 1) * SHARD_ALIGNMENT_ELEMENTS)
    parts: tuple[Tensor, ...] = shard.split(size)
    return parts


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor, f32[1], that clips gradients of f32[] `norm`: `min(1, max_norm / (norm +
    1e-6))`, as in torch.
    """
    # torch computes `scalar / tensor` with two roundings, so the numerator is a tensor as well.
    factor = torch.full_like(norm, max_norm) / (norm + 1e-6)
    return factor.clamp(max=1.0).view(1)
