"""The messages of a refit: headers with a digest of themselves, and ChangedBytes, the positions and
the new values of the changed bytes of a flat buffer.

A header has plain values: the run and refit of a message, its number in the refit, and a
description of its tensors with digests of their bytes. Since the header has a digest as well, a
receiver knows of each message whether it is whole, by whatever transport it came.

Positions of changed bytes are encoded in the way that takes the fewest bytes:

* A bitmap takes 1/8 byte for each byte of the buffer.
* For blocks of the buffer, the number of changed bytes in each block, and their positions in the
  block. A number is one byte for blocks of 255 bytes and two for blocks of 65,535, so that a count
  always fits.
* If nearly everything changed, all bytes are sent, without positions.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerocast.serve.flat_bytes import digest

# The version of the messages and of their order (docs/reference/engines.md).
PROTOCOL = 1
# The kinds of messages: all bytes of a bucket, its changed bytes, and the end of a refit.
FULL = "full"
DELTA = "delta"
END = "end"
# What a receiver that cannot go on says.
ASK = "ask the sender for named_tensors()"
Header = Mapping[str, Any]

_OWN_DIGEST = "header_digest"


class RefitError(RuntimeError):
    """A refit cannot be sent or applied: a message is damaged or is not the next one, or the
    weights have other shapes or dtypes than in the previous refit.

    Either nothing has changed in the receiver, or its tensors are partly of two refits. In the
    latter case its `refit` is 0, and the next full refit repairs it.
    """


def with_digest(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a header: the fields, the version of the protocol, and a digest of them."""
    fields = {"protocol": PROTOCOL, **fields}
    return {**fields, _OWN_DIGEST: _digest_of(fields)}


def check_header(header: Header) -> None:
    """Raise RefitError for a header of another protocol, or that differs from its digest."""
    if header.get("protocol") != PROTOCOL:
        raise RefitError(
            f"the sender speaks protocol {header.get('protocol')} of refits, and this receiver {PROTOCOL}: install one version of "
            "zerocast on both sides"
        )
    fields = {key: value for key, value in header.items() if key != _OWN_DIGEST}
    if header.get(_OWN_DIGEST) != _digest_of(fields):
        raise RefitError(
            f"the header of message {header.get('index')} of refit {header.get('refit')} is not as it was sent, so the message "
            f"was damaged: {ASK}"
        )


def layout_digest(layout: Sequence[Sequence[Any]]) -> str:
    """Return a digest of a bucket's layout: the names, dtypes and shapes of its tensors."""
    return _digest_of(layout)


def _digest_of(values: Any) -> str:
    # Tuples and lists have the same JSON, so a transport may turn one into the other.
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


BITMAP, BLOCKS_8, BLOCKS_16, WHOLE = range(4)
# The bytes of a block, and the dtype of a number, by encoding.
_BLOCKS = {BLOCKS_8: (255, torch.uint8), BLOCKS_16: (65535, torch.uint16)}
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class ChangedBytes:
    """Changes of a flat buffer of bytes.

    Attributes:
        numel: the size of the buffer.
        encoding: the encoding of positions: BITMAP, BLOCKS_8, BLOCKS_16 or WHOLE.
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
        """Return the changes from one buffer to another, both u8 and flat, in the smallest
        encoding.

        The host waits for the device.
        """
        changed = old != new
        positions = changed.nonzero().view(-1)
        numel, count = new.numel(), positions.numel()
        # The size of the payload in each encoding.
        sizes = {BITMAP: -(-numel // 8) + count, WHOLE: numel if count else 0}
        for encoding, (block, dtype) in _BLOCKS.items():
            sizes[encoding] = dtype.itemsize * (-(-numel // block) + count) + count
        encoding = min(sizes, key=lambda candidate: (sizes[candidate], candidate))
        digest_after = digest(new)
        if encoding == WHOLE:
            # Of a buffer without changes nothing is sent.
            payload = new[: sizes[WHOLE]].clone()
            return ChangedBytes(numel, WHOLE, payload.numel(), digest_after, payload)
        encoded_positions = _bitmap(changed) if encoding == BITMAP else _by_blocks(positions, numel, *_BLOCKS[encoding])
        return ChangedBytes(numel, encoding, count, digest_after, torch.cat([encoded_positions, new[positions]]))

    def positions(self) -> Tensor:
        """Return the positions of the bytes that are sent, int64, ascending. Raises RefitError for
        a payload that does not fit the header. The host waits for the device.
        """
        encoded = self.payload[: max(self.payload.numel() - self.count, 0)]
        positions: Tensor | None
        if self.encoding == WHOLE:
            positions = torch.arange(self.count, device=encoded.device)
        elif self.encoding == BITMAP:
            bits = (encoded[:, None] & torch.tensor(_BITS, dtype=torch.uint8, device=encoded.device)).view(-1)
            positions = bits.nonzero().view(-1)
        else:
            positions = _from_blocks(encoded, self.numel, self.count, *_BLOCKS[self.encoding])
        if positions is None or positions.numel() != self.count or not _ascend_below(positions, self.numel):
            raise RefitError(f"changes of {self.count} bytes of {self.numel} came with other positions: {ASK}")
        return positions

    def values(self) -> Tensor:
        """Return the bytes at these positions, u8."""
        return self.payload[self.payload.numel() - self.count :]


def _by_blocks(positions: Tensor, numel: int, block: int, dtype: torch.dtype) -> Tensor:
    """Return the count of positions in each block, and each position within its block; u8."""
    ends = torch.arange(block, numel + block, block, device=positions.device)
    counts = torch.searchsorted(positions, ends).diff(prepend=positions.new_zeros(1))
    # Joined as bytes, since not every device joins unsigned integers of two.
    return torch.cat([numbers.to(dtype).view(torch.uint8) for numbers in (counts, positions % block)])


def _from_blocks(encoded: Tensor, numel: int, count: int, block: int, dtype: torch.dtype) -> Tensor | None:
    """Return the positions that `_by_blocks` encoded; None if the counts are of other positions."""
    blocks = -(-numel // block)
    if encoded.numel() != dtype.itemsize * (blocks + count):
        return None
    counts, places = encoded.clone().view(dtype).to(torch.int64).split([blocks, count])
    # Repeating trusts the size that it is told.
    if int(counts.sum()) != count:
        return None
    starts = torch.arange(0, numel, block, device=encoded.device)
    return torch.repeat_interleave(starts, counts, output_size=count).add_(places)


def _ascend_below(positions: Tensor, numel: int) -> bool:
    """Return True if each position is greater than the one before, and less than `numel`."""
    if not positions.numel():
        return True
    return bool((positions[1:] > positions[:-1]).all() & (positions[-1] < numel))


def _bitmap(changed: Tensor) -> Tensor:
    padded = torch.zeros(-(-changed.numel() // 8) * 8, dtype=torch.uint8, device=changed.device)
    padded[: changed.numel()] = changed
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=changed.device)
    return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
