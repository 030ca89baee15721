"""EngineReceiver: refits of an inference engine, applied on all of its ranks or on none.

Every rank receives all messages. While they arrive, the engine does not change: the bytes of a full
refit are held in CPU memory, the changes of a delta as they were sent. After the last message ranks
compare the received messages, and the digest of each bucket, computed from the engine's own bytes
with the changes on them. `apply` writes them; an engine is paused only for this.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zerocast.distributed.group import Group
from zerocast.formats.memory import as_bytes
from zerocast.serve.engine_weights import EngineWeights, Region, check_filled, check_uniform, elements_taken
from zerocast.serve.flat_bytes import digest
from zerocast.serve.receiving import (
    Layout,
    RefitOrder,
    changes_of,
    check_sizes,
    digests_after,
    have_digests,
    layout_of,
    write_changes,
)
from zerocast.serve.refit_message import ASK, DELTA, END, FULL, Header, RefitError, check_header, layout_digest


@dataclass
class _Bucket:
    """A bucket of the last full refit, and where its elements are on this rank."""

    layout: Layout
    digest: str
    regions: dict[str, list[Region]]

    def regions_in(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Region, Tensor]]:
        """Yield each region on this rank with the one of the bucket's stored tensors that it is
        of.
        """
        for (name, _, _), tensor in zip(self.layout, tensors, strict=True):
            for region in self.regions.get(name, []):
                yield region, tensor


@dataclass
class _Stage:
    """A refit that has begun and is not yet applied.

    Attributes:
        first: the header of its first message.
        headers: the headers that came, without the last.
        payloads: the changed bytes of each message of a delta.
        own: the digest of this rank's bytes of each bucket, when they were found to fit a delta.
        buckets: the buckets of a full refit.
        values: by name the tensors of a full refit in model layout, in host memory.
        is_complete: True once the last message came and all was found to fit.
    """

    first: Header
    headers: list[Header] = field(default_factory=list)
    payloads: list[Tensor] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    buckets: list[_Bucket] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    is_complete: bool = False


class EngineReceiver:
    """Refits one rank of an engine. All ranks of the engine call `accept` and `apply` together.

    Args:
        weights: the weights of this rank.
        group: the ranks that share the weights; None for one rank.
        bytes_group: the same ranks, for collectives of the engine's bytes; by default `group`.
        device: where the engine's bytes are compared.
        has_weights: True if the engine has loaded weights that it may serve before the first refit.
    """

    def __init__(
        self,
        weights: EngineWeights,
        group: Group | None = None,
        bytes_group: Group | None = None,
        device: torch.device | str = "cpu",
        has_weights: bool = False,
    ) -> None:
        self._weights = weights
        self._group = group or Group(None, 0, 1)
        self._bytes_group = bytes_group or self._group
        self._device = torch.device(device)
        self._order = RefitOrder()
        self._is_servable = has_weights
        self._buckets: list[_Bucket] = []
        # The refit in progress, until it is applied or rejected.
        self._stage: _Stage | None = None
        # The call under way, the same on all ranks: a message by its digest, or `apply`.
        self._call = ""

    @property
    def refit(self) -> int:
        """The number of the last refit that was applied; 0 before the first and after one that
        failed while it was written.
        """
        return self._order.refit

    def check_servable(self) -> None:
        """Raise RefitError while the engine has no weights of any one refit."""
        if not self._is_servable:
            raise RefitError(
                "this engine has no weights to serve: none came yet, or a refit failed while it was written. Send a full refit"
            )

    def discard(self) -> None:
        """Forget the refit in progress. The engine keeps its weights."""
        self._stage = None

    @torch.no_grad()
    def accept(self, header: Header, read: Callable[[], Sequence[Tensor]]) -> None:
        """Stage a message; check with the last one that the refit can be applied. Collective.

        Args:
            header: the header of the message, the same on all ranks.
            read: returns the tensors of the message. It may raise.

        Raises RefitError on all ranks, naming the rank that rejected the message. The refit is then
        dropped, and the weights are unchanged.
        """
        covered: dict[str, Tensor] = {}
        with self._agreed("could not be staged"):
            self._call = f"message {header.get('header_digest')}"
            self._admit(header, read())
            if header["kind"] == FULL:
                assert self._stage is not None
                bucket = self._stage.buckets[-1]
                covered = elements_taken(bucket.layout, bucket.regions)
        if covered:
            self._check_covered(covered)
        if header["kind"] == END:
            self._check_complete()

    @torch.no_grad()
    def apply(self) -> None:
        """Write the refit whose last message was accepted. Collective; the engine must not compute.

        Raises RefitError on all ranks. If the refit failed while it was written, `check_servable`
        raises until a full refit is applied.
        """
        self._call = "apply"
        with self._agreed("was not applied"):
            if self._stage is None or not self._stage.is_complete:
                raise RefitError("no refit came to its last message")
        self._write_stage()

    @contextmanager
    def _agreed(self, what: str) -> Iterator[None]:
        """Raise RefitError on all ranks if the body raised on one, or if they are in different
        calls. The refit in progress is dropped.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        text = error and (str(error) if isinstance(error, RefitError) else f"{type(error).__name__}: {error}")
        states = self._group.all_gather_object((self._call, text), "the state of a refit")
        for rank, (call, refusal) in enumerate(states):
            if refusal is None and call != states[0][0]:
                refusal = f"its {call} came with the {states[0][0]} of rank 0: {ASK}"
            if refusal is not None:
                self._stage = None
                of_rank = f"rank {rank} of {self._group.size}: " if self._group.size > 1 else ""
                state = "" if self._is_servable else "; this engine serves nothing until a full refit"
                raise RefitError(f"a refit {what}: {of_rank}{refusal}{state}") from error

    def _admit(self, header: Header, tensors: Sequence[Tensor]) -> None:
        check_header(header)
        check_sizes(header, tensors)
        index = header["index"]
        if index == 0 and header["kind"] != END:
            self._stage = None
            self._order.check(header)
            self._order.begin(header)
            self._stage = _Stage(header)
        stage = self._stage
        if stage is None:
            raise RefitError(f"message {index} of refit {header['refit']} came, and none of it before: {ASK}")
        kind = stage.first["kind"]
        if stage.is_complete:
            raise RefitError(f"message {index} of refit {header['refit']} came after the last one: {ASK}")
        same = (header["run"], header["refit"]) == (stage.first["run"], stage.first["refit"])
        if not same or index != len(stage.headers) or header["kind"] not in (kind, END):
            raise RefitError(
                f"message {index} of refit {header['refit']} came, and message {len(stage.headers)} of refit "
                f"{stage.first['refit']} was expected: {ASK}"
            )
        if header["kind"] == FULL:
            self._stage_full(stage, header, tensors)
        elif header["kind"] == DELTA:
            self._stage_delta(stage, header, tensors)
        elif kind == DELTA and index != len(self._buckets):
            raise RefitError(f"a refit ended after {index} of {len(self._buckets)} buckets: {ASK}")
        if header["kind"] != END:
            stage.headers.append(header)

    def _stage_full(self, stage: _Stage, header: Header, given: Sequence[Tensor]) -> None:
        layout = layout_of(header)
        # A transport may deliver bytes in any dtype and shape.
        tensors = [
            as_bytes(tensor.contiguous()).view(dtype).view(shape)
            for (_, dtype, shape), tensor in zip(layout, given, strict=True)
        ]
        if not have_digests(tensors, digests_after(header)):
            raise RefitError(
                f"the bytes of {header['tensors'][0][0]} or of other tensors in its message were damaged: {ASK}"
            )
        known = {name for bucket in stage.buckets for name, _, _ in bucket.layout}
        twice = known.intersection(name for name, _, _ in layout)
        if twice:
            raise RefitError(f"{min(twice)} came twice in refit {header['refit']}: {ASK}")
        bucket = _Bucket(layout, layout_digest(header["tensors"]), dict(self._weights.regions(layout)))
        stage.buckets.append(bucket)
        model_tensors = self._weights.model_tensors()
        for region, tensor in bucket.regions_in(tensors):
            if region.name not in stage.values:
                own = model_tensors[region.name]
                stage.values[region.name] = torch.zeros(own.shape, dtype=own.dtype)
            region.own.view(stage.values[region.name]).copy_(region.stored.view(tensor))

    def _stage_delta(self, stage: _Stage, header: Header, tensors: Sequence[Tensor]) -> None:
        index = header["index"]
        if index >= len(self._buckets) or self._buckets[index].digest != header["layout"]:
            raise RefitError(f"bucket {index} of the changes is not laid out as the receiver's tensors: {ASK}")
        # The transport may use its memory again.
        stage.payloads.append(tensors[0].clone())

    def _check_covered(self, covered: Mapping[str, Tensor]) -> None:
        """Raise RefitError on all ranks unless they together have each of these elements."""
        for elements in covered.values():
            self._group.all_reduce_max(elements, "the elements that an engine reads")
        with self._agreed("could not be staged"):
            for name, elements in covered.items():
                absent = elements.numel() - int(elements.sum())
                if absent:
                    raise RefitError(f"the engine does not read {absent} of the {elements.numel()} elements of {name}")

    def _check_complete(self) -> None:
        stage = self._stage
        assert stage is not None
        refused = "cannot be applied"
        if stage.first["kind"] == FULL:
            with self._agreed(refused):
                regions = [regions for bucket in stage.buckets for regions in bucket.regions.values()]
                tensors = self._weights.model_tensors()
                check_filled(tensors, itertools.chain.from_iterable(regions))
                for name, tensor in tensors.items():
                    if tensor.is_uniform:
                        check_uniform(name, stage.values[name])
        else:
            self._check_bytes(stage, refused)
        stage.is_complete = True

    def _write_stage(self) -> None:
        stage = self._stage
        assert stage is not None
        # The bytes are partly of the old and partly of the new refit until all ranks have finished.
        self._order.complete = None
        self._is_servable = False
        broken = "failed while it was written"
        with self._agreed(broken):
            if stage.first["kind"] == FULL:
                self._buckets = stage.buckets
                self._weights.load(stage.values)
                # The engine was the last to need them.
                stage.values.clear()
            else:
                self._write(stage)
                self._weights.check()
        if stage.first["kind"] == FULL:
            self._check_bytes(stage, broken)
        self._order.end(stage.first)
        self._is_servable = True
        self._stage = None

    def _check_bytes(self, stage: _Stage, what: str) -> None:
        """Raise RefitError on all ranks unless the engine's bytes, with the changes of a delta, are
        the sender's.
        """
        uniform: dict[str, Tensor] = {}
        for index, (bucket, header) in enumerate(zip(self._buckets, stage.headers, strict=True)):
            with self._agreed(what):
                tensors = self._stored(bucket)
                if stage.payloads:
                    stage.own.append(digest(*tensors))
                buffers = [as_bytes(tensor) for tensor in tensors]
            for buffer in buffers:
                self._bytes_group.all_reduce_max(buffer, "the bytes of an engine")
            with self._agreed(what):
                # Of a tensor that several ranks hold, the maximum hides a copy with smaller bytes.
                is_equal = self._holds(bucket, tensors)
                if stage.payloads:
                    write_changes(tensors, *changes_of(header, stage.payloads[index], tensors))
                if not is_equal or not have_digests(tensors, digests_after(header)):
                    raise RefitError(
                        f"the engine's bytes of {bucket.layout[0][0]} or of its message would differ from the sender's: "
                        "something else wrote to them, such as a reload or a wake-up from sleep level 2, or the engine laid them "
                        f"out again; {ASK}"
                    )
                self._note_uniform(uniform, bucket, tensors)
        with self._agreed(what):
            for name, value in uniform.items():
                check_uniform(name, value)
            self._weights.check()

    def _note_uniform(self, values: dict[str, Tensor], bucket: _Bucket, tensors: Sequence[Tensor]) -> None:
        """Record the values that a bucket has for tensors whose elements must be equal, keyed by
        name.
        """
        own = self._weights.model_tensors()
        for region, tensor in bucket.regions_in(tensors):
            if own[region.name].is_uniform:
                value = values.setdefault(region.name, torch.zeros(own[region.name].shape, dtype=tensor.dtype))
                region.own.view(value).copy_(region.stored.view(tensor))

    def _holds(self, bucket: _Bucket, tensors: Sequence[Tensor]) -> bool:
        """Return True if the engine's bytes on this rank are those of the stored tensors."""
        own = self._weights.tensors()
        pairs = (
            (region.stored.view(stored), region.own.view(own[region.name]).to(stored.device))
            for region, stored in bucket.regions_in(tensors)
        )
        return all(torch.equal(as_bytes(whole.contiguous()), as_bytes(part.contiguous())) for whole, part in pairs)

    def _write(self, stage: _Stage) -> None:
        """Write the changes of a delta to the engine."""
        own = self._weights.tensors()
        written: set[str] = set()
        for bucket, header, payload, own_digest in zip(
            self._buckets, stage.headers, stage.payloads, stage.own, strict=True
        ):
            tensors = self._stored(bucket)
            if digest(*tensors) != own_digest:
                raise RefitError(
                    f"something else wrote to {bucket.layout[0][0]} or what came with it since the changes were found to fit, such "
                    "as a reload or a sleep of level 2"
                )
            for index in write_changes(tensors, *changes_of(header, payload, tensors)):
                for region in bucket.regions.get(bucket.layout[index][0], []):
                    region.own.view(own[region.name]).copy_(region.stored.view(tensors[index]))
                    written.add(region.name)
        self._weights.written(written)

    def _stored(self, bucket: _Bucket) -> list[Tensor]:
        """Return the stored tensors of a bucket from the engine's bytes on this rank, zero where
        other ranks have them.
        """
        own = self._weights.tensors()
        tensors = [torch.zeros(shape, dtype=dtype, device=self._device) for _, dtype, shape in bucket.layout]
        for region, stored in bucket.regions_in(tensors):
            region.stored.view(stored).copy_(region.own.view(own[region.name]))
        return tensors
