"""zerocast.verify over TransformerEngine's tensors: a wrong byte anywhere is found and named, and stale copies are."""

import pytest

from tests.sharded import Weight
from tests.transformer_engine import verifying
from tests.transformer_engine.host_on_cpu import needs_te
from tests.workers import Ranks

pytestmark = needs_te

SHAPE = (64, 96)
NUMEL = SHAPE[0] * SHAPE[1]
COPIED = ("fp8_delayed", "fp8_current", "fp8_block", "nvfp4")
TILES = "mxfp8:block=32x32"
FORMATS = (*COPIED, "mxfp8", "identity", TILES)


def cases(formats: tuple[str, ...] = FORMATS, cut: int = NUMEL // 3 + 1) -> tuple[Weight, ...]:
    """A weight of each format on two ranks, cut inside a block."""
    return tuple(Weight(fmt, SHAPE, ((0, cut), (cut, NUMEL))) for fmt in formats)


def test_every_byte_counts(ranks: Ranks) -> None:
    """A flipped bit in every buffer of rank 1, in the padding of rowwise scales too; both ranks say the same."""
    for quiet, found, planted in ranks(2)(verifying.every_buffer, cases()):
        assert quiet == []
        assert found == planted
        assert len(planted) == 4 + 4 + 4 + 5 + 4 + 1 + 3


@pytest.mark.notices(
    "bytes are older than the masters", where="TransformerEngine", answer="`zerocast.verify` names them"
)
def test_stale_bytes_are_found(ranks: Ranks) -> None:
    """Masters that are newer than the codes; copies that are older than the codes and that TransformerEngine would read."""
    codes = {f"{fmt} rowwise_data" for fmt in FORMATS}
    for written, untransposed, transposed, dropped, made in ranks(2)(verifying.stale, cases()):
        assert codes <= set(written)
        assert untransposed == sorted(f"{fmt} columnwise_data" for fmt in COPIED)
        assert transposed == dropped == made == []


def test_directions_of_hybrid_tensors(ranks: Ranks) -> None:
    """Codes in a transpose are verified by rows."""
    for right, stale in ranks(2)(verifying.directions, cases(("fp8_current", "fp8_delayed"))):
        assert "all equal the cast of the masters" in right
        assert "model weight 1 columnwise (fp8_delayed) on rank 1: rowwise_data differs in 1 of 6,144 bytes" in stale


def test_weights_that_are_not_known(ranks: Ranks) -> None:
    """Every rank hears of it."""
    for never, reordered, nothing, broken, released in ranks(2)(verifying.not_known, cases(("nvfp4", "fp8_block"))):
        for said in (never, reordered, released):
            assert said.startswith("ValueError: rank 0: no masters are known of these 2 weights")
        assert "of these 0 weights" in nothing
        assert broken.startswith("ValueError: rank 1: it has no _rowwise_scale_inv")


@pytest.mark.usefixtures("te")
def test_padding_of_copies_is_nobodys() -> None:
    """TransformerEngine leaves that of the copies that it makes as it was allocated."""
    run = verifying.Run(tuple(Weight(fmt, SHAPE, ((0, NUMEL),)) for fmt in ("fp8_block", "nvfp4")))
    block, nvfp4 = (tensor._columnwise_scale_inv for tensor in run.tensors)
    block[:, 1:], nvfp4[SHAPE[1] :] = 7.0, 7
    assert run.report().ok
    nvfp4[SHAPE[1] - 1, SHAPE[0] // 16 - 1] ^= 1
    assert [difference.buffer for difference in run.report().differences] == ["columnwise_scale_inv"]


@pytest.mark.usefixtures("te")
def test_a_copy_of_codes_that_serve_both_directions() -> None:
    """Where something has made one, it is read by columns: verify compares it, and the next call puts the codes in its place."""
    run = verifying.Run((Weight(TILES, SHAPE, ((0, NUMEL),)),))
    (weight,) = run.tensors
    weight._columnwise_data = weight._columnwise_data.clone()
    assert run.report().ok
    weight._columnwise_data.view(-1)[9] ^= 1
    (difference,) = run.report().differences
    assert str(difference).startswith(
        f"model weight 0 ({TILES}) on rank 0: columnwise_data differs in 1 of 6,144 bytes"
    )
    run.step()
    assert run.report().ok and weight._columnwise_data is weight._rowwise_data
