"""ChangedBytes: the positions and the new values of the changed bytes of a flat buffer.

Positions are stored in the way that takes the fewest bytes: as a bitmap, 1/8 byte for each byte of
the buffer, or as the distance from each changed byte to the one before, in one or two bytes. A
distance that does not fit is bridged by bytes that did not change: they are sent as they are, and
change nothing. Where nearly everything changed, all bytes are sent, without positions.

A digest of the whole buffer goes with them. The receiver compares it with its own bytes after the
changes, and so notices bytes that differed from the sender's before.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zerocast.serve.flat_bytes import digest
from zerocast.serve.refit_header import RefitError

BITMAP, GAPS_8, GAPS_16, WHOLE = range(4)
ENCODINGS = {BITMAP: "bitmap", GAPS_8: "gaps of a byte", GAPS_16: "gaps of two bytes", WHOLE: "whole"}
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class ChangedBytes:
    """Changes of a buffer of `numel` bytes. `payload` is u8: positions, then `count` values.

    Attributes:
        encoding: a key of ENCODINGS.
        digest: of the buffer after the changes.
    """

    numel: int
    encoding: int
    count: int
    digest: int
    payload: Tensor

    @staticmethod
    def between(old: Tensor, new: Tensor) -> "ChangedBytes":
        """The changes from one buffer to another, both u8 and flat, in the smallest encoding.

        The host waits for the device.
        """
        changed = old != new
        where = changed.nonzero().view(-1)
        after = digest(new)
        sizes = {BITMAP: -(-new.numel() // 8) + where.numel(), WHOLE: new.numel()}
        bridged = {GAPS_8: _bridges(where, 255), GAPS_16: _bridges(where, 65535)}
        counts = {encoding: where.numel() + int(more.sum()) for encoding, more in bridged.items()}
        sizes |= {GAPS_8: 2 * counts[GAPS_8], GAPS_16: 3 * counts[GAPS_16]}
        encoding = min(sizes, key=lambda candidate: (sizes[candidate], candidate))
        if encoding == WHOLE:
            return ChangedBytes(new.numel(), WHOLE, new.numel(), after, new.clone())
        if encoding == BITMAP:
            places, written = where, _bitmap(changed)
        else:
            largest, dtype = (255, torch.uint8) if encoding == GAPS_8 else (65535, torch.uint16)
            places = _bridge(where, bridged[encoding], largest)
            written = _gaps(places).to(dtype).view(torch.uint8)
        payload = torch.cat([written, new[places]])
        return ChangedBytes(new.numel(), encoding, places.numel(), after, payload)

    def places(self) -> Tensor:
        """Positions of the changed bytes, int64 in their order. RefitError for a payload that is
        not that of its header.
        """
        written = self.payload[: self.payload.numel() - self.count]
        if self.encoding == WHOLE:
            places = torch.arange(self.count, device=written.device)
        elif self.encoding == BITMAP:
            bits = (written[:, None] & torch.tensor(_BITS, dtype=torch.uint8, device=written.device)).view(-1)
            places = bits.nonzero().view(-1)
        else:
            gaps = written if self.encoding == GAPS_8 else written.clone().view(torch.uint16)
            places = gaps.to(torch.int64).cumsum(0) + torch.arange(gaps.numel(), device=gaps.device)
        if places.numel() != self.count or (self.count and int(places[-1]) >= self.numel):
            raise RefitError(
                f"changes of {self.count} bytes of {self.numel} came with positions of {places.numel()}: ask the sender for "
                "named_tensors()"
            )
        return places

    def values(self) -> Tensor:
        """The bytes at these positions, u8."""
        return self.payload[self.payload.numel() - self.count :]


def _gaps(places: Tensor) -> Tensor:
    """Bytes between each position and the one before."""
    before = torch.cat([places.new_full((1,), -1), places[:-1]]) if places.numel() else places
    return places - before - 1


def _bridges(places: Tensor, largest: int) -> Tensor:
    """The number of unchanged bytes that have to be sent before each position."""
    return _gaps(places) // (largest + 1)


def _bridge(places: Tensor, bridges: Tensor, largest: int) -> Tensor:
    """The positions of changed bytes and of the bridges before them, which are `largest + 1`
    apart.
    """
    if not places.numel():
        return places
    repeated = torch.repeat_interleave(places - bridges * (largest + 1), bridges + 1)
    ends = (bridges + 1).cumsum(0)
    first = torch.repeat_interleave(ends - bridges - 1, bridges + 1)
    step = torch.arange(repeated.numel(), device=places.device) - first
    return repeated + step * (largest + 1)


def _bitmap(changed: Tensor) -> Tensor:
    padded = torch.zeros(-(-changed.numel() // 8) * 8, dtype=torch.uint8, device=changed.device)
    padded[: changed.numel()] = changed
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=changed.device)
    return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
