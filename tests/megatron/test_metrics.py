"""A Meter takes an attachment: counts of the weights of all its optimizers, times, bytes; and the run is what it was."""

import pytest

from tests.megatron import metered_steps
from tests.megatron.host_on_cpu import needs_megatron
from tests.workers import Ranks

pytestmark = needs_megatron


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True], ids=["sync", "overlap"])
def test_every_so_many_steps_are_measured(ranks: Ranks, overlap: bool) -> None:
    plain = [losses for losses, _, _ in ranks(2)(metered_steps.steps, overlap, None)]
    for (losses, samples, amaxes), expected in zip(ranks(2)(metered_steps.steps, overlap, 2), plain, strict=True):
        assert losses == expected, "to measure changes nothing"
        assert [sample is not None for sample in samples] == [False, True, False, True]
        last = samples[-1]
        assert last is not None and last.weights.keys() == amaxes.keys() and len(amaxes) == 4
        assert {name: counts.amax for name, counts in last.weights.items()} == amaxes
        for counts in last.weights.values():
            assert 0 < counts.unchanged < counts.elements
            assert 0 < counts.cast_error < 0.2
        stages = {"step/all_reduce", "step/amax", "step/scales_and_cast"}
        where = "forward and backward" if overlap else "step"
        assert last.milliseconds.keys() >= stages | {f"{where}/all_gather", f"{where}/columnwise"}
        assert last.nbytes["weight_gather"] >= sum(counts.elements for counts in last.weights.values()) // 2
