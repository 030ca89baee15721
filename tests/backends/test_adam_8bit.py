"""Stage adam_8bit: on every backend the bytes of the reference, and of one step on the whole weight for any cuts."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from tests import devices
from tests.backends.test_adam_step import scalars
from tests.matrices import bit_patterns
from zerocast.backends import load
from zerocast.backends.descriptor import Piece
from zerocast.backends.reference import moments
from zerocast.formats.layout import moment_group, moment_groups

# rows and columns: more whole groups than a thread block takes, short last groups, rows shorter than a group, a vector
SHAPES = ((9, 1024), (5, 256), (7, 200), (40, 3), (1, 1000), (3, 129))
KEYS = [7 + index + 2**31 * (index % 2) for index in range(len(SHAPES))]


def piece_of(shape: Sequence[int], key: int, start: int, stop: int, offset: int, scale: int, cut: Tensor) -> list[int]:
    """The row of elements [start, stop) of a weight. `cut` has the places of its groups, or -1."""
    row = [0] * len(Piece)
    row[Piece.OFFSET], row[Piece.NUMEL], row[Piece.SCALARS] = offset, stop - start, key % 3
    row[Piece.START], row[Piece.COLUMNS], row[Piece.SCALE], row[Piece.KEY] = start, shape[1], scale, key
    row[Piece.CUT_FIRST] = int(cut[moment_group(start, shape[1])])
    row[Piece.CUT_LAST] = int(cut[moment_group(stop - 1, shape[1])])
    return row


def is_inside(element: int, shape: Sequence[int]) -> bool:
    """Whether a cut before this element divides a group."""
    numel, columns = torch.Size(shape).numel(), shape[1]
    return 0 < element < numel and moment_group(element - 1, columns) == moment_group(element, columns)


class Shard:
    """What one rank has of all weights: the elements between two of the `cuts` of each."""

    def __init__(self, whole: list[Tensor], cuts: Sequence[Sequence[int]], rank: int) -> None:
        pieces: list[list[int]] = []
        spans: list[slice] = []
        offset = scale = places = 0
        for shape, key, own in zip(SHAPES, KEYS, cuts, strict=True):
            numel, columns = torch.Size(shape).numel(), shape[1]
            bounds = [0, *own, numel]
            cut = torch.full((moment_groups(0, numel, columns),), -1)
            for group in sorted({moment_group(c, columns) for c in own if is_inside(c, shape)}):
                cut[group] = places
                places += 1
            start, stop = bounds[rank], bounds[rank + 1]
            spans.append(slice(start, stop))
            if stop > start:
                pieces.append(piece_of(shape, key, start, stop, offset, scale, cut))
                offset, scale = offset + stop - start, scale + moment_groups(start, stop - start, columns)
        self.spans, self.pieces = spans, torch.tensor(pieces, dtype=torch.int64).view(-1, len(Piece))
        self.master = torch.cat([weight.flatten()[span] for weight, span in zip(whole, spans, strict=True)])
        self.exp_avg = torch.zeros(offset, dtype=torch.int8)
        self.exp_avg_sq = torch.zeros(offset, dtype=torch.uint8)
        self.scales, self.cut_largest = torch.zeros(2, scale), torch.zeros(2, places)

    def grad(self, whole: list[Tensor]) -> Tensor:
        return torch.cat([weight.flatten()[span] for weight, span in zip(whole, self.spans, strict=True)])

    def call(self, backend: str, grads: list[Tensor], step: int, finishes: bool, skip: Tensor | None = None) -> None:
        state = self.master, self.grad(grads), self.exp_avg, self.exp_avg_sq, self.scales, self.pieces
        rows, clip, number = torch.from_numpy(scalars(step)), torch.tensor([0.7]), torch.tensor([step])
        stage = devices.stage(backend, "adam_8bit")
        stage(*state, rows, clip, number, self.cut_largest, finishes, skip)

    def dequantized(self) -> Iterator[tuple[Tensor, Tensor]]:
        for piece in self.pieces.tolist():
            yield moments.dequantize_moments(self.exp_avg, self.exp_avg_sq, self.scales, piece)


def weights(seed: int, wild: bool = False) -> list[Tensor]:
    if wild:
        return [
            torch.from_numpy(bit_patterns(rows * columns, seed + rows)).view(rows, columns) for rows, columns in SHAPES
        ]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp() for shape in SHAPES]


def train(
    backend: str, cuts: Sequence[Sequence[int]], steps: int, dtype: torch.dtype = torch.float32, wild: bool = False
) -> list[Shard]:
    ranks = 1 + len(cuts[0])
    shards = [Shard(weights(0), cuts, rank) for rank in range(ranks)]
    for step in range(1, steps + 1):
        grads = [gradient.to(dtype) for gradient in weights(step, wild)]
        grads[0][0] = 0  # groups of zeros
        for shard in shards:
            shard.cut_largest.zero_()
            shard.call(backend, grads, step, finishes=False)
        largest = torch.stack([shard.cut_largest for shard in shards]).amax(0)
        for shard in shards:
            shard.cut_largest.copy_(largest)
            shard.call(backend, grads, step, finishes=True)
    return shards


def words(x: Tensor) -> Tensor:
    """Bit patterns, with all NaN alike."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


WHOLE: Sequence[Sequence[int]] = [()] * len(SHAPES)
CUTS = {
    "at groups": [(1024, 5120), (256, 640), (200, 400), (3, 60), (128, 256), (129, 129)],
    "anywhere": [(1000, 9000), (100, 1000), (1, 1399), (1, 2), (300, 310), (130, 386)],
    "one rank has little": [(0, 9215), (0, 1), (777, 777), (119, 120), (0, 999), (0, 387)],
}


