"""Sender: refits of an inference engine by a run that goes on, in full or by what changed.

A refit is a sequence of messages: one for each bucket of live weights, and one that ends it. Each
has a header, plain values that any serializer takes, and tensors. The first refit holds everything.
A later one may hold the bytes that changed since the one before, each rank's part of them
gathered. There are two ways to know them. Each rank keeps its share of the bytes that were sent
last and compares it with the live bytes: then it does not matter who changed them (a step, a load,
an average that was swapped) or how often since. Or casts note what they change (`noted_bytes.py`),
and of codes nothing is kept.
"""

import bisect
import hashlib
import itertools
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.group import Group, GroupLike
from zerocast.formats.layout import Span
from zerocast.serve.changed_bytes import ChangedBytes, digest
from zerocast.serve.live import BUCKET_BYTES, Bucket, LiveWeights
from zerocast.serve.noted_bytes import Division, NotedBytes
from zerocast.serve.piece import Names

FULL, DELTA, END = "full", "delta", "end"
Header = Mapping[str, Any]


class Message:
    """One part of a refit: `header`, and tensors that are valid until the next message is asked
    for.
    """

    def __init__(self, header: Header, bucket: Bucket) -> None:
        self.header, self._bucket = header, bucket

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of a full refit, or one of changed bytes, u8."""
        return [tensor for _, tensor in self._bucket]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors together."""
        return self._bucket.nbytes


