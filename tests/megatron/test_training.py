"""After some steps of the real host, live bytes are those of an unsharded cast of the masters. Ranks that agree prove nothing."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.megatron.host_on_cpu import KNOWS_FOUR_BITS, needs_four_bits, needs_megatron
from tests.megatron.training import ALL, FORMATS, MIXED, NARROW, Case, build, train, train_chunks
from tests.selection import worlds
from tests.workers import Ranks, on_ranks
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import attachment

if KNOWS_FOUR_BITS:
    from megatron.core.distributed import distributed_data_parallel
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.optimizer import distrib_optimizer

    HOSTS_LAYOUT = [
        (owner, name, vars(owner)[name])
        for owner, name in (
            (buffers._ParamAndGradBuffer, "_compute_nvfp4_packed_layout"),
            (distrib_optimizer.DistributedOptimizer, "_compute_per_buffer_param_layout"),
            (distrib_optimizer, "group_params_for_buffers"),
            (distributed_data_parallel, "group_params_for_buffers"),
        )
    ]


@contextlib.contextmanager
def hosts_own_layout() -> Iterator[None]:
    """Inside `quantized_params()`: byte buffers as Megatron lays them out by itself."""
    with contextlib.ExitStack() as stack:
        for owner, name, original in HOSTS_LAYOUT:
            stack.enter_context(mock.patch.object(owner, name, original))
        yield


pytestmark = needs_megatron


@pytest.mark.shows(host="Megatron-Core", parallel="data", formats=lambda formats: FORMATS[formats].values(), ranks=2)
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("formats", ALL)
def test_live_bytes_are_the_cast_of_the_masters(ranks: Ranks, formats: str, overlap: bool) -> None:
    ranks(2)(train, Case(formats, overlap))


@pytest.mark.shows(host="Megatron-Core", parallel="data", formats=lambda formats: FORMATS[formats].values())
@pytest.mark.parametrize("world", worlds(3, slow=[1, 4]))
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("formats", [NARROW, MIXED])
def test_any_number_of_ranks(ranks: Ranks, world: int, formats: str, overlap: bool) -> None:
    ranks(world)(train, Case(formats, overlap, bucket_size=10_000))


@pytest.mark.shows(host="Megatron-Core", parallel="data, buffers of experts", formats=FORMATS[MIXED].values(), ranks=3)
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_chained_optimizers_with_buffers_of_experts(ranks: Ranks, overlap: bool) -> None:
    ranks(3)(train, Case(MIXED, overlap, experts=True))


@pytest.mark.shows(
    host="Megatron-Core", parallel="data, model chunks", formats=lambda case: FORMATS[case.formats].values(), ranks=3
)
@pytest.mark.parametrize(
    "case", [*(Case(MIXED, overlap, bucket_size=10_000) for overlap in (False, True)), Case("delayed")]
)
def test_model_chunks_of_one_optimizer(ranks: Ranks, case: Case) -> None:
    ranks(3)(train_chunks, case)


@pytest.mark.parametrize(
    ("world", "formats"),
    [(2, MIXED), (4, NARROW), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, NARROW), (4, MIXED)))],
)
def test_buckets_padded_for_bandwidth(ranks: Ranks, world: int, formats: str) -> None:
    ranks(world)(train, Case(formats, overlap=True, busbw=True))


@on_ranks()
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
def test_without_our_layout_bytes_are_lost_and_attach_says_so(case: Case) -> None:
    """Bytes are stale where the check of `attach` is left out."""
    with case.host():
        with integration.quantized_params(), hosts_own_layout():
            run = build(case)
        with pytest.raises(ValueError, match="codes outside of these would be lost"):
            integration.attach(run.optimizer, run.ddp)
        with mock.patch.object(attachment, "bytes_not_sent", return_value=None):
            integration.attach(run.optimizer, run.ddp)
        for number in range(3):
            run.step(number)
        assert run.stale_bytes()
