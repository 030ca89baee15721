"""A master that is NaN or Inf in a call of `quantize_master_weights`: the next call over the same tensors raises, on all ranks."""

import itertools

import pytest
import torch

from tests.sharded import Weight
from tests.transformer_engine.casting import Casting
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration, needs_te
from tests.workers import error_of, on_ranks

pytestmark = needs_te
SHAPE, HALF = (64, 96), 64 * 96 // 2
FORMATS = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
VALUES = (float("nan"), float("inf"), -float("inf"))


@on_ranks(2)
@pytest.mark.notices(
    "a master is NaN or Inf in a call of `quantize_master_weights`",
    where="TransformerEngine",
    answer="the next call over the same tensors raises on all ranks",
)
def test_the_next_call_raises() -> None:
    cases = tuple(Weight(fmt, SHAPE, ((0, HALF), (HALF, 2 * HALF))) for fmt in FORMATS)
    complaints = []
    with host_on_cpu():
        casting = Casting(cases)
        for (index, fmt), value in itertools.product(enumerate(FORMATS), VALUES):
            masters, starts = casting.masters()
            if casting.rank == 1:
                poisoned = masters[index]
                assert poisoned is not None
                poisoned[7] = value
            integration().quantize_master_weights(casting.tensors, masters, starts, None)
            said, then = error_of(casting.cast), error_of(casting.cast)
            if "the masters of 1 of 5 weights were NaN or Inf in the last cast: " not in said or then:
                complaints.append(f"{fmt} {value}: {said}; then {then}")
    assert complaints == []


def test_on_one_rank() -> None:
    """Of a master that is a matrix, given whole."""
    with host_on_cpu():
        casting = Casting((Weight("nvfp4", SHAPE, ((0, 2 * HALF),)),))
        (master,), starts = casting.masters()
        assert master is not None
        master[0] = torch.nan
        integration().quantize_master_weights(casting.tensors, [master.view(SHAPE)], starts, None)
        assert "NaN or Inf" in error_of(casting.cast)
