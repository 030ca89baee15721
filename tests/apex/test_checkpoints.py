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
