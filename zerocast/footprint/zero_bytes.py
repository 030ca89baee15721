"""The bytes of one rank of a ZeroAdamW or ZeroMuon, whose buckets are laid out as in a run.

The gradients of stage 2 are the shard and the buckets in flight, for one backward pass per step
that completes parameters in reverse order of registration (../optim/README.md). Stage 1 also keeps
all gradients of this rank. If columnwise copies are kept, all of them are counted, otherwise the
largest one, for the product that reads it. Traffic is counted for a step with one micro-batch and
with the norm of gradients.

Muon has one moment, in FP32 or 8 bits. Its parameters are in separate buckets with padding, so that
each has one rank as its owner. Their gradients are sharded evenly over ranks and sent to the owners
in the step; the bytes are counted for the rank that sends the most. Memory that a step needs only
for this exchange or for the update of a matrix is left out, since the memory of activations is free
at that time.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from zerocast.distributed.bucket import Bucket, FlatBuffer, Layout, Slot, flat_numel, lay_out, most_in_flight
from zerocast.distributed.owned_matrices import most_sent, rounds
from zerocast.footprint.weight_bytes import (
    FP32,
    FP64,
    Bytes,
    Collective,
    Placed,
    Planned,
    PlannedConfig,
    all_reduce,
    copy_bytes,
    cut_groups,
    gradient_collective,
    moment_bytes,
    operand_bytes,
    quantized,
    scale_bytes,
)
from zerocast.formats import Block, Columnwise, FormatSpec
from zerocast.formats.element import ITEMSIZE
from zerocast.formats.layout import GradientMessage, amax_grid, cut_moment_groups, moment_groups, weight_amax_counts


class ZeroBytes(NamedTuple):
    """The bytes of one rank.

    Attributes:
        memory: bytes in memory by purpose.
        collectives: the collectives of a step.
        busiest: Muon's operations on the rank with the most, divided by the mean of all ranks; 0
            without Muon.
    """

    memory: Bytes
    collectives: list[Collective]
    busiest: float


def zero(
    tensors: Sequence[Placed], ranks: int, stage: int, config: PlannedConfig, costs: Mapping[str, int]
) -> ZeroBytes:
    """Return the bytes of one rank of a ZeroAdamW, or of a ZeroMuon if there are `costs`, which are
    the numbers of operations for Muon's parameters, keyed by name.
    """
    # Only the attributes of a placeholder are read of parameters.
    parameters: Any = tensors
    layout = lay_out(parameters, config.bucket_size, ranks, config.grad_dtype, costs)
    buckets = layout.buckets
    shard = flat_numel(buckets)
    # The part of the shard that is divided evenly over ranks, which AdamW updates.
    cut = flat_numel([bucket for bucket in buckets if not bucket.storage.single_owner])
    weights = quantized(tensor for _, tensor, _ in tensors)
    computed = quantized(_planned(slot) for bucket in buckets if not bucket.storage.scales for slot in bucket.slots)
    gathered_scales = sum(_flat(bucket, bucket.storage.scales) for bucket in buckets)
    reduced, own = _packed_amaxes(buckets, ranks)
    # Stage 1 keeps all gradients of this rank until the step.
    all_gradients = sum(tensor.numel() * ITEMSIZE[_arriving(tensor, config)] for _, tensor, _ in tensors)
    kept_gradients = all_gradients if stage == 1 else 0
    # Products make them one at a time, also from kept copies if a format is exact in FP8.
    made = [
        operand_bytes(weight)
        for weight in weights
        if weight.weight_format().is_exact_in_fp8 or not config.keep_columnwise
    ]
    kept_copies = sum(map(copy_bytes, weights)) if config.keep_columnwise else 0
    memory = {
        "weights": sum(_flat(bucket, bucket.storage.codes) for bucket in buckets),
        "columnwise copies": kept_copies + max(made, default=0),
        "scales": sum(map(scale_bytes, computed)) + gathered_scales + reduced + own,
        "masters": shard * FP32,
        "moments": _moments(buckets, cut, ranks, config) + _momentum(buckets, shard - cut, ranks, config),
        "gradients": flat_numel(layout.gradients) * _kept_itemsize(layout, config) + kept_gradients,
        "buckets": _in_flight(tensors, layout, ranks, stage, config),
    }
    others = ranks - 1
    gradients = [(bucket.shard_numel, bucket.storage.reduced_as) for bucket in layout.gradients]
    gathers = sum(len(bucket.storage.gathered) for bucket in buckets)
    own_bytes = sum(_flat(bucket, bucket.storage.gathered) // ranks for bucket in buckets)
    collectives = [
        gradient_collective(gradients, ranks, config),
        all_reduce("the norm", 1, FP64, ranks),
        *([_exchange(layout, ranks, config)] if costs else []),
        all_reduce("amaxes", 1, reduced, ranks),
        *cut_groups(_cut_groups(buckets), ranks, config),
        Collective("all-gather", "weights", gathers, own_bytes * others, ranks),
    ]
    return ZeroBytes(memory, collectives, _busiest(buckets, ranks, costs) if costs else 0.0)


def _planned(slot: Slot) -> Planned:
    """Return the placeholder that was laid out in a slot."""
    parameter: Any = slot.parameter
    planned: Planned = parameter
    return planned


def _kept_itemsize(layout: Layout, config: PlannedConfig) -> int:
    """Return the bytes of an element of the shard of reduced gradients."""
    return 2 if layout.adds_in_bf16(config.deterministic, config.grad_wire) else FP32


def _moments(buckets: Sequence[Bucket], cut: int, ranks: int, config: PlannedConfig) -> int:
    """Return the bytes of AdamW's moments of `cut` elements. Scales are counted for an average
    rank.
    """
    slots = [slot for bucket in buckets if not bucket.storage.single_owner for slot in bucket.slots]
    groups = sum(moment_groups(0, slot.numel, slot.matrix_shape[1]) for slot in slots)
    return moment_bytes(cut, -(-groups // ranks), config)


def _momentum(buckets: Sequence[Bucket], numel: int, ranks: int, config: PlannedConfig) -> int:
    """Return the bytes of Muon's momentum of `numel` elements. Scales are counted for an average
    rank.
    """
    if config.moment_dtype != "8bit":
        return numel * FP32
    slots = [slot for bucket in buckets if bucket.storage.single_owner for slot in bucket.slots]
    groups = sum(moment_groups(0, slot.numel, slot.matrix_shape[1]) for slot in slots)
    return numel + -(-groups // ranks) * FP32


def _cut_groups(buckets: Sequence[Bucket]) -> int:
    """Return the number of cut groups of moments (`zerocast.optim.moments_8bit`)."""
    slots = [(bucket, slot) for bucket in buckets if not bucket.storage.single_owner for slot in bucket.slots]
    return sum(len(cut_moment_groups(bucket.boundaries(slot), slot.matrix_shape[1])) for bucket, slot in slots)


def _exchange(layout: Layout, ranks: int, config: PlannedConfig) -> Collective:
    """Return the all-to-all by which reduced gradients reach the owners of matrices."""
    calls = len(rounds(layout, ranks, config.bucket_size)) if ranks > 1 else 0
    return Collective("all-to-all", "gradients for owners", calls, most_sent(layout, ranks) * FP32, ranks)


def _busiest(buckets: Sequence[Bucket], ranks: int, costs: Mapping[str, int]) -> float:
    work: Counter[int] = Counter()
    for bucket in buckets:
        if bucket.storage.single_owner:
            for slot in bucket.slots:
                work[slot.offset // bucket.shard_numel] += costs[slot.name]
    return max(work.values()) * ranks / work.total()


def _flat(bucket: Bucket, buffers: Iterable[FlatBuffer]) -> int:
    """Return the bytes of these flat buffers of a bucket, padding included."""
    return sum(bucket.numel // elements * ITEMSIZE[dtype] for _, dtype, elements in buffers)


def _arriving(tensor: Planned, config: PlannedConfig) -> str:
    """Return the name of the dtype of a gradient as autograd produces it."""
    widened = tensor.format is not None and config.grad_dtype == "float32"
    return "float32" if widened else tensor.dtype


def _in_flight(tensors: Sequence[Placed], layout: Layout, ranks: int, stage: int, config: PlannedConfig) -> int:
    """Return the peak of the bytes that gradients take in a backward pass, from their arrival until
    their bucket is in the shard. At stage 1 the gradients themselves are not counted, since they
    are kept anyway.
    """
    kept = _kept_itemsize(layout, config)
    bucket_of = {slot.name: bucket for bucket in layout.gradients for slot in bucket.slots}
    missing = {id(bucket): len(bucket.slots) for bucket in layout.gradients}
    arrived = dict.fromkeys(missing, 0)
    # Elements and bytes of each bucket whose collective is in flight, and the most elements.
    flying: deque[tuple[int, int]] = deque()
    most_flying = most_in_flight(layout.gradients, config.bucket_size) if ranks > 1 else 0
    waiting = peak = 0
    for name, tensor, _ in reversed(tensors):
        bucket = bucket_of[name]
        dtype = _arriving(tensor, config)
        if stage == 2:
            arrived[id(bucket)] += tensor.numel() * ITEMSIZE[dtype]
            waiting += tensor.numel() * ITEMSIZE[dtype]
        peak = max(peak, waiting + _bytes(flying))
        missing[id(bucket)] -= 1
        if missing[id(bucket)]:
            continue
        storage = bucket.storage
        unpacked = arrived[id(bucket)]
        is_sent_unpacked = bucket.is_one_gradient and dtype == storage.reduced_as
        packed = 0 if is_sent_unpacked else bucket.numel * ITEMSIZE[storage.reduced_as]
        # The reducer waits for the oldest buckets until this one has room.
        while flying and bucket.numel + sum(numel for numel, _ in flying) > most_flying:
            flying.popleft()
        peak = max(peak, waiting + packed + _bytes(flying))
        waiting -= unpacked
        sent = packed or unpacked
        result = _result(bucket, ranks, config, kept)
        peak = max(peak, waiting + sent + result + _bytes(flying))
        # Gradients that are sent as FP8 are freed once they are quantized.
        flying.append((bucket.numel, result if config.grad_wire else sent + result))
    return peak


def _bytes(flying: Iterable[tuple[int, int]]) -> int:
    return sum(nbytes for _, nbytes in flying)


def _result(bucket: Bucket, ranks: int, config: PlannedConfig, kept: int) -> int:
    """Return the bytes of the result of a bucket's collective, until it is in the shard, whose
    elements have `kept` bytes. For FP8 messages this includes the messages that are sent.
    """
    itemsize = ITEMSIZE[bucket.storage.reduced_as]
    if config.grad_wire:
        return min(ranks, 2) * ranks * GradientMessage(bucket.shard_numel).nbytes
    if ranks == 1:
        return 0
    if config.deterministic:
        return bucket.numel * itemsize
    return 0 if itemsize == kept else bucket.shard_numel * itemsize


def _packed_amaxes(buckets: Sequence[Bucket], ranks: int) -> tuple[int, int]:
    """Return the bytes of packed amaxes: (those in the all-reduce, those that stay on their rank).
    If a bucket gathers scales, only the amaxes of blocks that ranks share are reduced.

    The all-reduce also has a number for each parameter, which reports masters that are not finite,
    and two numbers that compare the calls of the ranks. All are bf16, or FP32 if no weight has an
    amax.
    """
    has_amaxes = False
    reduced, own = 2 if ranks > 1 else 0, 0
    for bucket in buckets:
        for slot in bucket.slots:
            cuts = bucket.cuts(slot)
            amaxes = sum(weight_amax_counts(slot.format, slot.shape))
            has_amaxes |= amaxes > 0
            # The number that reports masters that are not finite.
            reduced += 1
            if cuts is None:
                reduced += amaxes
            else:
                reduced += cut_amaxes(slot.format, slot.matrix_shape, cuts)
                own += -(-amaxes // ranks)
    return (2 if has_amaxes else FP32) * reduced, 2 * own


def cut_amaxes(fmt: FormatSpec, matrix: Block, cuts: range) -> int:
    """Return the number of amaxes in the block rows that straddle a shard boundary, in every grid
    of a weight (`zerocast.cast.amaxes.split_rows`).
    """
    grids = [fmt.block, fmt.columnwise_block if fmt.columnwise is Columnwise.OWN_GRID else None]
    total = 0
    for height, width in (block for block in grids if block):
        block_row = height * matrix[1]
        # A boundary between two blocks of one row of elements splits none.
        unit = width if height == 1 else block_row
        rows = _count_cut(cuts, unit, block_row)
        total += rows * amax_grid((height, width), *matrix)[1]
    return total


def _count_cut(cuts: range, unit: int, block_row: int) -> int:
    """Return the number of block rows with a shard boundary that is not a multiple of `unit`."""
    if not cuts or (cuts.start % unit == 0 and (cuts.step % unit == 0 or len(cuts) == 1)):
        return 0
    if cuts.step < block_row:
        return len({cut // block_row for cut in cuts if cut % unit})
    # Each boundary is in a different block row. The boundaries that are multiples follow each other
    # at equal distances.
    period = unit // math.gcd(cuts.step, unit)
    first = next((index for index in range(min(period, len(cuts))) if cuts[index] % unit == 0), None)
    return len(cuts) - (0 if first is None else len(range(first, len(cuts), period)))
