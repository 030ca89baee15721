"""The messages of a refit: headers with a digest of themselves, and ChangedBytes, the positions and
the new values of the changed bytes of a flat buffer.

A header has plain values: the run and refit of a message, its number in the refit, and a
description of its tensors with digests of their bytes. Since the header has a digest as well, a
receiver knows of each message whether it is whole, by whatever transport it came.

Positions of changed bytes are encoded in the way that takes the fewest bytes: as a bitmap, 1/8 byte
for each byte of the buffer, or as the distance from each changed byte to the previous one, in one
or two bytes. If a distance does not fit, unchanged bytes in between are sent as well, which change
nothing. If nearly everything changed, all bytes are sent, without positions.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerocast.serve.flat_bytes import digest

# The kinds of messages: all bytes of a bucket, its changed bytes, and the end of a refit.
FULL = "full"
DELTA = "delta"
END = "end"
Header = Mapping[str, Any]

_OWN_DIGEST = "header_digest"


class RefitError(RuntimeError):
    """A refit cannot be sent or applied: a message is damaged or is not the next one, or the
    weights have other shapes or dtypes than in the previous refit.

    Either nothing has changed in the receiver, or its tensors are partly of two refits. In the
    latter case its `refit` is 0, and the next full refit repairs it.
    """


def with_digest(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A header: the fields and a digest of them."""
    return {**fields, _OWN_DIGEST: _digest_of(fields)}


def check_header(header: Header) -> None:
    """RefitError for a header that differs from its digest."""
    fields = {key: value for key, value in header.items() if key != _OWN_DIGEST}
    if header.get(_OWN_DIGEST) != _digest_of(fields):
        raise RefitError(
            f"the header of message {header.get('index')} of refit {header.get('refit')} is not as it was sent, so the message "
            "was damaged: ask the sender for named_tensors()"
        )


def layout_digest(layout: Sequence[Sequence[Any]]) -> str:
    """A digest of a bucket's layout: the names, dtypes and shapes of its tensors."""
    return _digest_of(layout)


def _digest_of(values: Any) -> str:
    # Tuples and lists have the same JSON, so a transport may turn one into the other.
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


BITMAP, GAPS_8, GAPS_16, WHOLE = range(4)
ENCODINGS = {BITMAP: "bitmap", GAPS_8: "gaps of a byte", GAPS_16: "gaps of two bytes", WHOLE: "whole"}
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class ChangedBytes:
    """Changes of a flat buffer of bytes.

    Attributes:
        numel: the size of the buffer.
        encoding: the encoding of positions, a key of ENCODINGS.
        count: the number of bytes that are sent.
        digest: the digest of the whole buffer after the changes. A receiver whose bytes differed
            from the sender's before the changes notices it by this digest.
        payload: u8, the encoded positions and then `count` values.
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
        changed_positions = changed.nonzero().view(-1)
        digest_after = digest(new)
        # The size of the payload in each encoding.
        bridges = {GAPS_8: _bridges(changed_positions, 255), GAPS_16: _bridges(changed_positions, 65535)}
        counts = {encoding: changed_positions.numel() + int(more.sum()) for encoding, more in bridges.items()}
        sizes = {
            BITMAP: -(-new.numel() // 8) + changed_positions.numel(),
            GAPS_8: 2 * counts[GAPS_8],
            GAPS_16: 3 * counts[GAPS_16],
            WHOLE: new.numel(),
        }
        encoding = min(sizes, key=lambda candidate: (sizes[candidate], candidate))
        if encoding == WHOLE:
            return ChangedBytes(new.numel(), WHOLE, new.numel(), digest_after, new.clone())
        if encoding == BITMAP:
            positions = changed_positions
            encoded_positions = _bitmap(changed)
        else:
            largest, dtype = (255, torch.uint8) if encoding == GAPS_8 else (65535, torch.uint16)
            positions = _bridge(changed_positions, bridges[encoding], largest)
            encoded_positions = _gaps(positions).to(dtype).view(torch.uint8)
        payload = torch.cat([encoded_positions, new[positions]])
        return ChangedBytes(new.numel(), encoding, positions.numel(), digest_after, payload)

    def positions(self) -> Tensor:
        """The positions of the bytes that are sent, int64, ascending. RefitError for a payload that
        does not fit the header.
        """
        encoded = self.payload[: self.payload.numel() - self.count]
        if self.encoding == WHOLE:
            positions = torch.arange(self.count, device=encoded.device)
        elif self.encoding == BITMAP:
            bits = (encoded[:, None] & torch.tensor(_BITS, dtype=torch.uint8, device=encoded.device)).view(-1)
            positions = bits.nonzero().view(-1)
        else:
            gaps = encoded if self.encoding == GAPS_8 else encoded.clone().view(torch.uint16)
            positions = gaps.to(torch.int64).cumsum(0) + torch.arange(gaps.numel(), device=gaps.device)
        if positions.numel() != self.count or (self.count and int(positions[-1]) >= self.numel):
            raise RefitError(
                f"changes of {self.count} bytes of {self.numel} came with positions of {positions.numel()}: ask the sender for "
                "named_tensors()"
            )
        return positions

    def values(self) -> Tensor:
        """The bytes at these positions, u8."""
        return self.payload[self.payload.numel() - self.count :]


def _gaps(positions: Tensor) -> Tensor:
    """The number of bytes between each position and the previous one."""
    if not positions.numel():
        return positions
    previous = torch.cat([positions.new_full((1,), -1), positions[:-1]])
    return positions - previous - 1


def _bridges(positions: Tensor, largest: int) -> Tensor:
    """The number of unchanged bytes to send before each position, for gaps of at most `largest`."""
    return _gaps(positions) // (largest + 1)


def _bridge(positions: Tensor, bridges: Tensor, largest: int) -> Tensor:
    """The positions of changed bytes, and before each of them its `bridges` unchanged bytes, which
    are `largest + 1` apart.
    """
    if not positions.numel():
        return positions
    repeated = torch.repeat_interleave(positions - bridges * (largest + 1), bridges + 1)
    ends = (bridges + 1).cumsum(0)
    first = torch.repeat_interleave(ends - bridges - 1, bridges + 1)
    step = torch.arange(repeated.numel(), device=positions.device) - first
    return repeated + step * (largest + 1)


def _bitmap(changed: Tensor) -> Tensor:
    padded = torch.zeros(-(-changed.numel() // 8) * 8, dtype=torch.uint8, device=changed.device)
    padded[: changed.numel()] = changed
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=changed.device)
    return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
