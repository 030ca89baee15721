"""attach() over models whose weights are TransformerEngine's tensors, by its own Python classes, on the CPU."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.test_faults import at_operators
from tests.megatron import metered_steps, te, te_attaching
from tests.megatron.checkpoints import resume
from tests.megatron.host_on_cpu import needs_four_bits, needs_megatron
from tests.megatron.training import ALL_LAYERS, FORMATS, Case, train
from tests.megatron.unsent_bytes import train_in_the_hole
from tests.workers import Ranks

PARALLEL = "data, TransformerEngine's tensors"
SETS = ["te", "tiles"]
OTHERS = ["tensorwise", "delayed", "blockwise"]
KINDS = ["dp_reshardable", "fully_reshardable"]

pytestmark = [needs_megatron, needs_four_bits, te.needs_te]


@pytest.mark.shows(host="Megatron-Core", parallel=PARALLEL, formats=lambda formats: FORMATS[formats].values())
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("formats", ["fp8_block", "fp8_current", "nvfp4", "te", "tiles"])
@pytest.mark.parametrize("world", [2, 3])
def test_live_bytes_are_the_cast_of_the_masters(ranks: Ranks, world: int, formats: str, overlap: bool) -> None:
    for losses, wrong in ranks(world)(train, Case(formats, overlap, te=ALL_LAYERS)):
        assert not wrong and losses[2] < losses[0]


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("formats", SETS)
def test_beside_quantized_weights(ranks: Ranks, formats: str, overlap: bool) -> None:
    """Of both libraries in one model, FP8 and NVFP4 in one buffer, experts in an optimizer of their own; small buckets."""
    for losses, wrong in ranks(3)(train, Case(formats, overlap, bucket_size=10_000, experts=True, te="023")):
        assert not wrong and losses[2] < losses[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("formats", SETS)
def test_resume_is_exact(ranks: Ranks, formats: str, kind: str) -> None:
    for same, wrong in ranks(2)(resume, Case(formats, overlap=True, te="02"), kind):
        assert all(same.values()), same
        assert not wrong


@pytest.mark.parametrize("variant", ["TransformerEngine", "tiles"])
def test_some_operators_of_a_step(ranks: Ranks, tmp_path: Path, variant: str) -> None:
    found = ranks(1)(at_operators, "Megatron-Core", variant, "step", 3, str(tmp_path), timeout=250.0)
    ((outcomes, wrong),) = found
    assert wrong == []
    assert outcomes["again"] and outcomes["load"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("where", ["step", "forward", "load"])
def test_every_operator(ranks: Ranks, tmp_path: Path, where: str) -> None:
    arguments = "Megatron-Core", "TransformerEngine", where, None, str(tmp_path)
    ((outcomes, wrong),) = ranks(1)(at_operators, *arguments, timeout=900.0)
    assert wrong == []
    assert outcomes["again"] + outcomes["refresh"] + outcomes["load"] > 10, outcomes


@pytest.mark.shows(host="Megatron-Core", parallel=PARALLEL, formats=["fp8_delayed", "fp8_current"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_delayed_scaling_is_left_to_transformer_engine(ranks: Ranks, world: int) -> None:
    """It sets scales and rolls histories, in the third step those of new quantizers; a cast scales by what is there, and raises the
    amax. One all-reduce for all formats.
    """
    assert ranks(world)(te_attaching.steps, "delayed", ALL_LAYERS) == [[(1, {}, True, [])] * 5] * world


@pytest.mark.parametrize("formats", SETS)
def test_one_all_reduce_for_the_weights_of_both_libraries(ranks: Ranks, formats: str) -> None:
    assert ranks(2)(te_attaching.steps, formats, "02") == [[(1, {}, True, [])] * 5] * 2


@pytest.mark.parametrize("formats", SETS)
def test_every_byte_counts(ranks: Ranks, formats: str) -> None:
    for ok, found, wanted in ranks(2)(te_attaching.every_buffer, formats):
        assert ok and found == wanted and len(wanted) > 12


def test_measured_steps(ranks: Ranks) -> None:
    plain = [losses for losses, _, _ in ranks(2)(metered_steps.steps, True, None, "02")]
    for (losses, samples, amaxes), expected in zip(ranks(2)(metered_steps.steps, True, 2, "02"), plain, strict=True):
        assert losses == expected
        assert {name: counts.amax for name, counts in samples[-1].weights.items()} == amaxes and len(amaxes) == 4
        assert all(0 < counts.cast_error < 0.2 for counts in samples[-1].weights.values())


@pytest.mark.parametrize("formats", SETS)
def test_copies_that_transformer_engine_dropped_are_made_again(ranks: Ranks, formats: str) -> None:
    assert ranks(2)(te_attaching.copies_dropped, formats) == [{}, {}]


@pytest.mark.parametrize("formats", SETS)
def test_masters_of_a_finetuning_run(ranks: Ranks, formats: str) -> None:
    assert ranks(2)(te_attaching.finetuned, formats) == [(True, {})] * 2


def test_partial_tensors_are_neither_used_nor_saved(ranks: Ranks) -> None:
    for synced, *others in ranks(2)(te_attaching.partial):
        assert synced == "RuntimeError: no"
        assert len(others) == 3 and all("an all-gather raised half-way" in said for said in others), others


def test_detach_gives_the_host_back(ranks: Ranks) -> None:
    assert ranks(2)(te_attaching.detached) == [[], []]


@pytest.mark.parametrize(
    ("case", "argument", "message"),
    [
        (
            te_attaching.of_a_kind,
            "mxfp8",
            "ValueError: layers.0.weight: a MXFP8Tensor of 1x32 blocks needs both directions gathered, .* inside square_mxfp8()",
        ),
        (
            te_attaching.of_a_kind,
            "hybrid",
            "ValueError: layers.0.weight: a HybridQuantizedTensor has codes of two formats",
        ),
        (
            te_attaching.changed_afterwards,
            "format",
            "RuntimeError: module.layers.[0-3].weight was attached as fp8_current",
        ),
        (te_attaching.changed_afterwards, "option", "ValueError: stochastic_rounding is True and False is needed"),
        (te_attaching.changed_afterwards, "codes", "ValueError: it has no _rowwise_data: dropped"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refused_with_the_reason(ranks: Ranks, case: Any, argument: str, message: str) -> None:
    for said in ranks(2)(case, argument):
        assert re.match(message, said), said


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_tiles_are_one_byte_an_element(ranks: Ranks, world: int, overlap: bool) -> None:
    """MXFP8 in tiles of 32x32, one set of codes in a byte buffer, wherever scales and copies lie by then."""
    assert ranks(world)(te_attaching.one_byte_an_element, overlap) == [[]] * world


@pytest.mark.notices(
    "an optimizer over MXFP8Tensors in tiles of 32x32 steps without attach or after detach(), or is built outside",
    where="Megatron",
    answer="raises on every rank, before anything is written",
)
def test_tiles_without_an_attachment(ranks: Ranks) -> None:
    for never, detached, half_built, two_contexts, *changed in ranks(2)(te_attaching.tiles_without_an_attachment):
        assert "is not attached: Megatron's own copy would write over the codes" in never
        assert "was detached: nothing casts its masters" in detached
        assert re.match("RuntimeError: MXFP8Tensors in tiles .* inside the same quantized_params", half_built)
        assert re.match(r"RuntimeError: a MXFP8Tensor in tiles .* inside the same quantized_params", two_contexts)
        assert not changed


def test_a_recipe_of_tiles(ranks: Ranks) -> None:
    """Weights alone have tiles, and other recipes are as they were."""
    blocks, tiles = ("MXFP8BlockScaling", [False] * 3), ("MXFP8BlockScaling", [False, True, False])
    assert ranks(1)(te_attaching.recipes_by_megatron) == [[blocks, tiles, ("Float8BlockScaling", [False] * 3), blocks]]


@pytest.mark.notices(
    "a forward pass under another recipe gives a tensor of TransformerEngine a quantizer of another format",
    where="Megatron",
    answer="the next step raises, and names both formats",
)
@pytest.mark.parametrize("how", ["replaced", "set"])
def test_tiles_under_a_recipe_of_blocks(ranks: Ranks, how: str) -> None:
    for said in ranks(2)(te_attaching.computed_by_another_recipe, how):
        assert said.startswith(
            "RuntimeError: module.layers.1.weight was attached as mxfp8:block=32x32 and has a quantizer of mxfp8 now"
        )


def test_tiles_are_not_gathered_through_gradients(ranks: Ranks) -> None:
    for said in ranks(2)(te_attaching.through_the_gradients):
        assert re.match(r"ValueError: reuse_grad_buf_for_mxfp8_param_ag is not supported: .* square_mxfp8\(\)", said)


BF16_ALONE, UNSUPPORTED = (
    "Single grouped MXFP8 params require --reuse",
    "Unsupported single grouped quantized parameter recipe",
)


@pytest.mark.parametrize(
    ("fmt", "theirs"),
    [
        ("nvfp4", ""),
        ("mxfp8", BF16_ALONE),
        ("mxfp8:block=32x32", BF16_ALONE),
        ("fp8_block", UNSUPPORTED),
        ("fp8_current", UNSUPPORTED),
        ("fp8_delayed", UNSUPPORTED),
    ],
)
def test_several_experts_in_one_tensor_are_refused(ranks: Ranks, fmt: str, theirs: str) -> None:
    """By name, where it would be wrapped. Megatron itself lays out NVFP4 alone in a buffer of bytes."""
    for by_megatron, by_zerocast in ranks(2)(te_attaching.grouped_in_a_model, fmt):
        assert (theirs in by_megatron) if theirs else by_megatron == ""
        assert re.match("ValueError: experts.weight is a GroupedTensor with the codes of several experts", by_zerocast)


def test_several_experts_in_one_tensor_are_not_attached(ranks: Ranks) -> None:
    for said in ranks(2)(te_attaching.grouped_experts):
        assert re.match("TypeError: .* is a GroupedTensor, .* set moe_single_grouped_weight=False", said), said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({"fp8": "e4m3", "fp8_recipe": recipe}, "fp8_recipe='mxfp8', or fp4_recipe='nvfp4'") for recipe in OTHERS),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "requires use_transformer_engine_op_fuser=True"),
        ({"fp4": "e2m1", "fp4_recipe": "nvfp4"}, "requires use_transformer_engine_op_fuser=True"),
    ],
    ids=str,
)
def test_recipes_for_several_experts_in_one_tensor(ranks: Ranks, options: dict[str, Any], said: str) -> None:
    """Megatron has it for MXFP8 and NVFP4, whose products and casts TransformerEngine has on Blackwell alone."""
    (found,) = ranks(1)(te_attaching.grouped_by_a_recipe, options)
    assert found.startswith("ValueError: moe_single_grouped_weight") and said in found


def test_a_host_without_a_seam_is_named(ranks: Ranks) -> None:
    for said in ranks(1)(te_attaching.without_a_seam):
        assert "with TransformerEngine's tensors, has no _post_param_sync" in said


@pytest.mark.parametrize("world", [2, 3])
def test_built_outside(ranks: Ranks, world: int) -> None:
    """Megatron's own layout is taken where it sends all bytes: FP8 on any number of ranks, NVFP4 on two."""
    assert ranks(world)(te_attaching.built_outside, "fp8") == [("", {})] * world
    for said, stale in ranks(world)(te_attaching.built_outside, "nvfp4"):
        assert not stale and ("would be lost. Build model" in said) == (world == 3)


def test_the_hole_is_closed_for_them_too(ranks: Ranks) -> None:
    for said, stale in ranks(3)(train_in_the_hole, Case("nvfp4", te=ALL_LAYERS)):
        assert stale and "would be lost. Build model" in said
