"""Stage adam_8bit: on every backend the bytes of the reference, and of one step on the whole weight for any cuts."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import devices, strategies
from tests.backends import stages
from tests.backends.test_adam_update import scalars
from tests.casts import bit_patterns
from zerocast import get_format
from zerocast.backends.descriptor import Piece
from zerocast.backends.reference import adam
from zerocast.formats import FormatSpec
from zerocast.formats.layout import amax_counts, amax_grid, moment_group, moment_groups

# rows and columns: more whole groups than a thread block takes, short last groups, rows shorter than a group, a vector
SHAPES = ((9, 1024), (5, 256), (7, 200), (40, 3), (1, 1000), (3, 129))
KEYS = [7 + index + 2**31 * (index % 2) for index in range(len(SHAPES))]
# matrices that blocks of any format divide, with short last groups, and more rows than a thread block takes
MATRICES = ((288, 128), (64, 256), (32, 416), (32, 32), (160, 64), (96, 160))
FORMATS = ("fp8_current", "fp8_block", "mxfp8", "mxfp8:block=32x32", "mxfp4", "nvfp4", "nvfp4:exact_in_fp8", "int4")


def piece_of(shape: Sequence[int], key: int, start: int, stop: int, offset: int, scale: int, cut: Tensor) -> list[int]:
    """The row of elements [start, stop) of a weight. `cut` has the places of its groups, or -1."""
    row = [0] * len(Piece)
    row[Piece.OFFSET], row[Piece.NUMEL], row[Piece.SCALARS] = offset, stop - start, key % 3
    row[Piece.START], row[Piece.COLUMNS], row[Piece.SCALE], row[Piece.KEY] = start, shape[1], scale, key
    # Its place is known once the scales of all first moments are counted.
    row[Piece.SECOND_SCALE] = scale
    row[Piece.CUT_FIRST] = int(cut[moment_group(start, shape[1])])
    row[Piece.CUT_LAST] = int(cut[moment_group(stop - 1, shape[1])])
    return row


def row_of(
    fmt: FormatSpec, shape: Sequence[int], start: int, stop: int, offset: int, places: dict[str, int]
) -> list[int]:
    """The row of a table for the same elements. It stands for the rows of the weight from a band of blocks on, as where
    other ranks compute the scales above.
    """
    rows, columns = shape
    above = start // columns // 128 * 128
    if fmt.block:
        blocks = {"row_amax": fmt.block, "column_amax": fmt.columnwise_block}
        skipped = {name: amax_grid(block, above, columns) for name, block in blocks.items() if block and above}
        places = places | {name: places[name] + down * across for name, (down, across) in skipped.items()}
    else:
        above = 0
    where = {"rows": rows - above, "columns": columns, "start": start - above * columns, "numel": stop - start}
    return stages.row(**where, master_base=0, master_offset=offset, **places)


def is_inside(element: int, shape: Sequence[int]) -> bool:
    """Whether a cut before this element divides a group."""
    numel, columns = torch.Size(shape).numel(), shape[1]
    return 0 < element < numel and moment_group(element - 1, columns) == moment_group(element, columns)


class Shard:
    """What one rank has of all weights: the elements between two of the `cuts` of each."""

    def __init__(self, whole: list[Tensor], cuts: Sequence[Sequence[int]], rank: int, fmt: str = "fp8_current") -> None:
        self.fmt = get_format(fmt)
        pieces: list[list[int]] = []
        table: list[list[int]] = []
        spans: list[slice] = []
        offset = scale = places = amaxes = 0
        for weight, key, own in zip(whole, KEYS, cuts, strict=True):
            shape = tuple(weight.shape)
            numel, columns = weight.numel(), shape[1]
            bounds = [0, *own, numel]
            cut = torch.full((moment_groups(0, numel, columns),), -1)
            for group in sorted({moment_group(c, columns) for c in own if is_inside(c, shape)}):
                cut[group] = places
                places += 1
            start, stop = bounds[rank], bounds[rank + 1]
            spans.append(slice(start, stop))
            rowwise, columnwise = amax_counts(self.fmt, *shape)
            where = {"not_finite": amaxes, "row_amax": amaxes + 1}
            where |= {"column_amax": amaxes + 1 + rowwise} if columnwise else {}
            amaxes += 1 + rowwise + columnwise
            if stop > start:
                pieces.append(piece_of(shape, key, start, stop, offset, scale, cut))
                table.append(row_of(self.fmt, shape, start, stop, offset, where))
                offset, scale = offset + stop - start, scale + moment_groups(start, stop - start, columns)
        self.spans, self.pieces = spans, torch.tensor(pieces, dtype=torch.int64).view(-1, len(Piece))
        self.pieces[:, Piece.SECOND_SCALE] += scale
        self.table = stages.table(*table)
        self.master = torch.cat([weight.flatten()[span] for weight, span in zip(whole, spans, strict=True)])
        self.exp_avg = torch.zeros(offset, dtype=torch.int8)
        self.exp_avg_sq = torch.zeros(offset, dtype=torch.uint8)
        self.scales, self.cut_largest = torch.zeros(2, scale), torch.zeros(2, places)
        self.packed = torch.zeros(amaxes, dtype=torch.bfloat16)

    def grad(self, whole: list[Tensor]) -> Tensor:
        return torch.cat([weight.flatten()[span] for weight, span in zip(whole, self.spans, strict=True)])

    def arguments(self, grad: Tensor, step: int, finishes: bool = False, skip: Tensor | None = None) -> tuple[Any, ...]:
        """What the stage is given after the format."""
        state = [[tensor] for tensor in (self.master, grad, self.exp_avg, self.exp_avg_sq, self.scales)]
        rows, clip = torch.from_numpy(scalars(step)), torch.tensor([0.7])
        # Parameter groups may have taken different numbers of steps.
        steps = step + torch.arange(len(rows))
        given = torch.bfloat16, *state, self.table, self.pieces, rows, clip, steps, self.packed
        return *given, self.cut_largest, finishes, skip

    def call(self, backend: str, grads: list[Tensor], step: int, finishes: bool, skip: Tensor | None = None) -> None:
        devices.stage(backend, "adam_8bit")(self.fmt, *self.arguments(self.grad(grads), step, finishes, skip))

    def dequantized(self) -> Iterator[tuple[Tensor, Tensor]]:
        for piece in self.pieces.tolist():
            yield adam.dequantize_moments(self.exp_avg, self.exp_avg_sq, self.scales, piece)


def weights(seed: int, wild: bool = False, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Tensor]:
    if wild:
        patterns = [bit_patterns(rows * columns, seed + rows) for rows, columns in shapes]
        return [torch.from_numpy(one).view(shape) for one, shape in zip(patterns, shapes, strict=True)]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp() for shape in shapes]


def train(
    backend: str,
    cuts: Sequence[Sequence[int]],
    steps: int,
    dtype: torch.dtype = torch.float32,
    wild: bool = False,
    fmt: str = "fp8_current",
) -> list[Shard]:
    shapes = MATRICES if get_format(fmt).block else SHAPES
    ranks = 1 + len(cuts[0])
    shards = [Shard(weights(0, shapes=shapes), cuts, rank, fmt) for rank in range(ranks)]
    for step in range(1, steps + 1):
        grads = [gradient.to(dtype) for gradient in weights(step, wild, shapes)]
        grads[0][0] = 0  # groups of zeros
        for shard in shards:
            shard.cut_largest.zero_()
            shard.packed.zero_()
            shard.call(backend, grads, step, finishes=False)
        largest = torch.stack([shard.cut_largest for shard in shards]).amax(0)
        for shard in shards:
            shard.cut_largest.copy_(largest)
            shard.call(backend, grads, step, finishes=True)
    return shards


# What the reference gives serves every backend that is compared with it; nothing changes these shards.
by_the_reference = functools.cache(functools.partial(train, "reference"))


def words(x: Tensor) -> Tensor:
    """Bit patterns, with all NaN alike."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