class Sender:
    """Refits receivers from live weights. All ranks of `group` make one, and read each refit to its
    end together.

    Args:
        model_or_optimizer, naming, bucket_bytes, config, names, dtype, allow_unequal_scales: as for
            `named_tensors`.
        group: the ranks that share the work of finding changes; by default those that share the
            masters. Each of them gets all messages.
        note_changes: casts note which codes they change, under ZeroAdamW, ZeroMuon and a CastPlan:
            a cast then reads the old codes, 1 or half a byte an element of the shard, and sets a
            bit a byte. `close` ends it, as does a newer Sender that asks for the same.

    Without it a rank keeps its share of the bytes that were sent last, 1 byte an element for FP8
    and half of one for 4-bit codes, divided by the ranks; with it only that of scales, and of what
    layouts do not allow to view. Raises what `named_tensors` raises, and ValueError where ranks
    pass different arguments and where casts cannot note changes.
    """

    def __init__(
        self,
        model_or_optimizer: Any,
        naming: str,
        *,
        group: GroupLike = None,
        bucket_bytes: int = BUCKET_BYTES,
        config: Any = None,
        names: Names | None = None,
        dtype: torch.dtype | None = None,
        allow_unequal_scales: bool = False,
        note_changes: bool = False,
    ) -> None:
        options = config, names, dtype, allow_unequal_scales
        self._live = LiveWeights(model_or_optimizer, naming, bucket_bytes, *options)
        self._group = self._live.source.masters_group if group is None else Group.of(group)
        settings = {"naming": naming, "bucket_bytes": bucket_bytes, "dtype": str(dtype), "note_changes": note_changes}
        self._noted: NotedBytes | None = None
        problem: ValueError | None = None
        try:
            self._noted = NotedBytes(self._live.source.owners()) if note_changes else None
        except ValueError as error:  # such as masters on the host; the other ranks must hear of it
            problem = error
        try:
            validate_across_ranks(self._group, self._live.stored_names, problem, "serves live weights", settings)
        except BaseException:
            self.close()
            raise
        self._run: str = self._group.broadcast_object(secrets.token_hex(8), "the name of a run")
        self._refit, self._is_complete = 0, False
        self._kept: list[Tensor] = []  # of each bucket, what this rank compares
        self._compared: list[list[Span]] = []  # where that lies
        self._layouts: list[str] = []

    @property
    def refit(self) -> int:
        """The number of the last refit, 0 before the first."""
        return self._refit

    @property
    def kept_bytes(self) -> int:
        """The bytes that this rank keeps of the last refit, to compare the next one with."""
        return sum(kept.nbytes for kept in self._kept)

    def close(self) -> None:
        """Let casts note nothing any more. All ranks call it; only full refits follow."""
        if self._noted:
            self._noted.close()

    def named_tensors(self) -> Iterator[Message]:
        """A full refit: every tensor, by name, in checkpoint layout."""
        self._refit, self._is_complete = self._refit + 1, False
        self._kept, self._compared, self._layouts = [], [], []
        for bucket in self._live.buckets():
            division = self._divide(bucket)
            part = self._part(bucket, division)
            self._keep(part, division)
            self._layouts.append(layout_digest(_layout(bucket)))
            digests = self._gathered_numbers([digest(part)], part.device)
            header = {
                **self._header(FULL, len(self._kept) - 1),
                "tensors": _layout(bucket),
                "spans": _spans(division),
                "digests": [d for (d,) in digests],
            }
            yield Message(header, bucket)
        yield self._end()

    def named_deltas(self, since: int) -> Iterator[Message]:
        """A refit by what changed since refit `since`, which has to be the last one.

        RuntimeError, with nothing sent, for any other refit, after one that was not read to its
        end, and where weights are stored otherwise than then: send `named_tensors()`. The same once
        casts note changes for another Sender, or after `close`.
        """
        if self._noted and self._noted.ended:
            raise RuntimeError(
                "casts do not note what they change for this Sender any more, since it was closed or a newer one asked for it: "
                "send named_tensors(), or make another Sender"
            )
        if since != self._refit or not self._is_complete:
            state = "" if self._is_complete else ", which was not read to its end"
            raise RuntimeError(
                f"changes since refit {since} were asked for, and the bytes of refit {self._refit} are kept{state}: send "
                "named_tensors()"
            )
        return self._deltas()

    def _deltas(self) -> Iterator[Message]:
        since_refit = self._refit
        self._refit, self._is_complete = self._refit + 1, False
        index = -1
        for index, bucket in enumerate(self._live.buckets()):
            layout, division = layout_digest(_layout(bucket)), self._divide(bucket)
            kept = (self._layouts[index], self._compared[index]) if index < len(self._layouts) else None
            if kept != (layout, division.compared):
                raise RuntimeError(
                    f"the tensors of bucket {index} are not those of the last refit, as after a switch of formats: send "
                    "named_tensors()"
                )
            part = self._part(bucket, division)
            noted, compared = division.changed(part.device), part[part.numel() - self._kept[index].numel() :]
            found = ChangedBytes.of(torch.cat([noted, compared != self._kept[index]]), part)
            self._keep(part, division, index)
            segments, payload = self._gathered(found)
            changes = Bucket([("changes", payload)])
            since = {"since": since_refit, "layout": layout, "spans": _spans(division), "segments": segments}
            yield Message({**self._header(DELTA, index), **since}, changes)
            changes.give_up()
        if index + 1 != len(self._layouts):
            raise RuntimeError(
                f"there are {index + 1} buckets, and the last refit had {len(self._layouts)}: send named_tensors()"
            )
        yield self._end()

    def _header(self, kind: str, index: int) -> dict[str, Any]:
        return {"kind": kind, "run": self._run, "refit": self._refit, "naming": self._live.naming, "index": index}

    def _end(self) -> Message:
        self._is_complete = True
        if self._noted:
            self._noted.forget()
        return Message(self._header(END, len(self._kept)), Bucket([]))

    def _divide(self, bucket: Bucket) -> Division:
        views = self._noted.views([tensor for _, tensor in bucket]) if self._noted else []
        return Division(views, bucket.nbytes, self._group, self._noted is not None)

    def _part(self, bucket: Bucket, division: Division) -> Tensor:
        """A copy of the bytes of a bucket that this rank reports changes of."""
        return flat_bytes([tensor for _, tensor in bucket], division.parts[self._group.rank])

    def _keep(self, part: Tensor, division: Division, index: int | None = None) -> None:
        compared = part[part.numel() - sum(span.numel for span in division.compared) :]
        kept = compared if compared.numel() == part.numel() else compared.clone()
        if index is None:
            self._kept.append(kept)
            self._compared.append(division.compared)
        else:
            self._kept[index] = kept

    def _gathered_numbers(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """The numbers of each rank, by rank."""
        if self._group.size == 1:
            return [list(numbers)]
        own = torch.tensor([numbers], dtype=torch.int64).to(device)
        found = own.new_empty(self._group.size, len(numbers))
        self._group.all_gather_into(found, own, what="the sizes of changes")
        rows: list[list[int]] = found.tolist()
        return rows

    def _gathered(self, own: ChangedBytes) -> tuple[list[list[int]], Tensor]:
        """(numel, encoding, count, digest and payload bytes of each rank, the payloads end to
        end).
        """
        numbers = [own.numel, own.encoding, own.count, own.digest, own.payload.numel()]
        segments = self._gathered_numbers(numbers, own.payload.device)
        if self._group.size == 1:
            return segments, own.payload
        most = max(row[-1] for row in segments)
        part = own.payload.new_zeros(1, most)
        part[0, : own.payload.numel()] = own.payload
        found = part.new_empty(self._group.size, most)
        if most:
            self._group.all_gather_into(found, part, what="changed bytes")
        return segments, torch.cat([row[: numbers[-1]] for row, numbers in zip(found, segments, strict=True)])


def flat_bytes(tensors: Sequence[Tensor], spans: Sequence[Span]) -> Tensor:
    """A copy of some bytes of contiguous tensors laid end to end, u8."""
    device = tensors[0].device if tensors else torch.device("cpu")
    found = torch.empty(sum(span.numel for span in spans), dtype=torch.uint8, device=device)
    starts = [0, *itertools.accumulate(tensor.nbytes for tensor in tensors)]
    written = 0
    for span in spans:
        first = bisect.bisect_right(starts, span.start) - 1
        for start, tensor in zip(starts[first:], tensors[first:], strict=False):
            if start >= span.stop:
                break
            common = Span(start, start + tensor.nbytes).intersect(span)
            own = as_bytes(tensor)[common.start - start : common.stop - start]
            found[written : written + common.numel] = own
            written += common.numel
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as u8, flat: the same memory."""
    return tensor.detach().view(-1).view(torch.uint8)


def layout_digest(layout: Sequence[Sequence[Any]]) -> str:
    """A text that tells layouts apart: names, dtypes and shapes."""
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()[:16]


def _layout(bucket: Bucket) -> list[list[Any]]:
    return [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in bucket]


def _spans(division: Division) -> list[list[list[int]]]:
    return [[[span.start, span.stop] for span in part] for part in division.parts]