@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_the_reference(variant: str, dtype: torch.dtype, wild: bool) -> None:
    (expected,) = train("reference", WHOLE, 3, dtype, wild)
    (found,) = train(variant, WHOLE, 3, dtype, wild)
    assert torch.equal(words(found.master), words(expected.master))
    for name in ("exp_avg", "exp_avg_sq", "scales"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert expected.exp_avg.any()


@pytest.mark.parametrize("backend", devices.gpu_params())
def test_millions_of_elements(backend: str) -> None:
    """A GPU finds most codes by approximate instructions, which may err only where codes are looked up."""
    shape, numel = (2048, 4096), 2048 * 4096
    groups = numel // 128
    # The scalars of this key are ordinary ones: others are stepped as they are defined.
    piece = torch.tensor([piece_of(shape, 4, 0, numel, 0, 0, torch.full((groups,), -1))])
    generator, states = torch.Generator().manual_seed(2), {}
    for name in ("cpu", backend):
        codes = torch.zeros(numel, dtype=torch.int8), torch.zeros(numel, dtype=torch.uint8)
        states[name] = torch.zeros(numel), *codes, torch.zeros(2, groups)
    for step in range(1, 5):
        sizes = torch.randn(numel, generator=generator).mul_(step / 2).exp_()
        grad = torch.randn(numel, generator=generator).mul_(sizes)
        rest = torch.from_numpy(scalars(step)), torch.ones(1), torch.tensor([step]), torch.zeros(2, 0), False, None
        for name, (master, *kept) in states.items():
            devices.stage(name, "adam_8bit")(master, grad, *kept, piece, *rest)
        for expected, found in zip(states["cpu"], states[backend], strict=True):
            assert torch.equal(found, expected)


@pytest.mark.long_at_every_level
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_any_cuts_have_the_bits_of_the_whole(any_backend: str, cuts: Sequence[Sequence[int]]) -> None:
    (whole,) = train("reference", WHOLE, 2)
    expected = list(whole.dequantized())
    ends = torch.tensor([0, *(torch.Size(shape).numel() for shape in SHAPES)]).cumsum(0).tolist()
    for shard in train(any_backend, cuts, 2):
        found = iter(shard.dequantized())
        masters = shard.master.split(shard.pieces[:, Piece.NUMEL].tolist())
        owned = [(index, span) for index, span in enumerate(shard.spans) if span.stop > span.start]
        for (index, span), master in zip(owned, masters, strict=True):
            assert torch.equal(words(master), words(whole.master[ends[index] :][span]))
            for mine, theirs in zip(next(found), expected[index], strict=True):
                assert torch.equal(mine.view(torch.int32), theirs[span].view(torch.int32))


def test_skip(any_backend: str) -> None:
    (shard,) = train(any_backend, WHOLE, 2)
    names = ("master", "exp_avg", "exp_avg_sq", "scales")
    before = [getattr(shard, name).clone() for name in names]
    shard.call(any_backend, weights(9), 3, False, torch.tensor([True]))
    assert all(torch.equal(getattr(shard, name), old) for name, old in zip(names, before, strict=True))
    shard.call(any_backend, weights(9), 3, False, torch.tensor([False]))
    assert not any(torch.equal(getattr(shard, name), old) for name, old in zip(names, before, strict=True))


@pytest.mark.parametrize("checked", ["the op", "the extension"])
def test_a_gradient_of_fp16_is_refused(checked: str) -> None:
    shard = Shard(weights(0), WHOLE, 0)
    grad = shard.grad(weights(1)).half()
    state = shard.master, grad, shard.exp_avg, shard.exp_avg_sq, shard.scales, shard.pieces
    rest = torch.from_numpy(scalars()), torch.ones(1), torch.ones(1, dtype=torch.int64), shard.cut_largest, False, None
    stage = load("cpu").adam_8bit if checked == "the extension" else torch.ops.zerocast.adam_8bit
    head = () if checked == "the extension" else ("cpu",)
    with pytest.raises((TypeError, ValueError), match=r"grad is .*float16"):
        stage(*head, *state, *rest)


@pytest.mark.parametrize("checked", ["the op", "the extension"])
@pytest.mark.parametrize(
    ("column", "value"),
    [
        (Piece.OFFSET, 2**40),
        (Piece.OFFSET, -1),
        (Piece.NUMEL, 2**62),
        (Piece.NUMEL, 0),
        (Piece.SCALARS, 3),
        (Piece.SCALE, 100),
        (Piece.SCALE, -1),
        (Piece.CUT_FIRST, 0),
        (Piece.CUT_LAST, 5),
        (Piece.COLUMNS, 0),
        (Piece.START, -1),
    ],
)
def test_a_piece_that_points_elsewhere_is_refused(column: Piece, value: int, checked: str) -> None:
    shard = Shard(weights(0), WHOLE, 0)
    shard.pieces[0, column] = value
    rows, clip, step = torch.from_numpy(scalars()), torch.ones(1), torch.ones(1, dtype=torch.int64)
    state = shard.master, shard.grad(weights(1)), shard.exp_avg, shard.exp_avg_sq, shard.scales, shard.pieces
    stage = load("cpu").adam_8bit if checked == "the extension" else torch.ops.zerocast.adam_8bit
    head = () if checked == "the extension" else ("cpu",)
    with pytest.raises(ValueError, match="piece 0"):
        stage(*head, *state, rows, clip, step, shard.cut_largest, False, None)
