"""ShardedWeights: the low-precision side of the optimizer, from masters to gathered bytes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from zerocast.cast.flat_buffer import into_flat_buffer
from zerocast.cast.plan import CastPlan
from zerocast.cast.tables import WeightTable
from zerocast.distributed.group import Group
from zerocast.formats import FormatSpec
from zerocast.formats.layout import Shape
from zerocast.formats.shared_amax import SharedAmax
from zerocast.optim.bucket import Bucket, Slot, Storage, storage_of
from zerocast.optim.bucket_bytes import BucketBytes
from zerocast.optim.config import ZeroConfig
from zerocast.optim.flat_masters import FlatMasters
from zerocast.optim.gather import WeightGather
from zerocast.verification.master_views import MasterView, MasterViews
from zerocast.weight import QuantizedWeight
from zerocast.weight.owners import Claim
from zerocast.weight.validity import Validity

ADVICE = "masters that were written by hand, or read from a checkpoint in place, are taken over by optimizer.load_state_dict(...)"

LOAD = "load a checkpoint (zerocast.optim.load, Checkpoints.load or load_state_dict)"


class ShardedWeights:
    """Flat byte buffers, one cast plan over all parameters, and the all-gather."""

    def __init__(
        self, buckets: Sequence[Bucket], masters: FlatMasters, group: Group, config: ZeroConfig, claim: Claim
    ) -> None:
        self.buffers = [BucketBytes(bucket, masters.master.device) for bucket in buckets]
        self._masters, self._group = masters, group
        weights, shards, starts = {}, [], []
        param_groups: list[int | None] = []  # None: the cast takes no step on it
        for buffer in self.buffers:
            for slot, weight in zip(buffer.bucket.slots, buffer.weights, strict=True):
                span, views = masters.owned(buffer.bucket, slot)
                weights[slot.name] = weight
                shards.append(views["master"])
                starts.append(span.start)
                param_groups.append(None if buffer.bucket.storage.whole else slot.param_group)
        self._order = list(weights)
        self._flatten_scales()
        self.plan = CastPlan(
            list(weights.values()),
            shards,
            starts,
            group,
            backend=config.backend,
            param_groups=param_groups,
            names=list(weights),
            scale_cuts=self._cuts(),
            validity=Validity(LOAD, advice=ADVICE),
            claim=claim,
        )
        for weight in weights.values():
            weight.state.set_columnwise_on_demand(not config.keep_columnwise)
        self.plan.delayed.broadcast(group)
        self.plan.validity.watch([masters.master], sharded=group.size > 1)
        self.overlap = config.overlap_all_gather
        self.gathers = self._gather()

    def _flatten_scales(self) -> None:
        """Let scales and amaxes that are not gathered lie side by side."""
        for name in ("rowwise_scale_inv", "columnwise_scale_inv", "amax", "scale", "amax_history"):
            held = [w for b in self.buffers for w in b.weights if not b.gathers(name)]
            into_flat_buffer([w for w in held if w.state.buffers[name] is not None], name)

    def _cuts(self) -> list[range | None]:
        """Where shards meet within each weight of the plan, if its scales are gathered."""
        cuts = {slot.name: buffer.bucket.cuts(slot) for buffer in self.buffers for slot in buffer.bucket.slots}
        return [cuts[name] for name in self._order]

    def _gather(self) -> WeightGather:
        return WeightGather(self.buffers, self._group, self.plan.validity, self.plan.backend, self.overlap)

    def convert(self, formats: Mapping[str, FormatSpec]) -> None:
        """Give weights other formats by name, in flat buffers that the next cast fills. Local.

        Masters keep their places. A bucket whose weights are no longer stored alike gets flat
        buffers for each kind, in which the places of the others stay empty.
        """
        self.gathers.land()
        self.buffers = [part for buffer in self.buffers for part in _converted(buffer, formats)]

    def rebuild(self, changed: Collection[str]) -> None:
        """Make the plan, the gathers and the bytes for the formats as they are now. Collective."""
        self._flatten_scales()
        weights = {slot.name: w for b in self.buffers for slot, w in zip(b.bucket.slots, b.weights, strict=True)}
        self.plan.rebuild(changed, [weights[name] for name in self._order], self._cuts())
        self.gathers = self._gather()
        self.recast()

    def master_views(self) -> MasterViews:
        """The masters with the parameters as the model reads them now, wherever those lie."""
        owned = [self._owned(buffer.bucket, slot) for buffer in self.buffers for slot in buffer.bucket.slots]
        return MasterViews(self._group, tuple(owned))

    def formats(self) -> dict[str, tuple[FormatSpec, torch.dtype]]:
        """Format and nominal dtype of each quantized weight by name."""
        weights = {
            s.name: w for buffer in self.buffers for s, w in zip(buffer.bucket.slots, buffer.weights, strict=True)
        }
        return {name: (w.format, w.dtype) for name, w in weights.items() if w.format.element is not None}

    def shared_amaxes(self) -> dict[str, SharedAmax]:
        """The weights that share a tensor amax, by the name of each."""
        pairs = ((s.name, w) for b in self.buffers for s, w in zip(b.bucket.slots, b.weights, strict=True))
        return {name: w.state.shared_amax for name, w in pairs if w.state.shared_amax is not None}

    def shapes(self) -> dict[str, tuple[FormatSpec, Shape]]:
        """Format and shape of each QuantizedWeight by name, unquantized ones included."""
        slots = [slot for buffer in self.buffers for slot in buffer.bucket.slots]
        return {s.name: (s.format, s.shape) for s in slots if isinstance(s.parameter, QuantizedWeight)}

    def plain_matrices(self) -> list[str]:
        """The names of the ordinary parameters of two or more dimensions."""
        slots = [slot for buffer in self.buffers for slot in buffer.bucket.slots]
        return [s.name for s in slots if s.parameter.dim() >= 2 and not isinstance(s.parameter, QuantizedWeight)]

    def _owned(self, bucket: Bucket, slot: Slot) -> MasterView:
        span, views = self._masters.owned(bucket, slot)
        return MasterView(slot.name, slot.live_weight(), views["master"], span, self.plan.delayed.cast_scale(slot.name))

    def ready(self, detail: str = "") -> None:
        """The host's part before a step: nothing in flight, everything in its place. RuntimeError
        for what others wrote.

        `detail` is what all ranks must have alike.
        """
        self.gathers.ready()
        self.plan.ready(detail)

    def tables(self) -> list[WeightTable]:
        """The tables that a step works by, after `ready`."""
        return [*self.plan.tables, *self.gathers.tables()]

    def recast(self) -> None:
        """Make the live bytes anew from the masters, as the last cast did; delayed scaling does
        not move on.
        """
        with self.plan.transaction("a cast"):
            self.gathers.reclaim()
            self.plan.cast(repeat=True)
            self.gathers.start()


def _converted(buffer: BucketBytes, formats: Mapping[str, FormatSpec]) -> Iterator[BucketBytes]:
    """The bytes of a bucket once its weights have these formats, which may be several."""
    bucket = buffer.bucket
    changed = [slot for slot in bucket.slots if slot.name in formats]
    if not changed:
        yield buffer
        return
    for slot in changed:
        slot.live_weight().convert(formats[slot.name])
    by_storage: dict[Storage, list[Slot]] = {}
    for slot in bucket.slots:
        storage = storage_of(slot.parameter, bucket.storage.grad_dtype, bucket.storage.whole)
        by_storage.setdefault(storage, []).append(slot)
    for storage, slots in by_storage.items():
        yield BucketBytes(replace(bucket, storage=storage, slots=tuple(slots)), buffer.flats[0].device)
