"""The sum of `flat_bytes.sum_of_mixed` on a GPU in one pass over the words."""

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 4096  # of a program


@triton.jit
def _mix_halves(x):
    return x ^ ((x >> 32) & 0xFFFFFFFF)


@triton.jit
def _sum(words, count, first, total, PLACE: tl.constexpr, ODD: tl.constexpr, ODD_TOO: tl.constexpr, SIZE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(words + i, mask=i < count, other=0) + (first + i) * PLACE
    x = _mix_halves(_mix_halves(_mix_halves(x) * ODD) * ODD_TOO)
    tl.atomic_add(total, tl.sum(tl.where(i < count, x, 0), 0))


def sum_of_mixed(words: Tensor, first: int, place: int, rounds: tuple[int, int]) -> Tensor:
    """Return the sum as an int64 tensor without dimensions, in one launch."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    is_on_gpu = words.device.type == "cuda"
    with torch.cuda.device(words.device) if is_on_gpu else contextlib.nullcontext():
        _sum[(triton.cdiv(words.numel(), WORDS),)](words, words.numel(), first, total, place, *rounds, WORDS)
    return total
