"""Sender: send the live weights of a run to an inference engine, in full or by the changed bytes.

A refit is a sequence of messages: one for each bucket of live weights, and one that ends it. Each
has a header, of plain values that any serializer takes, and tensors. The first refit has all bytes.
A later one may have only the bytes that changed since the refit before. To find these, each rank
stores its share of the bytes that were sent last, and compares it with the live bytes. So changes
of any origin are found (a step, a load, a swapped average), and any number of them since then.
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.distributed.agreement import each_together, together, validate_across_ranks
from zerocast.distributed.group import Group, GroupLike
from zerocast.formats.element import dtype_name
from zerocast.serve.flat_bytes import digest, equal_parts, flat_bytes
from zerocast.serve.live import BUCKET_BYTES, Bucket, LiveWeights
from zerocast.serve.refit_message import DELTA, END, FULL, ChangedBytes, Header, RefitError, layout_digest, with_digest
from zerocast.serve.stored_tensor import Names

# The names of calls in the error that is raised if ranks make different ones.
MAKES = "makes a Sender"
SENDS_ALL = "sends all live weights"
SENDS_CHANGES = "sends the changes of live weights"


class Message:
    """One message of a refit: a header and tensors, which are valid until the next message is
    asked for.

    Attributes:
        header: plain values, as `refit_header` describes them.
    """

    def __init__(self, header: Header, bucket: Bucket) -> None:
        self.header = header
        self._bucket = bucket

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of a bucket in a full refit; one u8 tensor in a refit of changed bytes."""
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

    Attributes:
        group: the ranks that read each refit together.
        run: a name for this sender, other than that of any before.

    A rank keeps its share of the bytes that were sent last: 1 byte per element for FP8 and half of
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
        self._live = LiveWeights(model_or_optimizer, naming, bucket_bytes, config, names, dtype, allow_unequal_scales)
        self.group = self._live.source.masters_group if group is None else Group.of(group)
        settings = {"naming": naming, "bucket_bytes": bucket_bytes, "dtype": str(dtype)}
        validate_across_ranks(self.group, self._live.stored_names, None, MAKES, settings)
        self.run: str = self.group.broadcast_object(secrets.token_hex(8), "the name of a run")
        # The number of the last refit that has begun.
        self._refit = 0
        # True if that refit was read to its end.
        self._is_complete = False
        # By bucket: a copy of this rank's part of the bytes that were sent last, and a digest of
        # the layout of its tensors.
        self._kept: list[Tensor] = []
        self._layouts: list[str] = []

    @property
    def refit(self) -> int:
        """The number of the last refit, 0 before the first."""
        return self._refit

    @property
    def kept_bytes(self) -> int:
        """The size of this rank's copy of the last refit, which the next one is compared with."""
        return sum(kept.nbytes for kept in self._kept)

    def named_tensors(self) -> Iterator[Message]:
        """Yield a full refit: all tensors in checkpoint layout.

        Raises RefitError when it is read on after another refit has begun, here as in
        `named_deltas`.
        """
        number = self._begin()
        self._kept = []
        self._layouts = []
        for bucket, part, own_digest in each_together(self.group, self._parts(), SENDS_ALL):
            layout = _layout(bucket)
            self._kept.append(part)
            self._layouts.append(layout_digest(layout))
            digests = self._gathered_numbers([own_digest], part.device)
            yield self._message(FULL, len(self._kept) - 1, bucket, tensors=layout, digests=[d for (d,) in digests])
            self._check_newest(number)
        yield self._end()

    def named_deltas(self, since: int) -> Iterator[Message]:
        """Return a refit of the bytes that changed since refit `since`, which must be the last one.

        Raises RefitError, with nothing sent, for any other refit, after one that was not read to
        its end, and if shapes or dtypes of tensors have changed since: send `named_tensors()`.
        """
        self._check_since(since)
        return self._deltas(since)

    def _deltas(self, since: int) -> Iterator[Message]:
        # Another refit may have begun between the call and the first message.
        self._check_since(since)
        number = self._begin()
        index = 0
        for layout, part, own_changes in each_together(self.group, self._changed_parts(), SENDS_CHANGES):
            if own_changes is None:
                raise RefitError(
                    f"the tensors of bucket {index} are not those of the last refit, as after a switch of formats: send "
                    "named_tensors()"
                )
            segments, payload = self._gathered(own_changes)
            self._kept[index] = part
            changes = Bucket([("changes", payload)])
            yield self._message(DELTA, index, changes, since=since, layout=layout, segments=segments)
            changes.give_up()
            self._check_newest(number)
            index += 1
        if index != len(self._layouts):
            raise RefitError(
                f"there are {index} buckets, and the last refit had {len(self._layouts)}: send named_tensors()"
            )
        yield self._end()

    def _begin(self) -> int:
        """Begin a refit, and return its number."""
        self._refit += 1
        self._is_complete = False
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
        position = {"kind": kind, "run": self.run, "refit": self._refit, "index": index, "naming": self._live.naming}
        return Message(with_digest({**position, **fields}), bucket)

    def _end(self) -> Message:
        self._is_complete = True
        return self._message(END, len(self._kept), Bucket([]))

    def _parts(self) -> Iterator[tuple[Bucket, Tensor, int]]:
        """Each bucket, this rank's part of it, and the digest of the part."""
        for bucket in self._live.buckets():
            part = self._part(bucket)
            yield bucket, part, digest(part)

    def _changed_parts(self) -> Iterator[tuple[str, Tensor, ChangedBytes | None]]:
        """Yield the layout of each bucket, this rank's part of it, and what changed in the part
        since the last refit; None if that had a different layout.
        """
        for index, bucket in enumerate(self._live.buckets()):
            layout, part = layout_digest(_layout(bucket)), self._part(bucket)
            is_known = self._layouts[index : index + 1] == [layout]
            yield layout, part, ChangedBytes.between(self._kept[index], part) if is_known else None

    def _part(self, bucket: Bucket) -> Tensor:
        """Return a copy of this rank's part of a bucket's bytes, for which it reports the
        changes.
        """
        own = equal_parts(bucket.nbytes, self.group.size)[self.group.rank]
        return flat_bytes([tensor for _, tensor in bucket], own)

    def _gathered_numbers(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Return the numbers of all ranks, in their order."""
        if self.group.size == 1:
            return [list(numbers)]
        own = torch.tensor([numbers], dtype=torch.int64).to(device)
        gathered = own.new_empty(self.group.size, len(numbers))
        self.group.all_gather_into(gathered, own, what="the sizes of changes")
        rows: list[list[int]] = gathered.tolist()
        return rows

    def _gathered(self, own: ChangedBytes) -> tuple[list[list[int]], Tensor]:
        """Gather the changes of all ranks.

        Returns (numel, encoding, count, digest, payload bytes) by rank, and the payloads of all
        ranks in their order, concatenated, u8.
        """
        numbers = [own.numel, own.encoding, own.count, own.digest, own.payload.numel()]
        segments = self._gathered_numbers(numbers, own.payload.device)
        if self.group.size == 1:
            return segments, own.payload
        sizes = [row[-1] for row in segments]
        # An all-gather needs equal sizes, so every payload is padded to the largest one.
        largest = max(sizes)

        def allocated() -> tuple[Tensor, Tensor]:
            padded = own.payload.new_zeros(1, largest)
            padded[0, : own.payload.numel()] = own.payload
            return padded, padded.new_empty(self.group.size, largest)

        padded, gathered = together(self.group, allocated, SENDS_CHANGES)
        if largest:
            self.group.all_gather_into(gathered, padded, what="changed bytes")

        def concatenated() -> Tensor:
            return torch.cat([row[:size] for row, size in zip(gathered, sizes, strict=True)])

        return segments, together(self.group, concatenated, SENDS_CHANGES)


def _layout(bucket: Bucket) -> list[list[Any]]:
    return [[name, dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in bucket]
