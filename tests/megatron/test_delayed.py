"""Delayed scaling: scales, histories and bytes are those of an unsharded plan, through steps and checkpoints."""

from pathlib import Path

import pytest

from tests.megatron import delaying
from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.test_checkpoints import KINDS
from tests.workers import Ranks

pytestmark = needs_megatron


@pytest.mark.shows(host="Megatron-Core", parallel="data", formats=["fp8_delayed", "fp8_current"], ranks=2)
def test_the_past_scales_as_without_shards(ranks: Ranks) -> None:
    assert ranks(2)(delaying.steps, 5) == [[[]] * 5] * 2


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.slow)])
def test_checkpoints_hold_scales_and_histories(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    assert ranks(2)(delaying.resumed, str(tmp_path), kind) == [([], [])] * 2


def test_without_them_scales_begin_anew(ranks: Ranks) -> None:
    assert ranks(2)(delaying.lost) == [([], {})] * 2
