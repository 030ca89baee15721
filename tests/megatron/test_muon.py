"""Ranks that own whole matrices, as under Muon: after some steps live bytes are those of an unsharded cast."""

import re
from pathlib import Path

import pytest

from tests.megatron import gpt, muon
from tests.megatron.training import ALL_LAYERS, FORMATS, Case
from tests.transformer_engine.host_on_cpu import needs_te
from tests.workers import Ranks, error_of, on_ranks

pytestmark = pytest.mark.skipif(bool(muon.WHY_NO_MUON), reason=muon.WHY_NO_MUON)
SLOW = pytest.mark.slow
EXPERTS = pytest.mark.parametrize("experts", [False, True], ids=["", "experts"])
OVERLAP = pytest.mark.parametrize("overlap", [pytest.param(False, marks=SLOW), True], ids=["sync", "overlap"])


@pytest.mark.shows(
    host="Megatron-Core", parallel="data, whole matrices", formats=lambda formats: FORMATS[formats].values()
)
@pytest.mark.parametrize(
    ("world", "formats"),
    [
        (2, "fp8_current"),
        (3, "nvfp4"),
        (3, "mixed"),
        (2, "other half"),
        *(pytest.param(*case, marks=SLOW) for case in [(2, "fp8_block"), (2, "mxfp4"), (2, "nvfp4"), (4, "mxfp4")]),
        *(pytest.param(*case, marks=SLOW) for case in [(1, "nvfp4"), (4, "nvfp4"), (3, "fp8_block"), (3, "half")]),
        *(pytest.param(*case, marks=SLOW) for case in [(4, "mixed"), (2, "delayed"), (4, "fp8_current")]),
    ],
)
@pytest.mark.parametrize(
    ("overlap", "experts"),
    [(False, False), (True, True), *(pytest.param(*case, marks=SLOW) for case in [(False, True), (True, False)])],
    ids=["sync", "overlap-experts", "sync-experts", "overlap"],
)
def test_live_bytes_are_the_cast_of_the_masters(
    ranks: Ranks, world: int, formats: str, overlap: bool, experts: bool
) -> None:
    ranks(world)(muon.train, Case(formats, overlap, experts=experts))


@pytest.mark.shows(host="Megatron-Core", parallel="data, expert, whole matrices", formats=lambda fmt: [fmt])
@pytest.mark.parametrize(
    ("world", "fmt"),
    [
        (2, "nvfp4"),
        *(pytest.param(2, fmt, marks=SLOW) for fmt in ("fp8_block", "fp8_current", "mxfp8:block=32x32")),
        *(pytest.param(4, fmt, marks=SLOW) for fmt in ("nvfp4", "fp8_block", "fp8_current", "mxfp8:block=32x32")),
    ],
)
@OVERLAP
def test_experts_over_two_ranks(ranks: Ranks, world: int, fmt: str, overlap: bool) -> None:
    """Megatron's GPT: each rank has half of the experts, and shares them with those that have the same."""
    case = gpt.Parallel(expert=2, experts=4, overlap=overlap, muon=True, formats=fmt)
    ranks(world)(gpt.train, case, 3)


@pytest.mark.parametrize("pattern", [pytest.param("*.experts.*", marks=SLOW), "*output_layer.weight", "*_*.weight"])
def test_what_is_quantized(ranks: Ranks, pattern: str) -> None:
    """Experts alone; the output layer alone, which Adam updates; both and all other matrices."""
    recipe = {"expert": 2, "experts": 4, "formats": "nvfp4", "pattern": pattern}
    ranks(2)(gpt.train, gpt.Parallel(overlap=True, muon=True, **recipe))


def test_masters_have_the_attributes_that_muon_reads(ranks: Ranks) -> None:
    """Muon orthogonalizes by them queries, keys and values apart, and over tensor-parallel ranks."""
    ranks(2)(gpt.check_attributes, gpt.Parallel(tensor=2, muon=True, formats="nvfp4"))


@needs_te
@pytest.mark.shows(
    host="Megatron-Core",
    parallel="data, whole matrices, TransformerEngine's tensors",
    formats=lambda formats: FORMATS[formats].values(),
)
@pytest.mark.parametrize(
    "formats", ["te", "tiles", *(pytest.param(f, marks=SLOW) for f in ("fp8_block", "fp8_current", "nvfp4"))]
)
@pytest.mark.parametrize(("world", "layers"), [(2, ALL_LAYERS), (3, "02")])
@OVERLAP
def test_tensors_of_transformer_engine(ranks: Ranks, world: int, layers: str, formats: str, overlap: bool) -> None:
    """All layers have them, or every second one, with experts among either."""
    ranks(world)(muon.train, Case(formats, overlap, experts=True, te=layers))


def test_each_matrix_has_one_owner_and_starts_from_its_value_before_quantization(ranks: Ranks) -> None:
    found = ranks(3)(muon.owned, Case("nvfp4"))
    matrices = [name for mine in found for kind, name, start, _ in mine if "LayerWise" in kind and start == 0]
    assert sorted(matrices) == [f"layers.{number}.weight" for number in range(4)]
    assert {name for mine in found for kind, name, *_ in mine if "LayerWise" not in kind} == {
        f"layers.{number}.bias" for number in range(4)
    }
    ranks(2)(muon.check_first_masters, Case("nvfp4"))


@on_ranks(2)
@pytest.mark.parametrize("name", muon.MISTAKES)
def test_mistakes(name: str) -> None:
    mistake, message = muon.MISTAKES[name]
    case = Case("fp8_current", experts="expert" in name)
    with muon.host(case):
        said = error_of(lambda: mistake(case))
    assert re.match(message, said), said


@EXPERTS
def test_a_step_that_broke_off_is_neither_used_nor_saved(ranks: Ranks, experts: bool) -> None:
    ranks(2)(muon.break_a_step, Case("nvfp4", experts=experts))


@EXPERTS
def test_masters_from_the_model_and_from_a_state_dict(ranks: Ranks, experts: bool) -> None:
    ranks(2)(muon.finetune, Case("fp8_block", experts=experts))


@pytest.mark.parametrize(
    ("formats", "kind"),
    [("delayed", "dp_reshardable"), *(pytest.param(f, "dp_reshardable", marks=SLOW) for f in ("mixed", "nvfp4"))],
)
@OVERLAP
@EXPERTS
def test_resume_is_exact(ranks: Ranks, tmp_path: Path, formats: str, kind: str, overlap: bool, experts: bool) -> None:
    pytest.importorskip("psutil", reason="Megatron's checkpoints need psutil")
    ranks(2)(muon.resume, Case(formats, overlap, experts=experts), str(tmp_path), kind)


@pytest.mark.parametrize(("before", "after"), [(2, 3), pytest.param(4, 2, marks=SLOW)])
@EXPERTS
def test_other_numbers_of_ranks(ranks: Ranks, tmp_path: Path, before: int, after: int, experts: bool) -> None:
    pytest.importorskip("psutil", reason="Megatron's checkpoints need psutil")
    case, kind = Case("nvfp4", experts=experts), "dp_reshardable"
    written = ranks(before)(muon.saved, case, str(tmp_path), kind)[0]
    ranks(after)(muon.check_loaded, case, str(tmp_path), kind, written)
