"""Hypothesis strategies: weights of every format, cut over ranks in every way that a shard can be cut."""

import math
from collections.abc import Sequence

import torch
from hypothesis import settings
from hypothesis import strategies as st

from tests import devices
from tests.casts import CONTENTS, FORMATS, NOMINAL, Cut, Weight
from zerocast import get_format
from zerocast.backends import extension
from zerocast.formats.layout import matrix_shape

SPECIAL = tuple(sorted(CONTENTS))


def is_interpreted(backend: str) -> bool:
    """Return whether Python runs the backend's kernels here, thousands of times slower than on a GPU."""
    return backend == "triton" and backend in devices.HERE


def examples(backend: str) -> settings:
    """Return the profile's number of examples. A backend whose kernels are interpreted gets a twelfth. The
    reference, which the other backends are compared with as well, and the lower SIMD levels of the C++
    backend, whose code differs in the width of its vectors alone, get a third.
    """
    whole = settings().max_examples
    is_third = backend == "reference" or (backend == "cpu" and not is_at_best_level())
    return settings(max_examples=max(1, whole // (12 if is_interpreted(backend) else 3 if is_third else 1)))


def is_at_best_level() -> bool:
    """Return True if the C++ backend runs at the highest SIMD level of this machine now."""
    compiled = extension.load()
    return bool(compiled.simd_level() == compiled.simd_levels()[0])


LARGE = {
    "fp8_delayed": (3, 70_001),
    "fp8_current": (70_001, 3),
    "fp8_block": (3, 128 * 1030 + 5),
    "mxfp8": (64, 32 * 1030),
    "mxfp4": (96, 32 * 1030),
    "nvfp4": (48, 16 * 1030),
    "int4": (64, 32 * 1030),
    "identity": (1, 200_003),
}
LARGE_INTERPRETED = {
    "fp8_delayed": (3, 3001),
    "fp8_current": (3001, 3),
    "fp8_block": (3, 128 * 2 + 5),
    "mxfp8": (64, 32 * 9),
    "mxfp4": (160, 32 * 9),
    "nvfp4": (32, 16 * 19),
    "int4": (32, 32 * 9),
    "identity": (1, 9001),
}


def large(fmt: str, backend: str) -> tuple[int, int]:
    """Return a shape of a format, larger than the pieces that the backend cuts its work into."""
    return (LARGE_INTERPRETED if is_interpreted(backend) else LARGE)[fmt]


@st.composite
def shapes(draw: st.DrawFn, fmt: str) -> tuple[int, ...]:
    """Draw a small shape that the format takes, sometimes with more than two dimensions."""
    spec = get_format(fmt)
    row, column = spec.multiple
    rows = row * draw(st.integers(1, max(1, 160 // row)))
    columns = column * draw(st.integers(1, max(1, 144 // column)))
    if draw(st.booleans()):
        return rows, columns
    experts = draw(st.integers(1, 3))
    if spec.exchange_block == (128, 128):  # experts of whole blocks, or stored one after another
        return experts, draw(st.sampled_from([128, rows])), min(columns, 40 // column * column)
    return experts, min(rows, 64 // row * row), columns


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> tuple[Cut, ...]:
    """Draw a span for each rank in any order: anywhere, or at or one off an edge of a row or tile; empty,
    single and missing ones.
    """
    numel, columns = math.prod(shape), matrix_shape(shape)[1]
    edges = {
        e
        for unit in (columns, 16 * columns, 128 * columns)
        for k in range(4)
        for e in (k * unit - 1, k * unit, k * unit + 1)
    }
    place = st.one_of(st.integers(0, numel), st.sampled_from(sorted(e for e in edges if 0 <= e <= numel)))
    inner = sorted(draw(st.lists(place, min_size=world - 1, max_size=world - 1)))
    if world > 1 and draw(st.booleans()):  # a rank with one element
        at = draw(st.integers(0, world - 2))
        inner[at] = min(numel, (inner[at - 1] if at else 0) + 1)
        inner.sort()
    spans = list(zip([0, *inner], [*inner, numel], strict=True))
    for rank in range(world):  # gaps
        start, stop = spans[rank]
        if draw(st.integers(0, 7)) == 0 and stop > start:
            spans[rank] = (draw(st.integers(start, stop)), stop)
    return tuple(draw(st.permutations(spans)))


@st.composite
def weights(
    draw: st.DrawFn, world: int, nominal: torch.dtype | None = None, formats: Sequence[str] = FORMATS
) -> Weight:
    """Draw a weight of any of the formats on `world` ranks."""
    fmt = draw(st.sampled_from(formats))
    shape = draw(shapes(fmt))
    return Weight(
        fmt=fmt,
        shape=shape,
        spans=draw(cuts(shape, world)),
        nominal=nominal or draw(st.sampled_from(NOMINAL)),
        content=draw(st.sampled_from(SPECIAL)),
        seed=draw(st.integers(0, 1000)),
        nominal_master=draw(st.booleans()),
    )


@st.composite
def models(draw: st.DrawFn, world: int, formats: Sequence[str] = FORMATS) -> tuple[Weight, ...]:
    """Draw a few weights of mixed formats, often all bf16, so that the packed buffer is bf16 too."""
    nominal = torch.bfloat16 if draw(st.booleans()) else None
    return tuple(draw(st.lists(weights(world, nominal, formats), min_size=1, max_size=4)))
