"""Delayed scaling: scales, histories and bytes are those of an unsharded plan."""

import pytest
import torch

from tests import casts
from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.ranks_host import host
from tests.megatron.training import Case, Run, build_attached
from tests.workers import Ranks
from zerocast import CastPlan, QuantizedWeight
from zerocast.distributed.group import ONE_PROCESS

CASE = Case("delayed", overlap=True, experts=True)


class Unsharded:
    """Twins of a run's weights, cast whole on every rank."""

    def __init__(self, run: Run) -> None:
        self.weights = {name: weight.copied(torch.clone) for name, weight in run.weights.items()}
        self.masters = {
            name: torch.empty(weight.numel(), device=weight.device) for name, weight in self.weights.items()
        }
        self._plan = CastPlan(
            list(self.weights.values()), list(self.masters.values()), [0] * len(self.weights), ONE_PROCESS
        )

    def cast(self, run: Run) -> None:
        """After a step of the run."""
        for name, whole in run.masters().items():
            if name in self.masters:
                self.masters[name].copy_(whole.view(-1))
        self._plan.cast()
        self._plan.post_all_gather()

    def differs(self, run: Run) -> list[str]:
        """Every buffer that is not the twin's, scales and histories too."""
        return [
            f"{name}.{buffer}" for name, twin in self.weights.items() for buffer in _differing(twin, run.weights[name])
        ]


def _differing(twin: QuantizedWeight, weight: QuantizedWeight) -> list[str]:
    expected, found = casts.bytes_of(twin), casts.bytes_of(weight)
    return [name for name in expected if not (expected[name] == found[name]).all()]


def steps(number: int) -> list[list[str]]:
    """What differs after each step, and after casting again."""
    with host():
        (run, _), found = build_attached(CASE), []
        twins = Unsharded(run)
        for step in range(number):
            run.step(step)
            run.force_sync()
            twins.cast(run)
            found.append(twins.differs(run))
        return found


pytestmark = needs_megatron


@pytest.mark.shows(host="Megatron-Core", parallel="data", formats=["fp8_delayed", "fp8_current"], ranks=2)
def test_the_past_scales_as_without_shards(ranks: Ranks) -> None:
    assert ranks(2)(steps, 5) == [[[]] * 5] * 2
