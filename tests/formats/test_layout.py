"""Integer arithmetic of shapes, spans and bytes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.casts import FORMATS
from zerocast import get_format
from zerocast.formats.layout import (
    Span,
    amax_counts,
    buffers,
    byte_range,
    check_shape,
    stored_matrices,
)

BYTES_PER_CODE = {"nvfp4": 0.5, "identity": 2.0, "mxfp4": 0.5, "int4": 0.5}


@given(a=st.tuples(st.integers(0, 50), st.integers(0, 50)), b=st.tuples(st.integers(0, 50), st.integers(0, 50)))
def test_intersection(a: tuple[int, int], b: tuple[int, int]) -> None:
    first, second = (Span(min(pair), max(pair)) for pair in (a, b))
    common = first.intersect(second)
    elements = set(range(first.start, first.stop)) & set(range(second.start, second.stop))
    assert set(range(common.start, common.stop)) == elements
    assert common.numel == len(elements)


@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_boxes_tile_the_span_in_order(data: st.DataObject, shape: list[int]) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    span = Span(start, data.draw(st.integers(start, numel)))
    boxes = list(span.boxes(shape))
    grid = np.arange(numel).reshape(shape)
    covered = [grid[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1) for box in boxes]
    assert np.concatenate([*covered, []]).tolist() == list(range(span.start, span.stop))
    if len(shape) == 2:
        assert len(boxes) <= 3


@pytest.mark.parametrize("fmt", FORMATS)
@given(data=st.data())
def test_byte_ranges_cover_what_is_owned(fmt: str, data: st.DataObject) -> None:
    """Neighbours' ranges meet without a gap, and overlap in the one byte that an odd 4-bit cut shares."""
    spec, numel = get_format(fmt), 32 * 64
    inner = sorted(data.draw(st.lists(st.integers(0, numel), min_size=2, max_size=2)))
    size = BYTES_PER_CODE.get(spec.name, 1.0)
    cuts = [0, *inner, numel]
    spans = [Span(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    ranges = [byte_range(spec, (32, 64), span, torch.bfloat16) for span in spans]
    for span, (first, last) in zip(spans, ranges, strict=True):
        assert first == math.floor(span.start * size)
        assert last == (math.ceil(span.stop * size) if span.numel else first)
    held = [r for r, span in zip(ranges, spans, strict=True) if span.numel]
    assert held[0][0] == 0
    assert held[-1][1] == numel * size
    for (_, last), (first, _) in zip(held, held[1:], strict=False):
        assert last - first in ({0, 1} if size < 1 else {0})


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 2049), (2048, 2050)])
def test_spans_outside_the_weight(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="outside a weight"):
        byte_range(get_format("nvfp4"), (32, 64), Span(start, stop), torch.bfloat16)


def test_identity_bytes_follow_the_nominal_dtype() -> None:
    identity = get_format("identity")
    assert byte_range(identity, (4, 4), Span(3, 5), torch.float32) == (12, 20)
    assert byte_range(identity, (4, 4), Span(3, 5), torch.float16) == (6, 10)


@pytest.mark.parametrize(
    ("fmt", "counts"),
    [
        ("fp8_current", (1, 0)),
        ("fp8_block", (2 * 3, 0)),
        ("mxfp8", (160 * 9, 5 * 288)),
        ("nvfp4", (10 * 18, 0)),
        ("int4", (160 * 9, 0)),
        ("identity", (0, 0)),
    ],
)
def test_amaxes_are_packed_without_padding(fmt: str, counts: tuple[int, int]) -> None:
    assert amax_counts(get_format(fmt), 160, 288) == counts


@pytest.mark.parametrize("fmt", FORMATS)
def test_padding_is_zero_or_one(fmt: str) -> None:
    """Padding is 1.0 in FP32 scales, and 0 in bytes and amaxes."""
    for name, buffer in buffers(get_format(fmt), (160, 96), torch.bfloat16).items():
        if buffer is not None:
            scale = name.endswith("scale_inv") or name == "scale"
            assert buffer.padding == (1.0 if scale and buffer.dtype is torch.float32 else 0.0)


def test_weights_of_more_dimensions() -> None:
    """Experts are stored as one matrix, or one after another where a block would span two."""
    for fmt, shape, stored in (
        ("nvfp4", (3, 32, 48), (1, (96, 48))),
        ("fp8_block", (3, 256, 70), (1, (768, 70))),
        ("fp8_block", (3, 200, 70), (3, (200, 70))),
        ("fp8_block", (2, 3, 5, 7), (6, (5, 7))),
        ("mxfp4", (3, 96, 64), (3, (96, 64))),
        ("mxfp4:exact_in_fp8=False", (3, 96, 64), (1, (288, 64))),
        ("fp8_current", (3, 5, 7), (1, (15, 7))),
    ):
        check_shape(get_format(fmt), shape)
        assert stored_matrices(get_format(fmt), shape) == stored
    with pytest.raises(ValueError, match="rows that are a multiple of 16, got 24"):
        check_shape(get_format("nvfp4"), (2, 24, 48))


@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp4"])
def test_buffers_of_matrices_one_after_another(fmt: str) -> None:
    of_one, of_three = (buffers(get_format(fmt), shape, torch.bfloat16) for shape in ((96, 64), (3, 96, 64)))
    for name, buffer in of_one.items():
        repeated = of_three[name]
        assert (buffer is None) == (repeated is None)
        if buffer is not None and repeated is not None:
            assert repeated.shape == (3 * buffer.shape[0], *buffer.shape[1:])
