"""Whoever reads a weight waits for its gather, also as the second thread that does."""

import pytest

from tests.megatron import reading
from tests.megatron.host_on_cpu import needs_megatron
from tests.workers import Ranks

pytestmark = needs_megatron


@pytest.mark.notices(
    "two threads read a weight whose gather is on its way",
    where="Megatron",
    answer="both wait until its copies are made",
)
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("second_after", [0.1, 1.5], ids=["in the gather", "in the copies"])
def test_the_second_reader_waits_too(ranks: Ranks, columnwise: bool, second_after: float) -> None:
    for seconds, same in ranks(2)(reading.two_readers, False, columnwise, second_after * reading.SECONDS):
        assert same and all(taken > reading.SECONDS / 4 for taken in seconds), seconds


def test_the_second_reader_raises_where_the_first_does(ranks: Ranks) -> None:
    for found, _ in ranks(2)(reading.two_readers, True, False, 0.1 * reading.SECONDS):
        (first, _), (second, _) = found
        assert "injected" in first and "an all-gather raised half-way" in second, found
