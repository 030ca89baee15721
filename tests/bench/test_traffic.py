"""Bytes counted, against figures worked out by hand."""

import pytest

from zerocast import get_format
from zerocast.bench.traffic import Traffic
from zerocast.bench.workload import A, Workload

WHOLE, OWNED = 3_489_660_928, 436_207_616
HALF = Workload("half", ((256, 192),), 2, rank=0, world=2)  # owns the first of two equal weights


def of(workload: Workload, fmt: str) -> Traffic:
    return Traffic(workload, get_format(fmt))


@pytest.mark.parametrize(
    ("fmt", "cast", "step"),
    [
        ("fp8_block", 9.0, 29.0),
        ("mxfp8:block=32x32", 9 + 8 * (2 / 32 + 4 / 1024), 29 + 8 * (2 / 32 + 4 / 1024)),  # scales, stored for each row
        ("mxfp4", 8.5 + 8 * (1 / 32 + 4 / 1024), 28.5 + 8 * (1 / 32 + 4 / 1024)),
        ("fp8_current", 9.0, 33.0),
        ("mxfp8", 10 + 8 * 0.3125, 34 + 8 * 0.3125),
        ("nvfp4", 8.5, 32.5),
    ],
)
def test_bytes_an_element_of_a_are_those_of_the_targets(fmt: str, cast: float, step: float):
    replicated = 8 * (1 / 16 + 2 * 2 / 256) if fmt == "nvfp4" else 0.0  # scales; bf16 amaxes stored and read
    traffic = of(A, fmt)
    assert traffic.cast / OWNED == pytest.approx(cast + replicated, rel=5e-4)
    assert traffic.step / OWNED == pytest.approx(step + replicated, rel=5e-4)
    at_once = 4 * OWNED if get_format(fmt).casts_in_one_pass else 0  # no shard of A cuts a block
    assert traffic.step_in_two_passes == traffic.step + at_once
    assert traffic.adam == 28 * OWNED
    assert traffic.quantize_gradient / OWNED == 2 + 33 / 32
    assert traffic.add_gradients / OWNED == 33 / 32 + 4 / 8


def test_cut_blocks_are_read_once_more():
    """A shard of 97.5 of 195 rows has three rows of tiles and a part of the fourth, and no row of 128x128 blocks."""
    third = Workload("third", ((256, 192),), 2, rank=0, world=4)
    cut = Workload("cut", ((195, 192),), 2, rank=0, world=4)
    assert third.cut(get_format("fp8_block")) == 0
    assert cut.owned == cut.cut(get_format("fp8_block")) == 195 * 96
    assert cut.cut(get_format("mxfp8:block=32x32")) == 195 * 96 - 96 * 192
    traffic = of(cut, "mxfp8:block=32x32")
    assert traffic.step_in_two_passes - traffic.step == 4 * 96 * 192


def test_a_small_nvfp4_cast_by_hand():
    traffic = of(HALF, "nvfp4")  # a weight has 16 x 12 tiles, a scale buffer of 256 x 12 and one tensor amax
    assert traffic.masters == 4 * 49_152
    assert traffic.codes == 49_152 // 2
    assert traffic.packed == 2 * (2 * 192)  # two weights, bf16
    assert traffic.owned_amaxes == 2 * 192
    assert traffic.scales == 2 * (256 * 12 + 4)
    assert traffic.partial_amax == 196_608 + 384
    assert traffic.compute_scales == 768 + 6_152
    assert traffic.partial_cast == 196_608 + 384 + 24_576
    assert traffic.cast == 2 * 196_608 + 2 * 768 + 6_152 + 24_576
    assert traffic.step == 28 * 49_152 + 196_608 + 2 * 768 + 6_152 + 24_576
    # codes in and out, a scale a tile in, the columnwise buffer [256, 16] out
    assert traffic.transpose == 2 * (2 * 24_576 + 192 + 256 * 16)


@pytest.mark.parametrize(
    ("fmt", "work", "nbytes"),
    [
        # a weight has 2 x 2 blocks and a scale buffer of 2 x 4
        ("fp8_block", "cast_of_own_scales", 2 * 196_608 + (2 * 16 + 64) // 2 + 49_152),
        ("fp8_block", "transpose", 2 * (2 * 49_152 + 4 * 4 + 8 * 4)),
        # 256 x 6 amaxes across, 8 x 192 down; buffers [256, 8] and [8, 256]
        ("mxfp8", "cast", 2 * 196_608 + 2 * 12_288 + 8_192 + 98_304),
        # a weight has 8 x 6 tiles, and 2 x 2 groups in a buffer of 2 x 4
        ("mxfp4", "upcast", 2 * (24_576 + 48 + 49_152 + 4 * 8)),
        # a weight has 16 x 12 tiles, and an operand one scale
        ("nvfp4:exact_in_fp8", "upcast", 2 * (24_576 + 192 + 49_152 + 4)),
        # a scale per tensor is not transposed
        ("fp8_current", "transpose", 2 * 2 * 49_152),
    ],
)
def test_work_by_hand(fmt: str, work: str, nbytes: int):
    assert getattr(of(HALF, fmt), work) == nbytes


@pytest.mark.parametrize("world", [1, 2, 3, 5, 7])
def test_spans_of_all_ranks_tile_every_weight(world: int):
    workload = Workload("w", ((32, 96), (64, 32)), 3, world=world)
    by_rank = [list(workload.spans(rank)) for rank in range(world)]
    for index, (rows, columns) in enumerate(workload.shapes):
        held = sorted((s[index].start, s[index].stop) for s in by_rank if s[index].numel)
        assert held[0][0] == 0 and held[-1][1] == rows * columns
        assert all(a[1] == b[0] for a, b in zip(held, held[1:], strict=False))


def test_shrinking_divides_every_extent():
    small = A.scaled(32)
    assert small.layer == ((192, 128), (128, 128), (896, 128), (128, 448)) and small.layers == 1
    assert (small.rank, small.world, small.name) == (4, 8, "A/32")
