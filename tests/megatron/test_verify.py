"""What `verify_every` and debug mode say of an attached host. What verify finds: tests/hosts/test_verify.py."""

from typing import Any

import pytest

import zerocast
from tests.devices import gpus
from tests.megatron import muon, verifying
from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.training import FORMATS, MIXED
from tests.workers import Ranks
from zerocast.integrations import megatron as integration

pytestmark = needs_megatron


@pytest.mark.notices(
    "a byte differs from the cast of the masters",
    where="Megatron",
    answer="`zerocast.verify(attachment)` names it; `attach(..., verify_every=n)` raises every n steps",
)
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("every", [1, 2])
def test_verify_every(ranks: Ranks, every: int, overlap: bool) -> None:
    """From the second of four steps on rank 1 flips a byte after each gather."""
    first, second = ranks(2)(verifying.steps, every, overlap)
    assert first == second
    assert [bool(text) for text in first] == [False, True, every == 1, True]
    fmt = zerocast.Recipe(FORMATS[MIXED]).format_of("layers.1.weight")
    assert f"layers.1.weight ({fmt}) on rank 1: rowwise_data differs in 1 of " in first[1]


def test_debug_mode(ranks: Ranks) -> None:
    for said in ranks(2)(verifying.stale_reads):
        assert "an optimizer has updated its masters since its last cast" in said["between step and cast"]
        assert "holds this rank's part of the last cast only" in said["before the gather"]
        assert "its masters have been written since its last cast" in said["by hand"]
        assert all("call attachment.refresh()" in text and "force_sync=True" in text for text in said.values())


@pytest.mark.parametrize("whole_matrices", [False, True], ids=["slices", "whole matrices"])
def test_offloaded_masters_leave_no_memory_in_use(ranks: Ranks, whole_matrices: bool) -> None:
    if whole_matrices and muon.WHY_NO_MUON:
        pytest.skip(muon.WHY_NO_MUON)
    for freed, stale, ok in ranks(2)(verifying.offloaded_between_steps, whole_matrices):
        assert freed and not stale and ok


@pytest.mark.parametrize("world", [pytest.param(1, marks=gpus(1))])
def test_offloaded_masters_leave_no_memory_of_a_gpu_in_use(gpu_ranks: Ranks, world: int) -> None:
    for freed, stale, ok in gpu_ranks(world)(verifying.offloaded_between_steps, False, timeout=240.0):
        assert freed and not stale and ok


@pytest.mark.parametrize("every", [0, -1])
def test_every_is_checked(every: Any) -> None:
    with pytest.raises(ValueError, match=f"verify_every is None or at least 1, got {every}"):
        integration.attach(None, None, verify_every=every)
