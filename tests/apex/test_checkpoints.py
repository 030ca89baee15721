"""A run that was saved and loaded goes on as if it had never been interrupted."""

import pytest

from tests.apex import checkpoints
from tests.apex.host_on_cpu import needs_apex
from tests.selection import worlds
from tests.workers import Ranks

pytestmark = needs_apex


@pytest.mark.parametrize("world", worlds(slow=[1, 2]))
def test_a_state_without_delayed_scaling(host_ranks: Ranks, world: int) -> None:
    assert host_ranks(world)(checkpoints.without_delayed) == [[]] * world


@pytest.mark.parametrize("world", worlds(2, slow=[1]))
def test_a_skipped_step_changes_nothing(host_ranks: Ranks, world: int) -> None:
    """Of a GradScaler that found a gradient which is not finite on one rank: no cast, and delayed scaling does not move on."""
    assert host_ranks(world)(checkpoints.scaled, 2) == [([True, True, False, True], [])] * world
