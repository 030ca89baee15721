"""The bytes of concatenated tensors: copies of them, the part of each rank, and a digest.

The digest is a sum, so that a device may compute it in any order, but its words are mixed first. A
plain weighted sum is linear, so two flipped sign bits could cancel. `torch.hash_tensor`, a
library's digest that runs on GPUs, is the xor of all words: words that change places, and a bit
that flips in two of them, cancel. Here a number that depends on its position is added to each word
of 8 bytes, and the result goes through the bijection with which MurmurHash3 ends: xor with its
upper half and multiplication by an odd number, twice, then the xor again. Without the last xor
pairs of flipped bits could cancel, since a sum of products with one number is a product with the
sum. One damaged word is always noticed. The digest detects damage, but no attacker who computes
digests.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from zerocast.formats.layout import Span, round_up
from zerocast.formats.memory import as_bytes

# Odd numbers: one for places, and one for each round of mixing.
_PLACE = -0x61C8864680B583EB
_ROUNDS = -0x00AE502812AA7333, -0x3B314601E57A13AD
_LOWER_HALF = 0xFFFFFFFF

Mixer = Callable[[Tensor, int, int, tuple[int, int]], Tensor]


def flat_bytes(tensors: Sequence[Tensor], span: Span) -> Tensor:
    """Copy the bytes of a span of concatenated tensors, which are contiguous; u8."""
    nothing = torch.empty(0, dtype=torch.uint8, device=_device(tensors))
    return torch.cat(list(_pieces(tensors, span)) or [nothing])


def equal_parts(nbytes: int, ranks: int) -> list[Span]:
    """Cut the bytes of a bucket into equal parts of whole words of 8 bytes, one for each rank. A
    rank reports the changes of its part.
    """
    step = round_up(-(-nbytes // ranks), 8)
    return [Span(min(rank * step, nbytes), min((rank + 1) * step, nbytes)) for rank in range(ranks)]


def digest(*tensors: Tensor) -> int:
    """Return the digest of all bytes of concatenated tensors, which are contiguous."""
    return digest_of_span(tensors, Span(0, sum(tensor.nbytes for tensor in tensors)))


def digest_of_span(tensors: Sequence[Tensor], span: Span) -> int:
    """Compute a number of 64 bits from every byte of a span of concatenated tensors, which are
    contiguous, and from the position of the byte in the span.

    The span is read in chunks. On a CPU a chunk has 1 MiB, so that it and the two temporaries of
    its sum stay in the cache. On a GPU it has 256 MiB, because each chunk costs some launches. The
    host waits for the device.
    """
    device = _device(tensors)
    total = torch.full((), span.numel, dtype=torch.int64, device=device)
    first = 0
    for chunk in _chunks(tensors, span, 2**20 if device.type == "cpu" else 2**28):
        words = _words(chunk)
        total += _mixer(device)(words, first, _PLACE, _ROUNDS)
        first += words.numel()
    return int(total)


@functools.cache
def _mixer(device: torch.device) -> Mixer:
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            fused: Mixer = importlib.import_module("zerocast.serve.triton_digest").sum_of_mixed
            return fused
    return sum_of_mixed


def sum_of_mixed(words: Tensor, first: int, place: int, rounds: tuple[int, int]) -> Tensor:
    """Sum int64 words, each mixed with its position, which is counted from `first`."""
    mixed = torch.arange(first, first + words.numel(), device=words.device).mul_(place).add_(words)
    upper = torch.empty_like(mixed)
    for odd in rounds:
        _mix_halves(mixed, upper)
        mixed *= odd
    _mix_halves(mixed, upper)
    return mixed.sum()


def _mix_halves(words: Tensor, upper: Tensor) -> None:
    # A shift of int64 repeats the sign, and xor with that would lose a bit.
    torch.bitwise_right_shift(words, 32, out=upper)
    upper &= _LOWER_HALF
    words ^= upper


def _words(chunk: Tensor) -> Tensor:
    """Return the bytes of a chunk as int64, with zeros after the last."""
    if chunk.numel() % 8:
        chunk = torch.cat([chunk, chunk.new_zeros(-chunk.numel() % 8)])
    elif chunk.storage_offset() % 8 or chunk.data_ptr() % 8:
        chunk = chunk.clone()
    return chunk.view(torch.int64)


def _chunks(tensors: Sequence[Tensor], span: Span, size: int) -> Iterator[Tensor]:
    """Yield a span of concatenated tensors in chunks of `size` bytes; the last one is shorter. A
    chunk of one tensor is a view, others are copies.
    """
    pieces: list[Tensor] = []
    filled = 0
    for rest in _pieces(tensors, span):
        while rest.numel():
            taken = min(rest.numel(), size - filled)
            pieces.append(rest[:taken])
            filled += taken
            rest = rest[taken:]
            if filled == size:
                yield _joined(pieces)
                pieces, filled = [], 0
    if pieces:
        yield _joined(pieces)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _pieces(tensors: Sequence[Tensor], span: Span) -> Iterator[Tensor]:
    """Views of the bytes of a span of concatenated tensors, tensor by tensor."""
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        if start < span.stop and span.start < end:
            yield as_bytes(tensor)[max(span.start - start, 0) : span.stop - start]
        start = end


def _device(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")
