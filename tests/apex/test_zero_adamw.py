"""Masters, moments and bytes are ZeroAdamW's: to the bit with its formula, else as close as the formulas are."""

import pytest

from tests.apex import comparing
from tests.apex.host_on_cpu import needs_apex
from tests.selection import worlds
from tests.workers import Ranks

pytestmark = needs_apex


@pytest.mark.parametrize("world", worlds(2, slow=[1, 3]))
def test_the_formula_is_all_that_differs(host_ranks: Ranks, world: int) -> None:
    """With zerocast's update in the place of Apex's kernel everything is the same, delayed scaling and plain parameters too."""
    assert host_ranks(world)(comparing.unequal, 5) == [[]] * world


@pytest.mark.parametrize("world", worlds(2, slow=[1, 3]))
def test_apex_differs_by_its_formula(host_ranks: Ranks, world: int) -> None:
    for wrong, worst in host_ranks(world)(comparing.beyond, 5):
        assert wrong == []
        assert worst > 0.01  # a bound that is never approached would hold for anything
