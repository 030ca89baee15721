"""Stage adam_8bit_cast: on every backend the bytes of the reference's adam_8bit, weight by weight, and then partial_cast."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import devices, strategies
from tests.backends.test_adam_amax import BF16
from tests.backends.test_adam_cast import ONE_PASS, OnePass, assert_same_codes, cases, large
from tests.backends.test_adam_update import scalars
from tests.sharded import Weight
from tests.tables import Bench
from zerocast.backends import load, ops, reference
from zerocast.backends.descriptor import Column, Piece
from zerocast.formats.layout import moment_groups

STATE = ("masters", "grads", "exp_avgs", "exp_avg_sqs", "moment_scales")
STEPS = [4, 9, 4]


@dataclass(frozen=True)
class EightBit(OnePass):
    """The same with codes and scales of moments that begin as random bytes and numbers."""

    def inputs(self) -> dict[str, Any]:
        given = super().inputs()
        rng = np.random.default_rng(self.seed + 1)
        # A row that owns nothing has no piece.
        owned = self.bench.table[:, Column.NUMEL] > 0
        table, groups = self.bench.table[owned], given.pop("groups")[owned]
        pieces, counts = [], [0] * len(given["masters"])
        for line, group in zip(table.tolist(), groups.tolist(), strict=True):
            base, start, numel = line[Column.MASTER_BASE], line[Column.START], line[Column.NUMEL]
            row = [0] * len(Piece)
            row[Piece.BASE], row[Piece.OFFSET], row[Piece.NUMEL] = base, line[Column.MASTER_OFFSET], numel
            row[Piece.SCALARS], row[Piece.START], row[Piece.COLUMNS] = group, start, line[Column.COLUMNS]
            row[Piece.SCALE], row[Piece.KEY] = counts[base], int(rng.integers(2**32))
            row[Piece.CUT_FIRST] = row[Piece.CUT_LAST] = -1
            counts[base] += moment_groups(start, numel, line[Column.COLUMNS])
            pieces.append(row)
        for row in pieces:
            row[Piece.SECOND_SCALE] = row[Piece.SCALE] + counts[row[Piece.BASE]]
        sizes = [master.numel() for master in given["masters"]]
        given["exp_avgs"] = [torch.from_numpy(rng.integers(-127, 128, n).astype(np.int8)) for n in sizes]
        given["exp_avg_sqs"] = [torch.from_numpy(rng.integers(0, 256, n).astype(np.uint8)) for n in sizes]
        given["moment_scales"] = [torch.from_numpy(rng.random((2, n), np.float32)) for n in counts]
        return given | {"table": table, "pieces": torch.tensor(pieces, dtype=torch.int64).view(-1, len(Piece))}

    def arguments(self, given: dict[str, Any], skip: Tensor | None) -> tuple[Any, ...]:
        """What the stage is given after the format."""
        rows, clip, steps = torch.from_numpy(scalars()), torch.tensor([self.clip]), torch.tensor(STEPS)
        state = self.bench.nominal, *(given[name] for name in STATE), given["table"], given["pieces"]
        return *state, rows, clip, steps, given["packed"], given["row_data"], skip

    def run(self, backend: str, skip: Tensor | None = None) -> dict[str, Any]:
        given = self.inputs()
        devices.stage(backend, "adam_8bit_cast")(self.bench.fmt, *self.arguments(given, skip))
        return given

    def composed(self) -> dict[str, Any]:
        given = self.inputs()
        fmt, nominal, no_cuts = self.bench.fmt, self.bench.nominal, torch.zeros(2, 0)
        for row in range(len(given["table"])):
            # The tensors of one base alone.
            alone, piece_alone = given["table"][row : row + 1].clone(), given["pieces"][row : row + 1].clone()
            base = int(piece_alone[0, Piece.BASE])
            alone[0, Column.MASTER_BASE] = piece_alone[0, Piece.BASE] = 0
            state = [[given[name][base]] for name in STATE]
            rows, clip, steps = torch.from_numpy(scalars()), torch.tensor([self.clip]), torch.tensor(STEPS)
            of_step = rows, clip, steps, given["packed"]
            devices.stage("reference", "adam_8bit")(
                fmt, nominal, *state, alone, piece_alone, *of_step, no_cuts, False, None
            )
        masters, packed, table = given["masters"], given["packed"], given["table"]
        reference.partial_cast(fmt, nominal, masters, packed, [], [], table, given["row_data"], [], None)
        return given


def assert_same_state(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    for name in ("exp_avgs", "exp_avg_sqs", "moment_scales"):
        assert all(map(torch.equal, found[name], expected[name])), f"{what}: {name}"
    moments = {"exp_avgs": [], "exp_avg_sqs": []}
    assert_same_codes(found | moments, expected | moments, what)


def of_case(case: OnePass) -> EightBit:
    return EightBit(case.bench, case.seed, case.grad, clip=case.clip)


@pytest.mark.long_at_every_level
def test_update_amax_and_codes(any_backend: str) -> None:
    """Guards between the weights are compared too: only what is owned changes."""

    @strategies.examples(any_backend)
    @given(case=cases().map(of_case), threads=st.integers(1, 3))
    def check(case: EightBit, threads: int) -> None:
        with devices.threads(threads):
            assert_same_state(case.run(any_backend, torch.tensor([False])), case.composed(), str(case.bench.weights))

    check()


@pytest.mark.long_interpreted
@pytest.mark.long_at_every_level
@pytest.mark.parametrize(
    "fmt", ["fp8_block", *(pytest.param(fmt, marks=pytest.mark.slow) for fmt in ("mxfp8:block=32x32", "mxfp4"))]
)
def test_large_weights(variant: str, fmt: str, seed: int) -> None:
    case = EightBit(Bench(large(fmt, variant, seed), seed), seed, BF16, clip=0.3)
    assert_same_state(case.run(variant), case.composed(), fmt)


def test_skip_writes_nothing(any_backend: str) -> None:
    case = EightBit(Bench((Weight("fp8_block", (256, 128), ((0, 256 * 128),)),), 1), 1)
    assert_same_state(case.run(any_backend, torch.tensor([True])), case.inputs(), "skipped")


@pytest.mark.parametrize("span", [(1, 128 * 96), (0, 128 * 96 - 1)])
def test_a_span_that_cuts_a_block_is_refused(any_backend: str, span: tuple[int, int]) -> None:
    case = EightBit(Bench((Weight("mxfp4", (160, 96), (span,)),), 1), 1)
    with pytest.raises(ValueError, match=f"row 0: elements {span[0]} to {span[1]} of 160x96 cut a block"):
        case.run(any_backend)


def test_a_format_whose_scales_are_not_local_is_refused(any_backend: str) -> None:
    case = EightBit(Bench((Weight("mxfp8", (32, 64), ((0, 2048),)),), 1), 1)
    with pytest.raises(ValueError, match="depend on more than their own blocks"):
        case.run(any_backend)


@pytest.mark.parametrize("checked", ["the op", "the extension"])
@pytest.mark.parametrize(
    ("column", "value"), [(Piece.BASE, 2), (Piece.SECOND_SCALE, 2**40), (Piece.CUT_FIRST, 0), (Piece.CUT_LAST, 0)]
)
def test_a_piece_that_points_elsewhere_is_refused(column: Piece, value: int, checked: str) -> None:
    case = EightBit(Bench((Weight("fp8_block", (256, 128), ((0, 256 * 128),)),), 1), 1)
    given = case.inputs()
    given["pieces"][0, column] = value
    fmt, arguments = case.bench.fmt, case.arguments(given, None)
    with pytest.raises(ValueError, match="piece 0"):
        ops.adam_8bit_cast.op("cpu", str(fmt), *arguments) if checked == "the op" else load("cpu").adam_8bit_cast(
            fmt, *arguments
        )


def test_every_format_that_casts_in_one_pass_is_drawn() -> None:
    assert {"fp8_block", "mxfp8:block=32x32", "mxfp4"} <= {*ONE_PASS}
