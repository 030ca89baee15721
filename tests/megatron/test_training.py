"""After some steps of the real host, live bytes are those of an unsharded cast of the masters. Ranks that agree prove nothing."""

import pytest

from tests.megatron.host_on_cpu import needs_four_bits, needs_megatron
from tests.megatron.training import ALL, FORMATS, MIXED, NARROW, Case, train, train_chunks
from tests.megatron.unsent_bytes import train_in_the_hole
from tests.selection import worlds
from tests.workers import Ranks

pytestmark = needs_megatron


@pytest.mark.shows(host="Megatron-Core", parallel="data", formats=lambda formats: FORMATS[formats].values(), ranks=2)
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("formats", ALL)
def test_live_bytes_are_the_cast_of_the_masters(ranks: Ranks, formats: str, overlap: bool) -> None:
    for losses, wrong in ranks(2)(train, Case(formats, overlap)):
        assert not wrong and losses[2] < losses[0]


@pytest.mark.shows(host="Megatron-Core", parallel="data", formats=lambda formats: FORMATS[formats].values())
@pytest.mark.parametrize("world", worlds(3, slow=[1, 4]))
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("formats", [NARROW, MIXED])
def test_any_number_of_ranks(ranks: Ranks, world: int, formats: str, overlap: bool) -> None:
    for losses, wrong in ranks(world)(train, Case(formats, overlap, bucket_size=10_000)):
        assert not wrong and losses[2] < losses[0]


@pytest.mark.shows(host="Megatron-Core", parallel="data, buffers of experts", formats=FORMATS[MIXED].values(), ranks=3)
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_chained_optimizers_with_buffers_of_experts(ranks: Ranks, overlap: bool) -> None:
    for losses, wrong in ranks(3)(train, Case(MIXED, overlap, experts=True)):
        assert not wrong and losses[2] < losses[0]


@pytest.mark.shows(host="Megatron-Core", parallel="data, model chunks", formats=FORMATS[MIXED].values(), ranks=3)
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_model_chunks_of_one_optimizer(ranks: Ranks, overlap: bool) -> None:
    assert ranks(3)(train_chunks, Case(MIXED, overlap, bucket_size=10_000)) == [[{}, {}]] * 3


def test_model_chunks_with_scaling_of_their_own(ranks: Ranks) -> None:
    assert ranks(2)(train_chunks, Case("delayed")) == [[{}, {}]] * 2


@pytest.mark.parametrize("formats", [NARROW, MIXED])
@pytest.mark.parametrize("world", [2, 4])
def test_buckets_padded_for_bandwidth(ranks: Ranks, world: int, formats: str) -> None:
    for _, wrong in ranks(world)(train, Case(formats, overlap=True, busbw=True)):
        assert not wrong


@needs_four_bits
@pytest.mark.notices(
    "a rank casts bytes that Megatron's layout does not send from it",
    where="Megatron",
    answer="`attach` raises; `quantized_params()` makes a layout that sends them",
)
@pytest.mark.parametrize(
    ("world", "case"),
    [(3, Case()), (2, Case(busbw=True)), (2, Case("mixed"))],
    ids=["three ranks", "padded for bandwidth", "two widths"],
)
def test_without_our_layout_bytes_are_lost_and_attach_says_so(ranks: Ranks, world: int, case: Case) -> None:
    for said, wrong in ranks(world)(train_in_the_hole, case):
        assert wrong
        assert "codes outside of these would be lost" in said
