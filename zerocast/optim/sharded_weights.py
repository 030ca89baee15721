"""ShardedWeights: the weights of a ZeroOptimizer in flat byte buffers, as the Host of its casts."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from zerocast import backends
from zerocast.cast.host import CastDriver, Host, identity_weight
from zerocast.cast.switch import convert
from zerocast.distributed.bucket import Slot, Storage, storage_of
from zerocast.distributed.group import Group
from zerocast.formats import FormatSpec
from zerocast.formats.layout import Shape
from zerocast.formats.shared_amax import SharedAmax
from zerocast.optim.bucket_bytes import BucketBytes
from zerocast.optim.config import ZeroConfig
from zerocast.optim.flat_masters import FlatMasters
from zerocast.optim.gather import WeightGather
from zerocast.weight import QuantizedWeight
from zerocast.weight.buffers import into_flat_buffer
from zerocast.weight.owners import Claim
from zerocast.weight.validity import Validity

ADVICE = (
    "after writing masters by hand, or reading them from a checkpoint in place, call optimizer.load_state_dict(...)"
)

LOAD = "load a checkpoint (zerocast.optim.load, Checkpoints.load or load_state_dict)"


class ShardedWeights:
    """The flat byte buffers of a ZeroOptimizer, and their description for its casts (`Host`).

    Plain parameters are cast too, as identity weights: a cast rounds them to their dtype.

    Args:
        buffers: the bytes of each bucket.

    Attributes:
        buffers: the bytes of each bucket. A switch of formats replaces them.
        gather: the all-gathers of these buffers; replaced with them.
        driver: the casts, for the life of the optimizer.
        overlap: True if gathers may still be in flight when a step returns.
    """

    def __init__(
        self, buffers: Sequence[BucketBytes], masters: FlatMasters, group: Group, config: ZeroConfig, claim: Claim
    ) -> None:
        self.buffers = list(buffers)
        self._masters, self._group, self._claim = masters, group, claim
        self._backend = backends.choose(masters.master.device, config.backend)
        self.overlap = config.overlap_all_gather
        self._validity = Validity(LOAD, advice=ADVICE)
        # The order of the plan. A switch of formats splits buckets and so changes the order of
        # `_slots`.
        self._names = [slot.name for slot, _ in self._slots()]
        self.driver = CastDriver(self._host())
        plan = self.driver.plan
        for weight in plan.weights:
            weight.state.set_columnwise_on_demand(not config.keep_columnwise)
        plan.delayed.broadcast(group)
        # One tensor holds all masters, so that debug mode compares one version counter.
        self._validity.watch([masters.master], sharded=group.size > 1)

    def _host(self) -> Host:
        """Return the description of the current buffers."""
        self._flatten_scales()
        self.gather = WeightGather(self.buffers, self._group, self._validity, self._backend, self.overlap)
        placed = {slot.name: (buffer.bucket, slot) for buffer in self.buffers for slot in buffer.bucket.slots}
        weights = {slot.name: weight for slot, weight in self._slots()}
        in_order = [placed[name] for name in self._names]
        owned = [self._masters.owned(bucket, slot) for bucket, slot in in_order]
        return Host(
            owner=None,  # the optimizer has the claim
            group=self._group,
            names=self._names,
            weights=[weights[name] for name in self._names],
            masters=[views["master"] for _, views in owned],
            starts=[span.start for span, _ in owned],
            gather=self.gather,
            scale_cuts=[bucket.cuts(slot) for bucket, slot in in_order],
            # None for a parameter that Muon updates, so that a cast makes no Adam step for it.
            param_groups=[None if bucket.storage.single_owner else slot.param_group for bucket, slot in in_order],
            backend=self._backend,
            validity=self._validity,
            claim=self._claim,
            live_weight=lambda index: _live_weight(in_order[index][1]),
            is_saved_by_autograd=False,
        )

    def _slots(self) -> Iterator[tuple[Slot, QuantizedWeight]]:
        """Yield every parameter with its weight, bucket by bucket."""
        for buffer in self.buffers:
            yield from zip(buffer.bucket.slots, buffer.weights, strict=True)

    def _flatten_scales(self) -> None:
        """Move scales and amaxes that are not gathered into one buffer of each kind."""
        for name in ("rowwise_scale_inv", "columnwise_scale_inv", "amax"):
            kept_here = [weight for buffer in self.buffers if not buffer.gathers(name) for weight in buffer.weights]
            into_flat_buffer([weight for weight in kept_here if weight.state.buffers[name] is not None], name)

    def convert(self, formats: Mapping[str, FormatSpec]) -> None:
        """Convert weights to these formats, in flat buffers that the next cast fills. Local.

        Masters keep their offsets. A bucket whose weights no longer have the same storage gets flat
        buffers for each kind of storage, in which the ranges of the other weights stay empty.
        """
        self.gather.finish_all()
        self.buffers = [part for buffer in self.buffers for part in _converted(buffer, formats)]

    def rebuild(self, changed: Collection[str]) -> None:
        """Rebuild plan, gathers and bytes for the formats after `convert`. Collective."""
        self.driver.rebuild(self._host(), changed)

    def formats(self) -> dict[str, tuple[FormatSpec, torch.dtype]]:
        """Return the format and nominal dtype of each quantized weight keyed by name."""
        return {
            slot.name: (weight.format, weight.dtype)
            for slot, weight in self._slots()
            if weight.format.element is not None
        }

    def shared_amaxes(self) -> dict[str, SharedAmax]:
        """Return the weights that share a tensor amax, by the name of each."""
        shared = {slot.name: weight.state.shared_amax for slot, weight in self._slots()}
        return {name: amax for name, amax in shared.items() if amax is not None}

    def shapes(self) -> dict[str, tuple[FormatSpec, Shape]]:
        """Return the format and shape of each QuantizedWeight keyed by name, unquantized ones
        included.
        """
        slots = [slot for slot, _ in self._slots()]
        return {s.name: (s.format, s.shape) for s in slots if isinstance(s.parameter, QuantizedWeight)}

    def plain_matrices(self) -> list[str]:
        """Return the names of the ordinary parameters of two or more dimensions."""
        slots = [slot for slot, _ in self._slots()]
        return [s.name for s in slots if s.parameter.dim() >= 2 and not isinstance(s.parameter, QuantizedWeight)]


def _live_weight(slot: Slot) -> QuantizedWeight:
    """Return the parameter with its current storage; a plain one as an identity weight over it."""
    parameter = slot.parameter
    return parameter if isinstance(parameter, QuantizedWeight) else identity_weight(parameter)


def _converted(buffer: BucketBytes, formats: Mapping[str, FormatSpec]) -> Iterator[BucketBytes]:
    """Yield the buckets that replace a bucket when its weights get these formats, one per kind of
    storage.
    """
    bucket = buffer.bucket
    changed = [slot for slot in bucket.slots if slot.name in formats]
    if not changed:
        yield buffer
        return
    for slot in changed:
        convert(_live_weight(slot), formats[slot.name])
    by_storage: dict[Storage, list[Slot]] = {}
    for slot in bucket.slots:
        storage = storage_of(slot.parameter, bucket.storage.reduced_as, bucket.storage.single_owner)
        by_storage.setdefault(storage, []).append(slot)
    for storage, slots in by_storage.items():
        yield BucketBytes(replace(bucket, storage=storage, slots=tuple(slots)), buffer.flats[0].device)
