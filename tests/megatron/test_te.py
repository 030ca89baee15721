"""attach() over models whose weights are TransformerEngine's tensors, by its own Python classes, on the CPU."""

import re

import pytest

from tests.megatron import te, te_attaching
from tests.megatron.host_on_cpu import needs_four_bits, needs_megatron
from tests.megatron.training import ALL_LAYERS, FORMATS, Case, train
from tests.workers import Ranks

PARALLEL = "data, TransformerEngine's tensors"
SETS = ["te", "tiles"]

pytestmark = [needs_megatron, needs_four_bits, te.needs_te]


@pytest.mark.shows(host="Megatron-Core", parallel=PARALLEL, formats=lambda formats: FORMATS[formats].values())
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("formats", ["fp8_block", "fp8_current", "nvfp4", "te", "tiles"])
@pytest.mark.parametrize("world", [2, 3])
def test_live_bytes_are_the_cast_of_the_masters(ranks: Ranks, world: int, formats: str, overlap: bool) -> None:
    for losses, wrong in ranks(world)(train, Case(formats, overlap, te=ALL_LAYERS)):
        assert not wrong and losses[2] < losses[0]


@pytest.mark.shows(host="Megatron-Core", parallel=PARALLEL, formats=["fp8_delayed", "fp8_current"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_delayed_scaling_is_left_to_transformer_engine(ranks: Ranks, world: int) -> None:
    """It sets scales and rolls histories, in the third step those of new quantizers; a cast scales by what is there, and raises the
    amax. One all-reduce for all formats.
    """
    assert ranks(world)(te_attaching.steps, "delayed", ALL_LAYERS) == [[(1, {}, True, [])] * 5] * world


@pytest.mark.parametrize("formats", SETS)
def test_every_byte_counts(ranks: Ranks, formats: str) -> None:
    for ok, found, wanted in ranks(2)(te_attaching.every_buffer, formats):
        assert ok and found == wanted and len(wanted) > 12


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mxfp8", "a MXFP8Tensor of 1x32 blocks needs both directions gathered, .* inside square_mxfp8()"),
        ("hybrid", "a HybridQuantizedTensor has codes of two formats"),
    ],
)
def test_refused_with_the_reason(ranks: Ranks, kind: str, message: str) -> None:
    for said in ranks(2)(te_attaching.of_a_kind, kind):
        assert re.match(f"ValueError: layers.0.weight: {message}", said), said


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


AS_FP8 = "RuntimeError: module.layers.[0-3].weight was attached as fp8_current"
AS_TILES = "RuntimeError: module.layers.[01].weight was attached as mxfp8:block=32x32 and has a quantizer of mxfp8 now"


@pytest.mark.notices(
    "a forward pass under another recipe gives a tensor of TransformerEngine a quantizer of another format",
    where="Megatron",
    answer="the next step raises, and names both formats",
)
@pytest.mark.parametrize(
    ("formats", "change", "message"),
    [
        ("fp8_current", "fp8_delayed", AS_FP8),
        ("nvfp4", "option", "ValueError: stochastic_rounding is True and False is needed"),
        ("nvfp4", "codes", "ValueError: it has no _rowwise_data: dropped"),
        ("tiles", "mxfp8", AS_TILES),
        ("tiles", "tiles", AS_TILES),
    ],
)
def test_what_has_changed_since_is_refused(ranks: Ranks, formats: str, change: str, message: str) -> None:
    for said in ranks(2)(te_attaching.changed_afterwards, formats, change):
        assert re.match(message, said), said


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "mxfp8:block=32x32", "fp8_block", "fp8_current", "fp8_delayed"])
def test_several_experts_in_one_tensor_are_refused(ranks: Ranks, fmt: str) -> None:
    """By name, where it would be wrapped."""
    for said in ranks(2)(te_attaching.grouped_in_a_model, fmt):
        assert re.match("ValueError: experts.weight is a GroupedTensor with the codes of several experts", said), said


def test_a_host_without_a_seam_is_named(ranks: Ranks) -> None:
    for said in ranks(1)(te_attaching.without_a_seam):
        assert "has no attribute '_post_param_sync': this megatron-core has an API that" in said
