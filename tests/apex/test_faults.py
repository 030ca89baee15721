"""A step that raises half-way: the optimizer says so at every later call and at save, until a state is loaded; never wrong bits."""

import itertools
from pathlib import Path

import pytest

from tests import casts
from tests.apex import failing
from tests.apex.host_on_cpu import needs_apex
from tests.workers import Ranks, RanksFailed

pytestmark = needs_apex
COLLECTIVES = ("reduce-scatter", "all-reduce", "all-gather")
SLOW = [pair for pair in itertools.product(COLLECTIVES, ("before", "after")) if pair != ("all-gather", "before")]


def test_some_operators_of_a_step(host_ranks: Ranks) -> None:
    ((outcomes, wrong),) = host_ranks(1)(failing.at_operators, 29)
    assert wrong == []
    assert outcomes["again"] and outcomes["load"], outcomes
    assert outcomes["nothing"] == 2, "once with enough memory, before and after"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_operator(ranks: Ranks) -> None:
    ((outcomes, wrong),) = ranks(1)(failing.at_operators, 1, timeout=1100.0)
    assert wrong == []
    assert outcomes["again"] > 10 and outcomes["load"] > 100 and outcomes["nothing"] == 2, outcomes


@pytest.mark.slow
def test_loading_that_raises(host_ranks: Ranks) -> None:
    assert host_ranks(1)(failing.while_loading) == [[]]


@pytest.mark.parametrize(
    ("collective", "place"), [("all-gather", "before"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]
)
def test_a_rank_that_dies(ranks: Ranks, tmp_path: Path, collective: str, place: str) -> None:
    """Over gloo: NCCL ends the processes of the others."""
    path = str(tmp_path / "state.pt")
    with pytest.raises(RanksFailed) as caught:
        ranks(2)(failing.dies, path, collective, place)
    said = str(caught.value)
    assert "--- rank 1 ---\nthe process died" in said
    assert "RuntimeError: rank 0 was told after" in said, said
    if collective != "reduce-scatter":
        assert "torn: True" in said
    resumed, whole = ranks(2)(failing.finished, path, 4), ranks(2)(failing.finished, None, 4)
    for rank in range(2):
        casts.assert_same_bytes(resumed[rank], whole[rank], f"rank {rank}, resumed")


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_rank_that_comes_late(ranks: Ranks, tmp_path: Path, collective: str) -> None:
    """The others wait for as long as their group says."""
    whole = ranks(2)(failing.finished, None, 3)
    found = ranks(2)(failing.comes_late, str(tmp_path / "state.pt"), collective)
    assert failing.TIMEOUT <= found[0][0] < failing.NAP
    for rank, (_, torn, resumed) in enumerate(found):
        assert torn == (collective != "reduce-scatter")
        casts.assert_same_bytes(resumed, whole[rank], f"rank {rank}, resumed in a new group")
