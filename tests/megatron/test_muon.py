"""Ranks that own whole matrices, as under Muon: after some steps live bytes are those of an unsharded cast."""

import re
from pathlib import Path

import pytest
import torch

from tests.megatron import muon
from tests.megatron.training import FORMATS, Case
from tests.workers import Ranks

pytestmark = pytest.mark.skipif(bool(muon.WHY_NO_MUON), reason=muon.WHY_NO_MUON)
SLOW = pytest.mark.slow
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])


@pytest.mark.shows(
    host="Megatron-Core", parallel="data, whole matrices", formats=lambda formats: FORMATS[formats].values()
)
@pytest.mark.parametrize(
    ("world", "formats"),
    [
        (2, "fp8_current"),
        (3, "nvfp4"),
        (3, "mixed"),
        *(pytest.param(*case, marks=SLOW) for case in [(2, "fp8_block"), (2, "mxfp4"), (2, "nvfp4"), (4, "mxfp4")]),
        *(pytest.param(*case, marks=SLOW) for case in [(1, "nvfp4"), (4, "nvfp4"), (3, "fp8_block"), (3, "half")]),
        *(pytest.param(*case, marks=SLOW) for case in [(4, "mixed"), (2, "delayed"), (4, "fp8_current")]),
    ],
)
@OVERLAP
def test_live_bytes_are_the_cast_of_the_masters(ranks: Ranks, world: int, formats: str, overlap: bool) -> None:
    for losses, wrong, verified in ranks(world)(muon.train, Case(formats, overlap)):
        assert not wrong and verified and losses[2] < losses[0]


@pytest.mark.parametrize("busbw", [False, pytest.param(True, marks=SLOW)], ids=["", "padded"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=SLOW)])
def test_several_buckets(ranks: Ranks, world: int, busbw: bool) -> None:
    for _, wrong, verified in ranks(world)(muon.train, Case("mixed", True, busbw, bucket_size=10_000)):
        assert not wrong and verified


def test_each_matrix_has_one_owner_and_starts_from_its_value_before_quantization(ranks: Ranks) -> None:
    found = ranks(3)(muon.owned, Case("nvfp4"))
    matrices = [name for mine in found for kind, name, start, _ in mine if "LayerWise" in kind and start == 0]
    assert sorted(matrices) == [f"layers.{number}.weight" for number in range(4)]
    assert {name for mine in found for kind, name, *_ in mine if "LayerWise" not in kind} == {
        f"layers.{number}.bias" for number in range(4)
    }
    assert all(ranks(2)(muon.begins_with, Case("nvfp4")))


@pytest.mark.parametrize("what", ["experts", "not laid out"])
def test_what_is_refused(ranks: Ranks, what: str) -> None:
    expected = {
        "experts": "experts are not supported in a LayerWiseDistributedOptimizer",
        "not laid out": "lies in no bucket of whole matrices",
    }
    for said in ranks(2)(muon.refused, what):
        assert said.startswith("ValueError: ") and expected[what] in said


def test_in_megatrons_own_groups_what_adam_owns_would_be_stale(ranks: Ranks) -> None:
    for wrong in ranks(2)(muon.train_in_megatrons_groups, Case("fp8_current")):
        assert wrong and all(name.endswith("bias") for name in wrong)


def test_refused_without_an_attachment_and_the_same_with_one_again(ranks: Ranks) -> None:
    for before, after, same, wrong in ranks(2)(muon.detach_and_attach, Case("nvfp4")):
        assert "is not attached: Megatron's own copy would write over" in before
        assert "which was detached: nothing casts its masters" in after
        assert same and not wrong


def test_a_step_that_broke_off_is_neither_used_nor_saved(ranks: Ranks) -> None:
    for broke, said in ranks(2)(muon.broken_step, Case("nvfp4")):
        assert broke.startswith("MemoryError")
        for message in said:
            assert re.search("an optimizer step raised half-way", message), said


def test_masters_from_the_model(ranks: Ranks) -> None:
    for said, wrong in ranks(2)(muon.from_a_state_dict, Case("fp8_block")):
        assert "makes no masters of a state dict: load that into the model" in said
        assert not wrong


@pytest.mark.parametrize(
    ("formats", "kind"),
    [("nvfp4", "dp_reshardable"), *(pytest.param(f, "dp_reshardable", marks=SLOW) for f in ("mixed", "delayed"))],
)
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=SLOW), True], ids=["sync", "overlap"])
def test_resume_is_exact(ranks: Ranks, formats: str, kind: str, overlap: bool) -> None:
    pytest.importorskip("psutil", reason="Megatron's checkpoints need psutil")
    for same, wrong in ranks(2)(muon.resume, Case(formats, overlap), kind):
        assert all(same.values()), same
        assert not wrong


@pytest.mark.parametrize(("before", "after"), [(2, 3), pytest.param(4, 2, marks=SLOW)])
def test_other_numbers_of_ranks(ranks: Ranks, tmp_path: Path, before: int, after: int) -> None:
    pytest.importorskip("psutil", reason="Megatron's checkpoints need psutil")
    case, kind = Case("nvfp4"), "dp_reshardable"
    written = ranks(before)(muon.saved, case, str(tmp_path), kind)[0]
    for masters, wrong in ranks(after)(muon.loaded, case, str(tmp_path), kind):
        assert all(torch.equal(written[name], masters[name]) for name in written)
        assert not wrong


def test_a_file_for_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2)(muon.from_a_file, Case("nvfp4"), str(tmp_path)) == [{}, {}]
