"""Delayed scaling: scales, histories and bytes are those of an unsharded plan."""

import pytest
import torch

from tests import casts
from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.ranks_host import host
from tests.megatron.training import Case, build_attached
from tests.workers import Ranks
from zerocast import CastPlan
from zerocast.distributed.group import ONE_PROCESS

CASE = Case("delayed", overlap=True, experts=True)


def train(steps: int) -> None:
    """After each step every buffer is that of a twin that is cast whole on each rank, scales and histories too."""
    with host():
        run, _ = build_attached(CASE)
        twins = {name: weight.copied(torch.clone) for name, weight in run.weights.items()}
        masters = {name: torch.empty(twin.numel(), device=twin.device) for name, twin in twins.items()}
        plan = CastPlan(list(twins.values()), list(masters.values()), [0] * len(twins), ONE_PROCESS)
        for step in range(steps):
            run.step(step)
            run.force_sync()
            whole = run.masters()
            for name, master in masters.items():
                master.copy_(whole[name].view(-1))
            plan.cast()
            plan.post_all_gather()
            for name, twin in twins.items():
                casts.assert_same_bytes(casts.bytes_of(run.weights[name]), casts.bytes_of(twin), name)


pytestmark = needs_megatron


@pytest.mark.shows(host="Megatron-Core", parallel="data", formats=["fp8_delayed", "fp8_current"], ranks=2)
def test_the_past_scales_as_without_shards(ranks: Ranks) -> None:
    ranks(2)(train, 5)
