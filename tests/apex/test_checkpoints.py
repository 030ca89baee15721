"""A run that was saved and loaded goes on as if it had never been interrupted."""

from pathlib import Path

import pytest
import torch

from tests.apex import checkpoints
from tests.apex.host_on_cpu import needs_apex
from tests.apex.training import EVERY_FORMAT, Case
from tests.selection import worlds
from tests.workers import Ranks

pytestmark = needs_apex


@pytest.mark.parametrize("world", worlds(2, slow=[1, 3]))
def test_resuming_is_exact(host_ranks: Ranks, world: int, tmp_path: Path) -> None:
    found = host_ranks(world)(checkpoints.resume, str(tmp_path / "state.pt"), Case())
    assert found == [{"loaded": [], "later": [], "wrong": []}] * world


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [(2, 3), (3, 1), (1, 2)], ids=str)
def test_other_numbers_of_ranks(host_ranks: Ranks, worlds: tuple[int, int], tmp_path: Path) -> None:
    path, case = str(tmp_path / "state.pt"), Case(EVERY_FORMAT, 3)
    saved = host_ranks(worlds[0])(checkpoints.first_half, path, case)[0]
    for loaded, wrong in host_ranks(worlds[1])(checkpoints.second_half, path, case):
        assert wrong == []
        for name, state in saved.items():
            assert all(torch.equal(value, loaded[name][key]) for key, value in state.items()), name


@pytest.mark.parametrize("world", worlds(slow=[1, 2]))
def test_a_state_without_delayed_scaling(host_ranks: Ranks, world: int) -> None:
    assert host_ranks(world)(checkpoints.without_delayed) == [[]] * world


@pytest.mark.parametrize("world", worlds(2, slow=[1]))
def test_a_skipped_step_changes_nothing(host_ranks: Ranks, world: int) -> None:
    """Of a GradScaler that found a gradient which is not finite on one rank: no cast, and delayed scaling does not move on."""
    assert host_ranks(world)(checkpoints.scaled, 2) == [([True, True, False, True], [])] * world
