"""Receiver: the bytes of a run, kept up to date by the messages of a Sender.

It holds tensors in checkpoint layout, and knows which refit of which run they are. A message that
does not follow is refused before it changes anything. While a refit is under way, and after one
that broke off, the tensors are partly of two steps and are not given out.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zerocast.formats.layout import Span
from zerocast.serve.changed_bytes import ChangedBytes, digest, equal_parts
from zerocast.serve.sender import DELTA, FULL, Header, as_bytes, flat_bytes, layout_digest

ASK = "ask the sender for named_tensors()"


class Receiver:
    """Applies refits to tensors by name.

    Args:
        tensors: contiguous tensors that are written in place, such as those of an engine; None to
            allocate what the first refit brings.
        device: where to allocate.

    Raises ValueError for tensors that are not contiguous.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None = None, device: torch.device | str = "cpu") -> None:
        for name, tensor in (tensors or {}).items():
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{name} is not contiguous, strides {tensor.stride()}: changes are written byte by byte"
                )
        self._tensors, self._is_given = dict(tensors or {}), tensors is not None
        self._device = torch.device(device)
        self._run, self._refit, self._naming, self._is_complete = "", 0, "", False
        self._arriving: tuple[str, str, int] | None = None  # kind, run and refit
        self._buckets: list[list[str]] = []  # names by bucket
        self._layouts: list[str] = []
        self._next = 0  # the bucket to come

    @property
    def refit(self) -> int:
        """The number of the refit that the tensors are of, for `Sender.named_deltas`; 0 before the
        first, and while the tensors are partly of two refits.
        """
        return self._refit if self._is_complete else 0

    @property
    def naming(self) -> str:
        """The naming in which the tensors are stored."""
        return self._naming

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by name; RuntimeError before the first refit and while they are partial."""
        if not self._is_complete:
            state = "a refit is under way or broke off" if self._arriving else "there was no refit yet"
            raise RuntimeError(f"these weights are not to be read, {state}: {ASK}")
        return self._tensors

    def buffers(self, header: Header) -> list[Tensor]:
        """Where the tensors of a message may be received: those of a full refit in place.

        Raises what `accept` raises for a message that does not follow.
        """
        if header["kind"] == FULL:
            self._begin_full(header)
            return [self._tensors[name] for name, _, _ in header["tensors"]]
        if header["kind"] == DELTA:
            self._check_delta(header)
            nbytes = sum(numbers[-1] for numbers in header["segments"])
            return [torch.empty(nbytes, dtype=torch.uint8, device=self._place(header))]
        return []

    @torch.no_grad()
    def accept(self, header: Header, tensors: Sequence[Tensor]) -> list[str]:
        """Apply a message: a header, and its tensors or what `buffers` gave with the bytes in it.
        Returns the names of the tensors that have changed.

        Raises ValueError for another format, RuntimeError for a delta of another run or since
        another refit, with nothing changed, and for bytes that are not those of the sender
        afterwards: somebody else wrote some, or a message was damaged. A full refit follows then.
        """
        if header["kind"] == FULL:
            return self._accept_full(header, tensors)
        if header["kind"] == DELTA:
            return self._accept_delta(header, tensors)
        self._end(header)
        return []

    def _begin_full(self, header: Header) -> None:
        arriving = FULL, header["run"], header["refit"]
        if header["index"] == 0:
            self._arriving, self._is_complete, self._naming = arriving, False, header["naming"]
            self._buckets, self._layouts, self._next = [], [], 0
        self._check_order(header, arriving, self._next)
        if len(self._buckets) > self._next:
            return  # by `buffers`
        wanted = {name: (getattr(torch, dtype), tuple(shape)) for name, dtype, shape in header["tensors"]}
        for name, (dtype, shape) in wanted.items():
            held = self._tensors.get(name)
            if held is not None and (held.dtype, tuple(held.shape)) == (dtype, shape):
                continue
            if self._is_given:
                found = "nothing" if held is None else f"{held.dtype} {tuple(held.shape)}"
                raise ValueError(
                    f"the sender has {name} as {dtype} {shape}, and this receiver {found}: they store weights in different "
                    "formats"
                )
            self._tensors[name] = torch.empty(shape, dtype=dtype, device=self._device)
        self._buckets.append(list(wanted))
        self._layouts.append(layout_digest(header["tensors"]))

    def _accept_full(self, header: Header, tensors: Sequence[Tensor]) -> list[str]:
        self._begin_full(header)
        names = self._buckets[self._next]
        for name, tensor in zip(names, tensors, strict=True):
            own = self._tensors[name]
            if own.data_ptr() != tensor.data_ptr():
                as_bytes(own).copy_(as_bytes(tensor.contiguous()))
        self._check_digests(header["digests"])
        self._next += 1
        return names

    def _check_delta(self, header: Header) -> None:
        if header["index"] == 0:
            if not self._is_complete:
                raise RuntimeError(f"changes came to a receiver without a complete refit: {ASK}")
            if header["run"] != self._run or header["since"] != self._refit:
                run = "" if header["run"] == self._run else "another run's "
                raise RuntimeError(
                    f"changes since {run}refit {header['since']} came to a receiver of refit {self._refit}: one was missed, {ASK}"
                )
            if header["naming"] != self._naming or header["layout"] != self._layouts[0]:
                raise ValueError(
                    f"the changes are of {header['naming']}, in another layout than these {self._naming} tensors: {ASK}"
                )
            self._arriving, self._next = (DELTA, header["run"], header["refit"]), 0
        self._check_order(header, (DELTA, header["run"], header["refit"]), self._next)

    def _accept_delta(self, header: Header, tensors: Sequence[Tensor]) -> list[str]:
        self._check_delta(header)
        index, (payload,) = header["index"], tensors
        payload = payload.to(self._place(header))
        segments, found = header["segments"], []
        if header["layout"] != self._layouts[index]:
            raise ValueError(f"bucket {index} of the changes is not laid out as the tensors here: {ASK}")
        payloads = payload.split([numbers[-1] for numbers in segments])
        for span, part, (numel, encoding, count, after, _) in zip(
            self._parts(index, len(segments)), payloads, segments, strict=True
        ):
            if numel != span.numel:
                raise ValueError(f"changes of {numel} bytes came for {span.numel}: {ASK}")
            changed = ChangedBytes(numel, encoding, count, after, part)
            found.append((changed.places() + span.start, changed.values()))
        self._is_complete = False
        places, values = (torch.cat(parts) for parts in zip(*found, strict=True))
        names = self._write(index, places, values)
        self._check_digests([after for _, _, _, after, _ in segments])
        self._next += 1
        return names

    def _write(self, index: int, places: Tensor, values: Tensor) -> list[str]:
        """Write bytes at places of a bucket; the names of the tensors that they are in."""
        names = self._buckets[index]
        ends = torch.tensor([self._tensors[name].nbytes for name in names]).cumsum(0)
        cuts = torch.searchsorted(places, ends.to(places.device)).tolist()
        written, start, first = [], 0, 0
        for name, end, cut in zip(names, ends.tolist(), cuts, strict=True):
            if cut > first:
                as_bytes(self._tensors[name])[places[first:cut] - start] = values[first:cut]
                written.append(name)
            start, first = end, cut
        return written

    def _end(self, header: Header) -> None:
        kind = self._arriving[0] if self._arriving else FULL
        self._check_order(header, (kind, header["run"], header["refit"]), self._next)
        if self._next != len(self._buckets):
            raise RuntimeError(f"a refit ended after {self._next} of {len(self._buckets)} buckets: {ASK}")
        brought = {name for names in self._buckets for name in names}
        missing = sorted(set(self._tensors) - brought)
        if missing and self._is_given:
            raise ValueError(f"the sender has no {', '.join(missing[:4])}: it stores other weights than this receiver")
        for name in missing:
            del self._tensors[name]
        self._run, self._refit, self._is_complete = header["run"], header["refit"], True
        self._arriving, self._next = None, 0

    def _check_order(self, header: Header, arriving: tuple[str, str, int], index: int) -> None:
        if arriving != self._arriving or header["index"] != index:
            raise RuntimeError(
                f"message {header['index']} of refit {header['refit']} came, and message {index} of "
                f"{'none' if self._arriving is None else f'refit {self._arriving[2]}'} was expected: {ASK}"
            )

    def _parts(self, index: int, ranks: int) -> list[Span]:
        """By rank of the sender, the bytes of a bucket that it reports."""
        return equal_parts(sum(self._tensors[name].nbytes for name in self._buckets[index]), ranks)

    def _check_digests(self, digests: Sequence[int]) -> None:
        """RuntimeError unless the bytes of the bucket that has come are the sender's."""
        own = [self._tensors[name] for name in self._buckets[self._next]]
        parts = self._parts(self._next, len(digests))
        if [digest(flat_bytes(own, span)) for span in parts] != list(digests):
            raise RuntimeError(
                f"the bytes of {self._buckets[self._next][0]} and what came with it are not those of the sender: something else "
                f"wrote to these tensors, or a message was damaged; {ASK}"
            )

    def _place(self, header: Header) -> torch.device:
        return self._tensors[self._buckets[header["index"]][0]].device
