"""Optimizer CPU offload: Megatron's HybridDeviceOptimizer updates copies of masters on the host, and the masters are cast."""

from pathlib import Path

import pytest
import torch

from tests.hosts.test_faults import at_operators
from tests.megatron import offloading
from tests.megatron.checkpoints import loaded, resume, saved
from tests.megatron.host_on_cpu import needs_four_bits, needs_megatron
from tests.megatron.offloading import offloaded
from tests.megatron.te import needs_te
from tests.megatron.test_checkpoints import KINDS, check
from tests.megatron.training import ALL_LAYERS, FORMATS, MIXED, Case
from tests.selection import worlds
from tests.workers import Ranks

pytestmark = needs_megatron
PRECISE = pytest.param(True, marks=needs_te)
SLOW = pytest.mark.slow


@pytest.mark.shows(host="Megatron-Core", parallel="data", formats=FORMATS[MIXED].values())
@pytest.mark.parametrize("world", worlds(3, slow=[1, 2, 4]))
@pytest.mark.parametrize("streams", [False, True], ids=["one optimizer", "one a master"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_live_bytes_are_the_cast_of_the_masters(ranks: Ranks, world: int, fraction: float, streams: bool) -> None:
    case = offloaded(fraction=fraction, streams=streams, overlap=True, experts=True, bucket_size=10_000)
    found = ranks(world)(offloading.train, case)
    for losses, wrong, ok, _ in found:
        assert not wrong and ok and losses[2] < losses[0]
    apart = [one for *_, copies in found for one in copies]
    assert apart and all(apart)


@needs_te
@needs_four_bits  # older releases have no seam for these tensors
@pytest.mark.parametrize(("formats", "recipe"), [("fp8_current", "delayed"), ("te", None)])
def test_tensors_of_transformer_engine(ranks: Ranks, formats: str, recipe: str | None) -> None:
    """Also in the configuration for delayed scaling, of which Megatron takes flat views of tensors for masters."""
    case = offloaded(formats, 0.5, precise=True, options={"fp8_recipe": recipe}, te=ALL_LAYERS)
    for losses, wrong, ok, apart in ranks(2)(offloading.train, case):
        assert not wrong and ok and losses[2] < losses[0] and all(apart)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precise", [False, PRECISE], ids=["torch's Adam", "FusedAdam"])
@pytest.mark.parametrize("fraction", [pytest.param(1.0, marks=SLOW), 0.5])
def test_resume_is_exact(ranks: Ranks, fraction: float, precise: bool, kind: str) -> None:
    for same, wrong in ranks(2)(resume, offloaded(fraction=fraction, precise=precise, overlap=True), kind):
        assert all(same.values()), same
        assert not wrong


@pytest.mark.parametrize(("before", "after", "kind"), [(2, 3, KINDS[0]), (3, 2, KINDS[1])])
@pytest.mark.parametrize("written", ["offloaded", "on the GPU"])
@pytest.mark.parametrize("read", ["offloaded", "on the GPU"])
def test_other_numbers_of_ranks_with_and_without_offload(
    ranks: Ranks, tmp_path: Path, written: str, read: str, before: int, after: int, kind: str
) -> None:
    cases = {"offloaded": offloaded(fraction=0.5, overlap=True), "on the GPU": Case(MIXED, overlap=True)}
    state = ranks(before)(saved, cases[written], str(tmp_path), kind)[0]
    check(state, ranks(after)(loaded, cases[read], str(tmp_path), kind))


def test_masters_that_were_written_by_hand_are_those_of_the_next_step(ranks: Ranks) -> None:
    on_host, on_gpu = (ranks(2)(offloading.written_by_hand, case) for case in (offloaded(), Case(MIXED)))
    for (wrong, masters), (_, expected) in zip(on_host, on_gpu, strict=True):
        assert not wrong
        torch.testing.assert_close(masters, expected, rtol=1e-5, atol=1e-6)  # torch's Adam on the CPU is fused there


@pytest.mark.parametrize("with_state", [False, True], ids=["values", "state dict"])
def test_masters_of_a_finetuning_run(ranks: Ranks, with_state: bool) -> None:
    assert ranks(2)(offloading.finetuned, offloaded(), with_state) == [(True, True, {})] * 2


def test_moments_stay_on_their_side_in_a_load(ranks: Ranks) -> None:
    """Megatron tells the two sides apart by the class of Adam, which without TransformerEngine is the same."""
    assert ranks(2)(offloading.moments_on_the_host, offloaded(fraction=0.5)) == [({True}, {False})] * 2


def test_a_checkpoint_names_no_class(ranks: Ranks) -> None:
    """Those of the two Adams would be pickled with it, which Megatron 0.18 refuses to read."""
    on_host, on_gpu = (ranks(2)(offloading.saved_alike, case) for case in (offloaded(), Case(MIXED)))
    for ours, theirs in zip(on_host, on_gpu, strict=True):
        assert all(found <= plain | {"bias_correction"} for found, plain in zip(ours, theirs, strict=True))


def test_a_load_that_is_prepared_writes_no_master(ranks: Ranks) -> None:
    assert ranks(2)(offloading.prepared, offloaded(experts=True)) == [True, True]


def test_a_load_that_is_prepared_twice(ranks: Ranks) -> None:
    """States are made by a step at a rate of 0, which no later step keeps."""
    ((failed, same),) = ranks(1)(offloading.prepared_again, offloaded(fraction=0.5))
    assert "no memory" in failed and same


@SLOW
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["step", "load", "refresh", "sync"])
def test_every_operator(ranks: Ranks, tmp_path: Path, where: str) -> None:
    found = ranks(1)(at_operators, "Megatron-Core", "offload", where, None, str(tmp_path), timeout=800.0)
    ((outcomes, wrong),) = found
    assert wrong == []
    assert outcomes["load" if where in ("step", "load") else "refresh"] > 10


@pytest.mark.parametrize("where", ["step", "load"])
def test_some_operators(ranks: Ranks, tmp_path: Path, where: str) -> None:
    found = ranks(1)(at_operators, "Megatron-Core", "offload", where, 4, str(tmp_path), timeout=250.0)
    ((outcomes, wrong),) = found
    assert wrong == []
    assert outcomes["load"]
