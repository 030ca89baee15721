"""After every step the live bytes on every rank are the unsharded cast of the gathered masters: all formats and options."""

import pytest
import torch

from tests.apex import training
from tests.apex.host_on_cpu import needs_apex
from tests.apex.training import EVERY_FORMAT, Case
from tests.workers import Ranks

pytestmark = needs_apex
SLOW = [pytest.mark.slow]
CASES = {
    "mixed": Case(),
    "every format": Case(EVERY_FORMAT, 3),
    "clip": Case(max_norm=0.1),
    "accumulation": Case(no_sync=True),
    "bf16 gradients": Case(options={"grad_sync_dtype": torch.bfloat16}),
    "flat gradients": Case(options={"contiguous_grad_buffer": True}),
    "one bucket": Case(options={"bucket_cap_mb": 1}, steps=3),
    "bf16 parameters sent": Case(options={"param_sync_dtype": torch.bfloat16}),
    "no overlap": Case(options={"overlap_grad_sync": False}),
}
RUNS = [pytest.param(CASES[name], world, id=f"{name}-{world}") for name, world in (("mixed", 2), ("every format", 3))]
OTHERS = [
    pytest.param(case, world, id=f"{name}-{world}", marks=SLOW)
    for name, case in CASES.items()
    for world in (1, 2, 3)
    if (name, world) not in (("mixed", 2), ("every format", 3))
]


@pytest.mark.shows(host="Apex", parallel="data", formats=lambda case: [spec.fmt for spec in case.specs])
@pytest.mark.parametrize(("case", "world"), [*RUNS, *OTHERS])
def test_live_bytes_are_the_unsharded_cast(host_ranks: Ranks, case: Case, world: int) -> None:
    assert host_ranks(world)(training.train, case) == [[]] * world


@pytest.mark.shows(
    host="Apex",
    parallel=lambda world: "replicas" if world == 2 else "data, replicas",
    formats=[spec.fmt for spec in training.MIXED],
)
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_replicated_masters(host_ranks: Ranks, world: int) -> None:
    """Two ranks, or two pairs, hold the same masters."""
    assert host_ranks(world)(training.train, Case(replicas=2)) == [[]] * world


@pytest.mark.parametrize("named", [True, False])
def test_everyone_starts_from_rank_0(host_ranks: Ranks, named: bool) -> None:
    """Rank 0's values win, scales of delayed scaling included. Parameters without names are called by their places."""
    names = ["0.weight", "0.bias", "1.weight", "1.bias"] if named else ["0.0", "0.1", "0.2", "0.3"]
    assert host_ranks(2)(training.started_apart, named) == [(names, [True] * 3, [])] * 2


@pytest.mark.parametrize("world", [2])
def test_one_all_reduce_for_all_weights(host_ranks: Ranks, world: int) -> None:
    """The bytes of the formats travel in place of Apex's: one all-gather a bucket, with the bytes of its codes."""
    for reduced, gathered, expected in host_ranks(world)(training.traffic):
        assert reduced == 1
        assert gathered == expected


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_state_without_delayed_scaling(host_ranks: Ranks, world: int) -> None:
    assert host_ranks(world)(training.without_delayed) == [[]] * world
