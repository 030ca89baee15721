"""Sender: refits of an inference engine by a run that goes on, in full or by what changed.

A refit is a sequence of messages: one for each bucket of live weights, and one that ends it. Each
has a header, plain values that any serializer takes, and tensors. The first refit holds everything.
A later one may hold the bytes that changed since the one before, each rank's part of them
gathered. Each rank keeps its share of the bytes that were sent last and compares it with the live
bytes, so it does not matter who changed them (a step, a load, an average that was swapped) or how
often since.
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.distributed.agreement import validate_across_ranks
from zerocast.distributed.group import Group, GroupLike
from zerocast.serve.changed_bytes import ChangedBytes
from zerocast.serve.flat_bytes import digest, equal_parts, flat_bytes
from zerocast.serve.live import BUCKET_BYTES, Bucket, LiveWeights
from zerocast.serve.piece import Names
from zerocast.serve.refit_header import DELTA, END, FULL, Header, RefitError, layout_digest, with_digest


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

    A rank keeps its share of the bytes that were sent last: 1 byte an element for FP8 and half of
    one for 4-bit codes, divided by the ranks. Raises what `named_tensors` raises, and ValueError
    where ranks pass different arguments.
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
    ) -> None:
        options = config, names, dtype, allow_unequal_scales
        self._live = LiveWeights(model_or_optimizer, naming, bucket_bytes, *options)
        self._group = self._live.source.masters_group if group is None else Group.of(group)
        settings = {"naming": naming, "bucket_bytes": bucket_bytes, "dtype": str(dtype)}
        validate_across_ranks(self._group, self._live.stored_names, None, "serves live weights", settings)
        self._run: str = self._group.broadcast_object(secrets.token_hex(8), "the name of a run")
        self._refit, self._is_complete = 0, False
        # This rank's part of each bucket as it was sent last.
        self._kept: list[Tensor] = []
        self._layouts: list[str] = []

    @property
    def refit(self) -> int:
        """The number of the last refit, 0 before the first."""
        return self._refit

    @property
    def kept_bytes(self) -> int:
        """The bytes that this rank keeps of the last refit, to compare the next one with."""
        return sum(kept.nbytes for kept in self._kept)

    def named_tensors(self) -> Iterator[Message]:
        """A full refit: every tensor, by name, in checkpoint layout.

        Reading on after another refit has begun raises RefitError, here as in `named_deltas`.
        """
        number = self._begin()
        self._kept, self._layouts = [], []
        for index, bucket in enumerate(self._live.buckets()):
            layout, part = _layout(bucket), self._part(bucket)
            self._kept.append(part)
            self._layouts.append(layout_digest(layout))
            digests = self._gathered_numbers([digest(part)], part.device)
            yield self._message(FULL, index, bucket, tensors=layout, digests=[d for (d,) in digests])
            self._check_newest(number)
        yield self._end()

    def named_deltas(self, since: int) -> Iterator[Message]:
        """A refit by what changed since refit `since`, which has to be the last one.

        RefitError, with nothing sent, for any other refit, after one that was not read to its end,
        and where weights are stored otherwise than then: send `named_tensors()`.
        """
        self._check_since(since)
        return self._deltas(since)

    def _deltas(self, since: int) -> Iterator[Message]:
        # Another refit may have begun between the call and the first message.
        self._check_since(since)
        number = self._begin()
        index = -1
        for index, bucket in enumerate(self._live.buckets()):
            layout = layout_digest(_layout(bucket))
            if self._layouts[index : index + 1] != [layout]:
                raise RefitError(
                    f"the tensors of bucket {index} are not those of the last refit, as after a switch of formats: send "
                    "named_tensors()"
                )
            part = self._part(bucket)
            segments, payload = self._gathered(ChangedBytes.between(self._kept[index], part))
            self._kept[index] = part
            changes = Bucket([("changes", payload)])
            yield self._message(DELTA, index, changes, since=since, layout=layout, segments=segments)
            changes.give_up()
            self._check_newest(number)
        if index + 1 != len(self._layouts):
            raise RefitError(
                f"there are {index + 1} buckets, and the last refit had {len(self._layouts)}: send named_tensors()"
            )
        yield self._end()

    def _begin(self) -> int:
        """The number of a refit that begins."""
        self._refit, self._is_complete = self._refit + 1, False
        return self._refit

    def _check_newest(self, number: int) -> None:
        if number != self._refit:
            raise RefitError(
                f"refit {number} was read on after refit {self._refit} had begun: read each refit to its end, and send "
                "named_tensors()"
            )

    def _check_since(self, since: int) -> None:
        if since != self._refit or not self._is_complete:
            state = "" if self._is_complete else ", which was not read to its end"
            raise RefitError(
                f"changes since refit {since} were asked for, and the bytes of refit {self._refit} are kept{state}: send "
                "named_tensors()"
            )

    def _message(self, kind: str, index: int, bucket: Bucket, **fields: Any) -> Message:
        place = {"kind": kind, "run": self._run, "refit": self._refit, "index": index, "naming": self._live.naming}
        return Message(with_digest({**place, **fields}), bucket)

    def _end(self) -> Message:
        self._is_complete = True
        return self._message(END, len(self._kept), Bucket([]))

    def _part(self, bucket: Bucket) -> Tensor:
        """A copy of the bytes of a bucket that this rank reports changes of."""
        own = equal_parts(bucket.nbytes, self._group.size)[self._group.rank]
        return flat_bytes([tensor for _, tensor in bucket], own)

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


def _layout(bucket: Bucket) -> list[list[Any]]:
    return [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in bucket]
