"""Experts that are stored one after another, since a block would span two: readers of their bytes find each of them."""

import pytest
import torch
from torch import Tensor, nn

import zerocast
from tests import casts
from tests.casts import lcg_matrix
from zerocast import QuantizedWeight, ZeroAdamW
from zerocast.formats.layout import Span
from zerocast.metrics import owned_part
from zerocast.serve.stored_tensor import Piece, of_weight
from zerocast.verification.master_views import MasterView

EXPERTS, M, K = 3, 96, 64
FORMATS = ("fp8_block", "mxfp4")
BF16 = torch.bfloat16


def master() -> Tensor:
    return torch.from_numpy(lcg_matrix(EXPERTS * M, K, 0)).view(EXPERTS, M, K)


def cast(fmt: str, value: Tensor) -> QuantizedWeight:
    weight = casts.cast_whole(fmt, value, BF16)
    zerocast.post_all_gather_processing([weight])
    return weight


@pytest.mark.parametrize(
    ("fmt", "naming"), [("fp8_block", "deepseek"), ("mxfp4", "compressed-tensors"), ("mxfp4", "bf16")]
)
def test_an_expert_is_exported_as_a_weight_of_its_own(fmt: str, naming: str) -> None:
    pieces = [Piece(f"{number}", (range(number * M, (number + 1) * M),), (M, K)) for number in range(EXPERTS)]
    stored = list(of_weight(cast(fmt, master()), naming, "w", pieces))
    alone = [
        tensor
        for piece, value in zip(pieces, master(), strict=True)
        for tensor in of_weight(cast(fmt, value), naming, "w", [Piece(piece.name, (range(M),), (M, K))])
    ]
    assert [tensor.name for tensor in stored] == [tensor.name for tensor in alone]
    for found, expected in zip(stored, alone, strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        casts.assert_same_bytes({"": casts.raw(found.make())}, {"": casts.raw(expected.make())}, found.name)


def test_a_part_of_an_expert_is_refused() -> None:
    part = Piece("half", (range(M, M + M // 2),), (M // 2, K))
    with pytest.raises(ValueError, match="blocks are 128 rows high: a piece begins and ends with a block"):
        list(of_weight(cast("fp8_block", master()), "deepseek", "w", [part]))


@pytest.mark.parametrize("fmt", FORMATS)
def test_measured_values_are_those_of_products(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_part, "PIECE", 1000)
    weight, span = cast(fmt, master()), Span(1001, 2 * M * K + 333)
    owned = owned_part.OwnedPart(MasterView("w", weight, master().view(-1)[span.start : span.stop], span))
    pieces = list(owned.pieces())
    assert (pieces[0].start, pieces[-1].stop) == (span.start, span.stop)
    found = torch.cat([owned.values(piece) for piece in pieces])
    expected = weight.read(columnwise=False, dtype=torch.float32).view(-1)[span.start : span.stop]
    assert torch.equal(found, expected)


def test_a_switch_changes_how_experts_are_stored() -> None:
    model = nn.Module()
    model.up = nn.Parameter(master())
    zerocast.quantize_(model, {"up": "nvfp4"}, dtype=BF16)
    optimizer = ZeroAdamW(model.named_parameters(), lr=1e-2)
    for fmt in ("fp8_block", "nvfp4", "mxfp4"):
        zerocast.switch(optimizer, {"up": fmt})
        assert str(model.up.format) == fmt
        casts.assert_same_bytes(casts.bytes_of(model.up), casts.unsharded(fmt, master(), BF16))
        torch.bmm(torch.ones(EXPERTS, 4, M, dtype=BF16), model.up).sum().backward()
        assert zerocast.verify(optimizer).ok
        optimizer.zero_grad()