Cuts = tuple[tuple[int, ...], ...]
WHOLE: Cuts = ((),) * len(SHAPES)
CUTS: Cuts = ((1000, 9000), (100, 1000), (1, 1399), (1, 2), (300, 310), (130, 386))
CUTS_OF_MATRICES: Cuts = (
    *((20_000, 128 * 256), (32 * 256, 10_000), (100, 5000)),
    *((1, 1000), (8192, 8192), (130, 15_000)),
)


def assert_same(found: Shard, expected: Shard) -> None:
    assert torch.equal(words(found.master), words(expected.master))
    for name in ("exp_avg", "exp_avg_sq", "scales", "packed"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize(
    ("dtype", "wild"),
    [
        (torch.float32, True),
        (torch.bfloat16, False),
        pytest.param(torch.float32, False, marks=pytest.mark.long_interpreted),
        pytest.param(torch.bfloat16, True, marks=pytest.mark.long_interpreted),
    ],
)
def test_the_bytes_of_the_reference(variant: str, dtype: torch.dtype, wild: bool) -> None:
    (expected,) = by_the_reference(WHOLE, 2, dtype, wild)
    (found,) = train(variant, WHOLE, 2, dtype, wild)
    assert_same(found, expected)
    assert expected.exp_avg.any()
    assert expected.packed.any()


@pytest.mark.long_at_every_level
@pytest.mark.parametrize(
    ("fmt", "wild"),
    [
        pytest.param(fmt, wild, marks=() if fmt in ("fp8_current", "mxfp4") else pytest.mark.long_interpreted)
        for fmt, wild in (*((fmt, False) for fmt in FORMATS), ("fp8_block", True), ("mxfp8", True))
    ],
)
def test_bytes_and_amaxes_of_cuts(variant: str, fmt: str, wild: bool) -> None:
    """On every rank those of the reference, and over the ranks the amaxes of the whole weights."""
    cuts = CUTS_OF_MATRICES if get_format(fmt).block else CUTS
    (whole,) = by_the_reference(WHOLE, 1, wild=wild, fmt=fmt)
    expected = by_the_reference(cuts, 1, wild=wild, fmt=fmt)
    for found, of_reference in zip(train(variant, cuts, 1, wild=wild, fmt=fmt), expected, strict=True):
        assert_same(found, of_reference)
    assert torch.equal(torch.stack([shard.packed for shard in expected]).amax(0), whole.packed)


Rounds = Callable[[Tensor], Tensor]
# Of m; those of v are their squares.
BOUNDARY_SCALES = torch.tensor([2.0**-50, 1.7e-13, 0.7, 1.0, 3.3e5, 2.0**60])
NUDGES = range(-3, 3)


def boundary(code: Tensor, low: Tensor, high: Tensor, rounds: Rounds) -> Tensor:
    """The smallest numbers between `low` and `high` that `rounds` makes a larger code than `code`."""
    below, above = low.view(torch.int32), high.view(torch.int32)
    while (above - below).max() > 1:
        middle = below + (above - below) // 2
        is_above = rounds(middle.view(torch.float32)).int() > code
        below, above = torch.where(is_above, below, middle), torch.where(is_above, middle, above)
    return above.view(torch.float32)


@functools.cache
def next_to_boundaries(key: int, step: int) -> Tensor:
    """Gradients that are m and whose squares are v. The first one of a group is the scale of m. The others are up to
    three numbers away from boundaries of m, or their squares are that near to boundaries of v.
    """
    rows: list[Tensor] = []
    for scale, nudge in itertools.product(BOUNDARY_SCALES.split(1), NUDGES):
        for code in (torch.arange(127), torch.arange(1, 128), torch.arange(128, 255)):
            if code[0] == 0:
                low, high = (adam.dequantize_first(c, scale) for c in (code, code + 1))
                size = boundary(code, low, high, lambda m, scale=scale: adam.quantize_first(m[None], scale)[0])  # type: ignore[misc]
            else:
                element = 128 * len(rows) + torch.arange(1, 128)
                random, square = adam.random_numbers(key, step, element)[None], scale.square()
                low, high = (adam.dequantize_second(c, square) for c in (code, code + 1))
                rounds: Rounds = lambda v, r=random, s=square: adam.quantize_second(v[None], s, r)[0]  # noqa: E731
                size = boundary(code, low, high, rounds).sqrt()
            nudged = (size.view(torch.int32) + nudge).view(torch.float32)
            rows.append(torch.cat([scale, nudged.minimum(scale) * (1 - 2 * (code % 2))]))
    return torch.stack(rows)


def test_next_to_boundaries_of_codes(variant: str) -> None:
    """A backend may compute codes by formulas of its own, but not next to a boundary, where roundings decide."""
    key, step = 4, 2
    grad = next_to_boundaries(key, step)
    with mock.patch(f"{__name__}.KEYS", [key]):
        shards = [Shard([torch.zeros_like(grad)], [()], 0) for _ in range(2)]
    # No decay, and both moments forget, so that m is a gradient and v its square.
    rows = torch.tensor([[1, 0, 1, 0, 1, 1e-3, 1, 1e-8]]).float().expand(3, -1).contiguous()
    for name, shard in zip(("reference", variant), shards, strict=True):
        given = list(shard.arguments(grad.flatten(), step))
        given[8:11] = rows, torch.ones(1), torch.full((3,), step)
        devices.stage(name, "adam_8bit")(shard.fmt, *given)
    assert_same(shards[1], shards[0])
    assert shards[0].exp_avg.unique().numel() == 255
    assert shards[0].exp_avg_sq.unique().numel() == 255


def test_a_group_around_element_2_to_the_32(variant: str) -> None:
    """The upper half of its index, of which random numbers are made as well, changes within the group."""
    columns = 1000
    with mock.patch(f"{__name__}.KEYS", [4]):
        shards = [Shard([torch.zeros(1, columns)], [()], 0) for _ in range(2)]
    grad = weights(3, shapes=[(1, columns)])
    for name, shard in zip(("reference", variant), shards, strict=True):
        # In the table the weight is these elements alone: the reference keeps all of it in memory.
        shard.pieces[0, Piece.START] = 2**32 // columns * columns
        for step in (1, 2):
            shard.call(name, grad, step, finishes=False)
    assert_same(shards[1], shards[0])


@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_block", "nvfp4"])
@pytest.mark.parametrize("backend", devices.gpu_params())
def test_millions_of_elements(backend: str, fmt: str) -> None:
    """A GPU finds most codes by approximate instructions, which may err only where codes are looked up."""
    # Keys of ordinary scalars: others are stepped as they are defined.
    with mock.patch(f"{__name__}.KEYS", [4]):
        shards = [Shard([torch.zeros(2048, 4096)], [()], 0, fmt) for _ in range(2)]
    generator = torch.Generator().manual_seed(2)
    for step in range(1, 5):
        sizes = torch.randn(2048, 4096, generator=generator).mul_(step / 2).exp_()
        grad = torch.randn(2048, 4096, generator=generator).mul_(sizes)
        for name, shard in zip(("cpu", backend), shards, strict=True):
            shard.packed.zero_()
            shard.call(name, [grad], step, finishes=False)
        assert_same(shards[1], shards[0])


@pytest.mark.long_interpreted
@pytest.mark.long_at_every_level
def test_drawn_cuts_have_the_bits_of_the_whole(any_backend: str) -> None:
    """Draw cuts of one to five ranks, which may own nothing of a weight."""

    @strategies.examples(any_backend)
    @given(data=st.data(), ranks=st.integers(1, 5))
    def check(data: st.DataObject, ranks: int) -> None:
        numels = [torch.Size(shape).numel() for shape in SHAPES]
        drawn = [st.lists(st.integers(0, numel), min_size=ranks - 1, max_size=ranks - 1) for numel in numels]
        cuts = [sorted(data.draw(of_weight)) for of_weight in drawn]
        ends = torch.tensor([0, *numels]).cumsum(0).tolist()
        for shard in train(any_backend, cuts, 2):
            owned = [(index, span) for index, span in enumerate(shard.spans) if span.stop > span.start]
            masters = shard.master.split(shard.pieces[:, Piece.NUMEL].tolist())
            for (index, span), master, found in zip(owned, masters, shard.dequantized(), strict=True):
                assert torch.equal(words(master), words(whole.master[ends[index] :][span]))
                for mine, theirs in zip(found, expected[index], strict=True):
                    assert torch.equal(mine.view(torch.int32), theirs[span].view(torch.int32))

    (whole,) = by_the_reference(WHOLE, 2, torch.float32, False)
    expected = list(whole.dequantized())
    check()


def test_skip(any_backend: str) -> None:
    (shard,) = train(any_backend, WHOLE, 1)
    shard.packed.zero_()
    names = ("master", "exp_avg", "exp_avg_sq", "scales", "packed")
    before = [getattr(shard, name).clone() for name in names]
    shard.call(any_backend, weights(9), 2, False, torch.tensor([True]))
    assert all(torch.equal(getattr(shard, name), old) for name, old in zip(names, before, strict=True))
    shard.call(any_backend, weights(9), 2, False, torch.tensor([False]))
    assert not any(torch.equal(getattr(shard, name), old) for name, old in zip(names, before, strict=True))
