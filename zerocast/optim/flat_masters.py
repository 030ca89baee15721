"""FlatMasters: this rank's flat FP32 masters and the state of their updates, and the views of them
for each parameter.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from zerocast.backends.reference.adam import dequantize_rows, quantize_rows
from zerocast.cast.adam_update import AdamUpdate
from zerocast.distributed.bucket import Bucket, Slot, flat_numel
from zerocast.distributed.group import Group
from zerocast.formats.layout import Span, cut_moment_groups, moment_groups
from zerocast.optim.moments_8bit import CutGroups, Moments8bit, OwnedPart
from zerocast.weight import QuantizedWeight

# The state that AdamW keeps, and the state that Muon keeps. Each of Muon's parameters belongs to
# one rank.
MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = ("momentum_buffer",)


class FlatMasters:
    """Flat tensors with an element for each element that this rank owns, bucket after bucket. The
    buckets of parameters that each belong to one rank (Muon's) come last.

    Attributes:
        master: f32.
        exp_avg, exp_avg_sq: AdamW's moments, for the buckets that are sharded evenly; codes if they
            are in 8 bits.
        eight_bit: the moments in 8 bits; None if they have a floating-point dtype.
        momentum_buffer: Muon's momentum, f32 or codes, for the buckets that come last.

    Args:
        buckets: all buckets, starting with the buckets of `older`.
        older: the masters of an optimizer to which the remaining buckets are added. Their values
            are copied, so there are two copies until `older` is deleted. None for a new optimizer.
            Call `initialise` to give values to the masters of added buckets.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: Group,
        device: torch.device,
        moment_dtype: torch.dtype | Literal["8bit"] = torch.float32,
        older: "FlatMasters | None" = None,
    ) -> None:
        self._buckets = list(buckets)
        self._group = group
        numel = flat_numel(self._buckets)
        self.master = torch.zeros(numel, dtype=torch.float32, device=device)
        cut = [bucket for bucket in self._buckets if not bucket.storage.single_owner]
        cut_numel = flat_numel(cut)
        self.eight_bit: Moments8bit | None = None
        if isinstance(moment_dtype, torch.dtype):
            self.exp_avg = torch.zeros(cut_numel, dtype=moment_dtype, device=device)
            self.exp_avg_sq = torch.zeros(cut_numel, dtype=moment_dtype, device=device)
        else:
            parts, count = _owned_parts(cut, group.rank)
            self.eight_bit = Moments8bit(parts, cut_numel, CutGroups(count, [group], device))
            self.exp_avg, self.exp_avg_sq = self.eight_bit.exp_avg, self.eight_bit.exp_avg_sq
        momentum_dtype = torch.float32 if self.eight_bit is None else torch.int8
        self.momentum_buffer = torch.zeros(numel - cut_numel, dtype=momentum_dtype, device=device)
        # The scales of momentum that is codes, f32 `[rows on this rank, groups of a row]`, keyed by
        # name.
        self._momentum_scales: dict[str, Tensor] = {}
        for bucket in self._buckets:
            for slot in bucket.slots if bucket.storage.single_owner and self.eight_bit is not None else ():
                rows, groups = _groups_shape(slot)
                rows = rows if bucket.owned(slot, group.rank)[0].numel else 0
                self._momentum_scales[slot.name] = torch.zeros(rows, groups, dtype=torch.float32, device=device)
        self._added = self._buckets
        if older is not None:
            self._added = self._buckets[len(older._buckets) :]
            self._take(older)

    def initialise(self) -> None:
        """Give the masters of buckets that `older` ones lacked the initial values of rank 0.
        Collective.
        """
        for bucket in self._added:
            self._initialise(bucket)

    def _take(self, older: "FlatMasters") -> None:
        """Copy the masters, and their state, of the buckets of `older`, which come first."""
        self._put(older.master, older, self.master)
        for name in (*MOMENTS, *MOMENTUM):
            values = getattr(older, name)
            getattr(self, name)[: values.numel()].copy_(values)
        if self.eight_bit is not None and older.eight_bit is not None:
            scales = older.eight_bit.scales
            self.eight_bit.scales[:, : scales.shape[1]].copy_(scales)
        for name, scales in older._momentum_scales.items():
            self._momentum_scales[name].copy_(scales)

    def _put(self, values: Tensor, older: "FlatMasters", flat: Tensor) -> None:
        """Copy values from the layout of `older` masters to a flat tensor of this layout."""
        cut, older_cut = self.exp_avg.numel(), older.exp_avg.numel()
        flat[:older_cut].copy_(values[:older_cut])
        flat[cut : cut + values.numel() - older_cut].copy_(values[older_cut:])

    def completed(self, values: Tensor, older: "FlatMasters") -> Tensor:
        """Return flat f32 values for all elements: `values`, which have the layout of `older`
        masters, and for added parameters their masters.
        """
        flat = self.master.clone()
        self._put(values, older, flat)
        return flat

    def _initialise(self, bucket: Bucket) -> None:
        """Broadcast the initial values of rank 0, as in DistributedDataParallel, and copy this
        rank's part into its masters.
        """
        # A bucket of Muon's matrices is large, so it is sent shard by shard.
        size = bucket.shard_numel if bucket.storage.single_owner else bucket.numel
        shard = bucket.shard(self._group.rank)
        for number, slots in groupby(bucket.slots, lambda slot: slot.offset // size):
            first = number * size
            values = torch.zeros(size, dtype=torch.float32, device=self.master.device)
            for slot in slots:
                start = slot.offset - first
                values[start : start + slot.numel].copy_(_initial_value(slot.parameter).reshape(-1))
            self._group.broadcast(values, "the initial values of a bucket")
            owned = Span(first, first + size).intersect(shard)
            start = bucket.start + owned.start - shard.start
            self.master[start : start + owned.numel].copy_(values[owned.start - first : owned.stop - first])
        for slot in bucket.slots:
            if isinstance(slot.parameter, QuantizedWeight):
                slot.parameter.high_precision_init_val = None

    def update(self, grad: Tensor, scalars: Tensor, clip: Tensor, steps: Tensor) -> AdamUpdate:
        """Return the AdamUpdate of these masters by a flat gradient. `steps` are the numbers of the
        step for each parameter group, i64.
        """
        groups = None
        if self.eight_bit is not None:
            self.eight_bit.cut_groups.begin()
            groups = self.eight_bit.groups(steps)
        return AdamUpdate(grad, self.exp_avg, self.exp_avg_sq, scalars, clip, groups)

    def owned(self, bucket: Bucket, slot: Slot) -> tuple[Span, dict[str, Tensor]]:
        """Return (the elements of a parameter that this rank owns, views of their masters and of
        the state of their update keyed by name).
        """
        span, start = bucket.owned(slot, self._group.rank)
        views = {"master": self.master[start : start + span.numel]}
        if bucket.storage.single_owner:
            start -= self.exp_avg.numel()
        for name in fields_of(bucket):
            views[name] = getattr(self, name)[start : start + span.numel]
        return span, views

    def state(self, bucket: Bucket, slot: Slot) -> tuple[Span, dict[str, Tensor]]:
        """Return the result of `owned`, with moments in 8 bits as FP32 copies (`store`)."""
        span, tensors = self.owned(bucket, slot)
        scales = self.momentum_scales(slot)
        if scales is not None:
            codes = tensors["momentum_buffer"].view(-1, slot.matrix_shape[1])
            tensors["momentum_buffer"] = dequantize_rows(codes, scales).view(-1)
        elif self.eight_bit is not None:
            tensors |= self.eight_bit.values(slot.name)
        return span, tensors

    def momentum_scales(self, slot: Slot) -> Tensor | None:
        """Return the scales of a parameter's momentum, f32 `[rows, groups of a row]`, without rows
        on ranks that do not own it; None if it has no momentum, or FP32.
        """
        return self._momentum_scales.get(slot.name)

    def compact(self, bucket: Bucket, slot: Slot) -> tuple[Span, tuple[int, int], dict[str, Tensor]]:
        """Return (the groups of a parameter that begin on this rank, the shape of all its groups,
        views of their scales keyed by name). `owned` returns the codes.
        """
        assert self.eight_bit is not None
        momentum = self.momentum_scales(slot)
        if momentum is not None:
            return Span(0, momentum.numel()), _groups_shape(slot), {"momentum_buffer_scale": momentum.view(-1)}
        groups, scales = self.eight_bit.compact(slot.name)
        return groups, _groups_shape(slot), scales

    def store(self, states: Mapping[str, Mapping[str, Tensor]], counts: Sequence[int]) -> None:
        """Store the tensors that `state` has returned, keyed by parameter name, after a caller has
        filled them. `counts` are the steps of each parameter group. Collective.
        """
        if self.eight_bit is not None:
            self.eight_bit.cut_groups.begin()
            self.eight_bit.load(states, counts, finishes=False)
            self.eight_bit.cut_groups.reduce()
            self.eight_bit.load(states, counts, finishes=True)
        for bucket in self._buckets:
            for slot in bucket.slots:
                scales = self.momentum_scales(slot)
                if scales is not None:
                    codes = self.owned(bucket, slot)[1]["momentum_buffer"].view(-1, slot.matrix_shape[1])
                    quantize_rows(states[slot.name]["momentum_buffer"].view_as(codes), codes, scales)


def fields_of(bucket: Bucket) -> tuple[str, ...]:
    """Return the names, as in torch.optim, of the state that the update of a bucket's parameters
    keeps.
    """
    return MOMENTUM if bucket.storage.single_owner else MOMENTS


def _groups_shape(slot: Slot) -> tuple[int, int]:
    """Return the shape of the scales of a parameter's moments in 8 bits: (rows, groups of a
    row).
    """
    rows, columns = slot.matrix_shape
    return rows, moment_groups(0, columns, columns)


def _owned_parts(buckets: Sequence[Bucket], rank: int) -> tuple[list[OwnedPart], int]:
    """Return (the parts of parameters that a rank has, the number of groups of moments that several
    ranks share).
    """
    parts, count = [], 0
    for bucket in buckets:
        for slot in bucket.slots:
            numbers = cut_moment_groups(bucket.boundaries(slot), slot.matrix_shape[1])
            cut = {number: count + place for place, number in enumerate(numbers)}
            count += len(cut)
            span, offset = bucket.owned(slot, rank)
            if span.numel:
                parts.append(OwnedPart(slot.name, slot.matrix_shape[1], [span], offset, slot.param_group, cut))
    return parts, count


def _initial_value(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, QuantizedWeight):
        return parameter.detach()
    value = parameter.high_precision_init_val
    return parameter.dequantize() if value is None else value
