"""Delayed scaling: scales, histories and bytes are those of an unsharded plan."""

import pytest

from tests.megatron import delayed_scaling
from tests.megatron.host_on_cpu import needs_megatron
from tests.workers import Ranks

pytestmark = needs_megatron


@pytest.mark.shows(host="Megatron-Core", parallel="data", formats=["fp8_delayed", "fp8_current"], ranks=2)
def test_the_past_scales_as_without_shards(ranks: Ranks) -> None:
    assert ranks(2)(delayed_scaling.steps, 5) == [[[]] * 5] * 2
