"""Receiver: a copy of the weights of a run, updated by the messages of a Sender.

It has tensors in checkpoint layout, and the run and the number of the refit that they come from. A
message that is damaged, or is not the next one, is refused before it changes anything, and an older
refit is never accepted. After the bytes are written their digest is compared with the sender's.
During a refit, and after an interrupted one, the tensors are partly of two steps, and reading them
raises.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zerocast.formats.layout import Span
from zerocast.formats.memory import check_storage
from zerocast.serve.flat_bytes import as_bytes, digest_of_span, equal_parts
from zerocast.serve.refit_message import DELTA, END, FULL, ChangedBytes, Header, RefitError, check_header, layout_digest

ASK = "ask the sender for named_tensors()"


class Receiver:
    """Applies refits to tensors by name.

    Args:
        tensors: contiguous tensors that are written in place, such as those of an engine; None to
            allocate the tensors of the first refit.
        device: where to allocate.

    Raises ValueError for tensors that are not contiguous or share memory.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None = None, device: torch.device | str = "cpu") -> None:
        self._tensors = dict(tensors or {})
        self._is_given = tensors is not None
        _check_given(self._tensors)
        self._device = torch.device(device)
        # The newest refit that has begun here, by run. The last run in it is the present one.
        self._begun: dict[str, int] = {}
        # The run and refit of all tensors; None while they are partly of two.
        self._complete: tuple[str, int] | None = None
        # (kind, run, refit) of the refit under way, and the index of its next message.
        self._arriving: tuple[str, str, int] | None = None
        self._next = 0
        # The naming of the last full refit, and by bucket the names and the layout of its tensors.
        self._naming = ""
        self._buckets: list[list[str]] = []
        self._layouts: list[str] = []

    @property
    def refit(self) -> int:
        """The number of the last complete refit, for `Sender.named_deltas`.

        It is 0 before the first one, and while the tensors are partly of two refits.
        """
        return self._complete[1] if self._complete else 0

    @property
    def naming(self) -> str:
        """The naming in which the tensors are stored."""
        return self._naming

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by name; RefitError before the first refit and while they are partial."""
        if not self._complete:
            state = "a refit is under way or broke off" if self._begun else "there was no refit yet"
            raise RefitError(f"these weights are not to be read, {state}: {ASK}")
        return self._tensors

    def buffers(self, header: Header) -> list[Tensor]:
        """Tensors into which the tensors of a message may be received.

        For a full refit they are the receiver's own. Raises what `accept` raises for a message that
        is not the next one.
        """
        self._admit(header)
        if header["kind"] == FULL:
            # The caller will write into them.
            self._complete = None
            return [self._tensors[name] for name, _, _ in header["tensors"]]
        device = self._bucket()[0].device if header["kind"] == DELTA else self._device
        return [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in _sizes(header)]

    @torch.no_grad()
    def accept(self, header: Header, tensors: Sequence[Tensor]) -> list[str]:
        """Apply a message: a header and its tensors, or the filled tensors of `buffers`. Returns
        the names of the tensors that have changed.

        Raises RefitError. Nothing has changed if the message is damaged, is not the next one, or
        has tensors of another format. If the bytes then differ from the sender's, or the sender
        lacks tensors, they were written: ask the sender for a full refit.
        """
        check_header(header)
        sizes = [tensor.nbytes for tensor in tensors]
        expected = _sizes(header)
        if sizes != expected:
            raise RefitError(
                f"message {header['index']} of refit {header['refit']} came with tensors of {sizes} bytes, and its header says "
                f"{expected}: {ASK}"
            )
        self._admit(header)
        if header["kind"] == END:
            self._end(header)
            return []
        changes = self._changes(header, tensors[0]) if header["kind"] == DELTA else None
        # An error from here on leaves tensors that are partly of two refits.
        arriving = self._arriving
        self._arriving = None
        self._complete = None
        if changes is None:
            names = self._copy(tensors)
            digests = header["digests"]
        else:
            names = self._write(*changes)
            digests = [after for *_, after, _ in header["segments"]]
        self._check_digests(digests)
        self._arriving = arriving
        self._next += 1
        return names

    def _admit(self, header: Header) -> None:
        """Prepare for a message. RefitError, with nothing changed, unless it is the next one."""
        check_header(header)
        index, arriving = header["index"], self._arriving
        # The last message of a refit has a kind of its own, END.
        kind = arriving[0] if arriving and header["kind"] == END else header["kind"]
        refit = kind, header["run"], header["refit"]
        begins = refit != arriving and index == 0 and kind != END
        if begins:
            self._check_begins(header)
        elif refit != arriving or index != self._next:
            expected = f"{self._next} of refit {arriving[2]}" if arriving else "0 of none"
            raise RefitError(
                f"message {index} of refit {header['refit']} came, and message {expected} was expected: {ASK}"
            )
        if header["kind"] == DELTA and self._layouts[index : index + 1] != [header["layout"]]:
            raise RefitError(f"bucket {index} of the changes is not laid out as the tensors here: {ASK}")
        if header["kind"] == FULL:
            self._check_full(header, [] if begins else self._buckets[:index])
        if begins:
            self._begin(header)
        if header["kind"] == FULL and len(self._buckets) == index:
            self._allocate(header)

    def _check_begins(self, header: Header) -> None:
        """RefitError unless the refit that begins is newer than all before it, and the tensors
        still have their memory.
        """
        run = header["run"]
        refit = header["refit"]
        newest = self._begun.get(run)
        try:
            for name, tensor in self._tensors.items():
                check_storage(name, tensor)
        except ValueError as error:
            raise RefitError(str(error)) from None
        if newest is not None and run != next(reversed(self._begun)):
            raise RefitError(f"refit {refit} of a run came that has ended here, as another run's came after it: {ASK}")
        if newest is not None and refit <= newest:
            raise RefitError(f"refit {refit} came late or again, as refit {newest} of its run has begun here: {ASK}")
        if header["kind"] == FULL:
            return
        if self._complete is None:
            raise RefitError(f"changes came to a receiver without a complete refit: {ASK}")
        if (run, header["since"]) != self._complete:
            of_run = "" if run == self._complete[0] else "another run's "
            raise RefitError(
                f"changes since {of_run}refit {header['since']} came to a receiver of refit {self.refit}: one was missed, {ASK}"
            )

    def _check_full(self, header: Header, earlier_buckets: Sequence[Sequence[str]]) -> None:
        """RefitError for tensors that an earlier bucket of the refit had, or that do not fit the
        tensors that the receiver was given.
        """
        seen = {name for names in earlier_buckets for name in names}
        for name, dtype, shape in _layout(header):
            if name in seen:
                raise RefitError(f"{name} came twice in refit {header['refit']}: {ASK}")
            seen.add(name)
            if not self._is_given or self._fits(name, dtype, shape):
                continue
            tensor = self._tensors.get(name)
            state = "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise RefitError(
                f"the sender has {name} as {dtype} {shape}, and this receiver {state}: they store weights in different formats"
            )

    def _begin(self, header: Header) -> None:
        run = header["run"]
        refit = header["refit"]
        self._begun[run] = refit
        self._arriving = (header["kind"], run, refit)
        self._next = 0
        if header["kind"] == FULL:
            self._complete = None
            self._naming = header["naming"]
            self._buckets = []
            self._layouts = []

    def _allocate(self, header: Header) -> None:
        """Allocate the tensors of the next bucket of a full refit that are missing."""
        for name, dtype, shape in _layout(header):
            if not self._fits(name, dtype, shape):
                self._tensors[name] = torch.empty(shape, dtype=dtype, device=self._device)
        self._buckets.append([name for name, _, _ in header["tensors"]])
        self._layouts.append(layout_digest(header["tensors"]))

    def _fits(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        tensor = self._tensors.get(name)
        return tensor is not None and (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)

    def _copy(self, tensors: Sequence[Tensor]) -> list[str]:
        """Copy the tensors of a bucket, unless they were received in place. Returns their names."""
        names = self._buckets[self._next]
        for name, tensor in zip(names, tensors, strict=True):
            own = self._tensors[name]
            if own.data_ptr() != tensor.data_ptr():
                as_bytes(own).copy_(as_bytes(tensor.contiguous()))
        return names

    def _changes(self, header: Header, payload: Tensor) -> tuple[Tensor, Tensor]:
        """(positions in the bucket, int64 and ascending, the new bytes at these positions)."""
        segments = header["segments"]
        payloads = payload.to(self._bucket()[0].device).split([nbytes for *_, nbytes in segments])
        spans = self._parts(len(segments))
        positions: list[Tensor] = []
        values: list[Tensor] = []
        for span, segment_payload, (numel, encoding, count, after, _) in zip(spans, payloads, segments, strict=True):
            if numel != span.numel:
                raise RefitError(f"changes of {numel} bytes came for {span.numel}: {ASK}")
            changes = ChangedBytes(numel, encoding, count, after, segment_payload)
            positions.append(changes.positions() + span.start)
            values.append(changes.values())
        return torch.cat(positions), torch.cat(values)

    def _write(self, positions: Tensor, values: Tensor) -> list[str]:
        """Write bytes at positions of a bucket. Returns the names of the tensors that changed."""
        names = self._buckets[self._next]
        ends = list(itertools.accumulate(tensor.nbytes for tensor in self._bucket()))
        # The positions are sorted, so those of a tensor are a slice, [first, cut).
        cuts = torch.searchsorted(positions, torch.tensor(ends, device=positions.device)).tolist()
        written = []
        start = first = 0
        for name, end, cut in zip(names, ends, cuts, strict=True):
            if cut > first:
                as_bytes(self._tensors[name])[positions[first:cut] - start] = values[first:cut]
                written.append(name)
            start = end
            first = cut
        return written

    def _end(self, header: Header) -> None:
        if self._next != len(self._buckets):
            raise RefitError(f"a refit ended after {self._next} of {len(self._buckets)} buckets: {ASK}")
        self._arriving = None
        self._next = 0
        received = {name for names in self._buckets for name in names}
        missing = sorted(set(self._tensors) - received)
        if missing and self._is_given:
            raise RefitError(f"the sender has no {', '.join(missing[:4])}: it stores other weights than this receiver")
        for name in missing:
            del self._tensors[name]
        self._complete = header["run"], header["refit"]

    def _bucket(self) -> list[Tensor]:
        """The tensors of the next message's bucket."""
        return [self._tensors[name] for name in self._buckets[self._next]]

    def _parts(self, ranks: int) -> list[Span]:
        """The part of this bucket's bytes that each rank of the sender reports, by rank."""
        return equal_parts(sum(tensor.nbytes for tensor in self._bucket()), ranks)

    def _check_digests(self, digests: Sequence[int]) -> None:
        """RefitError unless the bucket's bytes now are the sender's."""
        own = self._bucket()
        if [digest_of_span(own, span) for span in self._parts(len(digests))] != list(digests):
            raise RefitError(
                f"the bytes of {self._buckets[self._next][0]} and what came with it are not those of the sender: something else "
                f"wrote to these tensors, or a message was damaged; {ASK}"
            )


def _layout(header: Header) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor of a full refit's message."""
    return [(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in header["tensors"]]


def _sizes(header: Header) -> list[int]:
    """The bytes of each tensor of a message."""
    if header["kind"] == FULL:
        return [dtype.itemsize * math.prod(shape) for _, dtype, shape in _layout(header)]
    return [sum(nbytes for *_, nbytes in header["segments"])] if header["kind"] == DELTA else []


def _check_given(tensors: Mapping[str, Tensor]) -> None:
    """ValueError for tensors that are not contiguous or share memory."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous, strides {tensor.stride()}: changes are written byte by byte")
    ranges = sorted(
        (str(t.device), t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in tensors.items() if t.nbytes
    )
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(ranges):
        if device == other_device and start < end:
            raise ValueError(
                f"{name} and {other} share memory, so each would be written over by the other: give every name a tensor of its own"
            )
