"""What receivers do with a message of a refit: whether it is the next one, the layout of its
tensors, changes to their bytes, and digests.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast.formats.layout import Span
from zerocast.formats.memory import as_bytes
from zerocast.serve.flat_bytes import digest_of_span, equal_parts
from zerocast.serve.refit_message import ASK, DELTA, FULL, ChangedBytes, Header, RefitError

# Name, dtype and shape of each tensor of a bucket.
Layout = list[tuple[str, torch.dtype, tuple[int, ...]]]


def layout_of(header: Header) -> Layout:
    """Return the layout of the tensors that a message of a full refit brings."""
    return [(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in header["tensors"]]


def check_sizes(header: Header, tensors: Sequence[Tensor]) -> None:
    """Raise RefitError unless a message came with tensors of the sizes that its header says."""
    sizes = [tensor.nbytes for tensor in tensors]
    expected = sizes_of(header)
    if sizes != expected:
        raise RefitError(
            f"message {header['index']} of refit {header['refit']} came with tensors of {sizes} bytes, and its header says "
            f"{expected}: {ASK}"
        )


def sizes_of(header: Header) -> list[int]:
    """Return the bytes of each tensor of a message."""
    if header["kind"] == FULL:
        return [dtype.itemsize * math.prod(shape) for _, dtype, shape in layout_of(header)]
    return [sum(nbytes for *_, nbytes in header["segments"])] if header["kind"] == DELTA else []


def changes_of(header: Header, payload: Tensor, bucket: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Decode the changes to the tensors of a bucket.

    Returns (positions in the bucket, int64 and ascending, the new bytes at these positions), on the
    device of the bucket. Raises RefitError for changes of a bucket of a different size.
    """
    nbytes = sum(tensor.nbytes for tensor in bucket)
    segments = header["segments"]
    # A transport may deliver bytes in any dtype and shape.
    payloads = as_bytes(payload.to(bucket[0].device).contiguous()).split([size for *_, size in segments])
    positions: list[Tensor] = []
    values: list[Tensor] = []
    for span, segment_payload, (numel, encoding, count, after, _) in zip(
        equal_parts(nbytes, len(segments)), payloads, segments, strict=True
    ):
        if numel != span.numel:
            raise RefitError(f"changes of {numel} bytes came for {span.numel}: {ASK}")
        changes = ChangedBytes(numel, encoding, count, after, segment_payload)
        positions.append(changes.positions().add_(span.start))
        values.append(changes.values())
    # Nearly always of one rank, whose changes need no copy.
    return (positions[0], values[0]) if len(segments) == 1 else (torch.cat(positions), torch.cat(values))


def write_changes(tensors: Sequence[Tensor], positions: Tensor, values: Tensor) -> list[int]:
    """Write bytes at positions of a bucket. Returns the indices of the tensors that changed."""
    ends = list(itertools.accumulate(tensor.nbytes for tensor in tensors))
    # The positions are sorted, so those of a tensor are a slice, [first, cut).
    cuts = torch.searchsorted(positions, torch.tensor(ends, device=positions.device)).tolist()
    written = []
    start = first = 0
    for index, (end, cut) in enumerate(zip(ends, cuts, strict=True)):
        if cut > first:
            as_bytes(tensors[index])[positions[first:cut] - start] = values[first:cut]
            written.append(index)
        start = end
        first = cut
    return written


def digests_after(header: Header) -> list[int]:
    """Return the sender's digests of a bucket after a message, one for the part of each of its
    ranks.
    """
    return list(header["digests"]) if header["kind"] == FULL else [after for *_, after, _ in header["segments"]]


def have_digests(tensors: Sequence[Tensor], digests: Sequence[int]) -> bool:
    """Return True if the bytes of a bucket are those that the sender computed these digests
    from.
    """
    parts: list[Span] = equal_parts(sum(tensor.nbytes for tensor in tensors), len(digests))
    return [digest_of_span(tensors, part) for part in parts] == list(digests)


class RefitOrder:
    """The refits that have begun at a receiver, so that none comes late or twice.

    Attributes:
        complete: the run and refit of the receiver's bytes; None before the first refit, and while
            they are partly of two.
    """

    def __init__(self) -> None:
        self.complete: tuple[str, int] | None = None
        # The newest refit that has begun, by run.
        self._begun: dict[str, int] = {}
        # The run of the last complete refit, and the runs that had the complete ones before.
        self._present: str | None = None
        self._over: set[str] = set()

    @property
    def has_begun(self) -> bool:
        """True if a refit has begun, of any run."""
        return bool(self._begun)

    @property
    def refit(self) -> int:
        """The number of the refit of the receiver's bytes; 0 if they are of none."""
        return self.complete[1] if self.complete else 0

    def check(self, header: Header) -> None:
        """Raise RefitError unless the refit that this header begins may begin."""
        run = header["run"]
        refit = header["refit"]
        newest = self._begun.get(run)
        if run in self._over:
            raise RefitError(
                f"refit {refit} of a run that is over on this rank arrived, as another run's refit was complete since: {ASK}"
            )
        if newest is not None and refit <= newest:
            raise RefitError(
                f"refit {refit} arrived late or again, as refit {newest} of its run has begun on this rank: {ASK}"
            )
        if header["kind"] == FULL:
            return
        if self.complete is None:
            raise RefitError(f"changes came to a receiver without a complete refit: {ASK}")
        if (run, header["since"]) != self.complete:
            of_run = "" if run == self.complete[0] else "another run's "
            raise RefitError(
                f"changes since {of_run}refit {header['since']} came to a receiver of refit {self.refit}: one was missed, {ASK}"
            )

    def begin(self, header: Header) -> None:
        """Note that the refit of this header has begun."""
        self._begun[header["run"]] = header["refit"]

    def end(self, header: Header) -> None:
        """Note that the refit of this header is complete, which ends the run before it. A refit
        that has only begun ends none, since its first message may be a stray one.
        """
        run = header["run"]
        if self._present is not None and self._present != run:
            self._over.add(self._present)
        self._present = run
        self.complete = run, header["refit"]
