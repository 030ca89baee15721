"""A Meter takes an attachment: counts of the weights of all its optimizers, times, bytes; and the run is what it was."""

import pytest

from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.ranks_host import host
from tests.megatron.training import MIXED, Case, build
from tests.workers import Ranks
from zerocast.integrations import megatron as integration
from zerocast.metrics import Meter, Sample


def steps(overlap: bool, every: int | None) -> tuple[list[float], list[Sample | None], dict[str, float]]:
    """Losses and samples of four steps, and the largest magnitudes of the quantized weights' masters in the end."""
    with host():
        with integration.quantized_params():
            run = build(Case(MIXED, overlap, experts=True))
        attached = integration.attach(run.optimizer, run.ddp)
        meter, losses, samples = None if every is None else Meter(attached, every), [], []
        for number in range(4):
            if meter is None:
                losses.append(run.step(number))
                continue
            with meter.step() as measured:
                with measured.phase("forward and backward"):
                    losses.append(run.forward_and_backward(number))
                with measured.phase("step"):
                    run.optimizer.step()
            samples.append(measured.sample)
        masters = run.masters()
        return losses, samples, {f"module.{name}": float(masters[name].abs().max()) for name in run.weights}


pytestmark = needs_megatron


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True], ids=["sync", "overlap"])
def test_every_so_many_steps_are_measured(ranks: Ranks, overlap: bool) -> None:
    plain = [losses for losses, _, _ in ranks(2)(steps, overlap, None)]
    for (losses, samples, amaxes), expected in zip(ranks(2)(steps, overlap, 2), plain, strict=True):
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
