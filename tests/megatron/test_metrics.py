"""A Meter takes an attachment: counts of the weights of all its optimizers, times, bytes; and the run is what it was."""

import pytest

from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.training import MIXED, Case, build_attached
from tests.workers import on_ranks
from zerocast.metrics import Meter

pytestmark = needs_megatron


@on_ranks(2)
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True], ids=["sync", "overlap"])
def test_every_so_many_steps_are_measured(overlap: bool) -> None:
    case = Case(MIXED, overlap, experts=True)
    where = "forward and backward" if overlap else "step"
    phases = {"step/all_reduce", "step/amax", "step/scales_and_cast", f"{where}/all_gather", f"{where}/columnwise"}
    with case.host():
        plain, _ = build_attached(case)
        run, attached = build_attached(case)
        meter = Meter(attached, 2)
        for number in range(4):
            with meter.step() as measured:
                with measured.phase("forward and backward"):
                    loss = run.forward_and_backward(number)
                with measured.phase("step"):
                    run.optimizer.step()
            assert loss == plain.step(number), "to measure changes nothing"
            assert (measured.sample is not None) == (number % 2 == 1)
        last, masters = measured.sample, run.masters()
    assert last is not None
    amaxes = {f"module.{name}": float(masters[name].abs().max()) for name in run.weights}
    assert {name: counts.amax for name, counts in last.weights.items()} == amaxes and len(amaxes) == 4
    for counts in last.weights.values():
        assert 0 < counts.unchanged < counts.elements
        assert 0 < counts.cast_error < 0.2
    assert last.milliseconds.keys() >= phases
    assert last.nbytes["weight_gather"] >= sum(counts.elements for counts in last.weights.values()) // 2
