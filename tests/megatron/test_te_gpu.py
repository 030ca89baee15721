"""Beside an installed TransformerEngine, on GPUs over NCCL: the cases of the CPU, and Megatron's GPT of its layers."""

import pytest
import torch

from tests import casts
from tests.devices import gpus
from tests.megatron import offloading, te, te_attaching, te_gpt
from tests.megatron.checkpoints import resume
from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.offloading import offloaded
from tests.megatron.test_precision_aware import case as precise
from tests.megatron.test_te import PARALLEL
from tests.megatron.training import ALL_LAYERS, FORMATS, Case, train
from tests.workers import Ranks

ONE, TWO = [pytest.param(1, marks=gpus(1)), pytest.param(2, marks=gpus(2))]
SECONDS = 300.0  # the first case sets the GPUs up
RECIPES = {"delayed": "fp8_delayed", "tensorwise": "fp8_current", "blockwise": "fp8_block"}

pytestmark = [needs_megatron, te.needs_te, pytest.mark.te]


@pytest.mark.shows(host="Megatron-Core", parallel=PARALLEL, formats=lambda recipe: [RECIPES[recipe]])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", [ONE, TWO])
def test_a_gpt_of_its_layers(gpu_ranks: Ranks, world: int, recipe: str, overlap: bool) -> None:
    for losses, _, stale, ok, weights in gpu_ranks(world)(te_gpt.train, recipe, overlap, True, timeout=SECONDS):
        assert weights == 8 and ok and not stale
        assert losses[3] < losses[0]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("world", [ONE, TWO])
def test_grouped_experts(gpu_ranks: Ranks, world: int, recipe: str) -> None:
    """Its grouped products, each expert with a weight of its own."""
    for losses, _, stale, ok, weights in gpu_ranks(world)(te_gpt.train, recipe, True, True, 4, timeout=SECONDS):
        assert weights == 20 and ok and not stale
        assert losses[3] < losses[0]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", [ONE, TWO])
def test_the_same_training_as_without_zerocast(gpu_ranks: Ranks, world: int, recipe: str) -> None:
    """Losses and bytes equal, to the bit, those of Megatron alone, which casts by TransformerEngine."""
    theirs = gpu_ranks(world)(te_gpt.train, recipe, True, False, timeout=SECONDS)
    ours = gpu_ranks(world)(te_gpt.train, recipe, True, True, timeout=SECONDS)
    for (their_losses, their_bytes, *_), (losses, found, *_) in zip(theirs, ours, strict=True):
        assert losses == their_losses
        for name, expected in their_bytes.items():
            same = {buffer: expected[buffer] for buffer in ("rowwise_data", "rowwise_scale_inv", "columnwise_data")}
            casts.assert_same_bytes(found[name], same, name)


@pytest.mark.shows(host="Megatron-Core", parallel=PARALLEL, formats=lambda formats: FORMATS[formats].values())
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("formats", ["nvfp4", "te", "tiles"])
@pytest.mark.parametrize("world", [ONE, TWO])
def test_live_bytes_are_the_cast_of_the_masters(gpu_ranks: Ranks, world: int, formats: str, overlap: bool) -> None:
    """NVFP4 and MXFP8 too, which TransformerEngine cannot cast here."""
    for losses, wrong in gpu_ranks(world)(train, Case(formats, overlap, te=ALL_LAYERS), timeout=SECONDS):
        assert not wrong and losses[2] < losses[0]


@pytest.mark.parametrize("world", [TWO])
def test_beside_quantized_weights(gpu_ranks: Ranks, world: int) -> None:
    case = Case("te", True, bucket_size=10_000, experts=True, te="023")
    for losses, wrong in gpu_ranks(world)(train, case, timeout=SECONDS):
        assert not wrong and losses[2] < losses[0]


@pytest.mark.parametrize("world", [TWO])
def test_delayed_scaling_is_left_to_transformer_engine(gpu_ranks: Ranks, world: int) -> None:
    assert (
        gpu_ranks(world)(te_attaching.steps, "delayed", ALL_LAYERS, timeout=SECONDS)
        == [[(1, {}, True, [])] * 5] * world
    )


@pytest.mark.parametrize("kind", ["dp_reshardable", "fully_reshardable"])
@pytest.mark.parametrize("world", [ONE, TWO])
def test_resume_is_exact(gpu_ranks: Ranks, world: int, kind: str) -> None:
    for same, wrong in gpu_ranks(world)(resume, Case("te", overlap=True, te="02"), kind, timeout=SECONDS):
        assert all(same.values()), same
        assert not wrong


@pytest.mark.parametrize("formats", ["te", "tiles"])
@pytest.mark.parametrize("world", [TWO])
def test_every_byte_counts(gpu_ranks: Ranks, world: int, formats: str) -> None:
    for ok, found, wanted in gpu_ranks(world)(te_attaching.every_buffer, formats, timeout=SECONDS):
        assert ok and found == wanted


@pytest.mark.parametrize("world", [ONE, TWO])
def test_tiles_are_one_byte_an_element(gpu_ranks: Ranks, world: int) -> None:
    """Products of TransformerEngine cannot read them here, so directions are read by its layouts of scales."""
    assert gpu_ranks(world)(te_attaching.one_byte_an_element, True, timeout=SECONDS) == [[]] * world


@pytest.mark.parametrize("world", [ONE])
def test_a_recipe_of_tiles(gpu_ranks: Ranks, world: int) -> None:
    """Megatron's own recipe and TransformerEngine's quantizers of it."""
    ((before, inside, other, after),) = gpu_ranks(world)(te_attaching.recipes_by_megatron, timeout=SECONDS)
    assert before == after == ("MXFP8BlockScaling", [False] * 3)
    assert inside == ("MXFP8BlockScaling", [False, True, False]) and other == ("Float8BlockScaling", [False] * 3)


@pytest.mark.parametrize("world", [ONE])
def test_detach_and_partial_tensors(gpu_ranks: Ranks, world: int) -> None:
    assert gpu_ranks(world)(te_attaching.detached, timeout=SECONDS) == [[]]
    ((synced, *others),) = gpu_ranks(world)(te_attaching.partial, timeout=SECONDS)
    assert synced == "RuntimeError: no"
    assert len(others) == 3 and all("an all-gather failed partway" in said for said in others), others


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.float16, torch.uint8], ids=str)
@pytest.mark.parametrize("world", [ONE, TWO])
def test_precision_aware_optimizer(gpu_ranks: Ranks, world: int, moments: torch.dtype) -> None:
    """Its FusedAdam with moments of each dtype, FP8 as uint8."""
    for losses, wrong in gpu_ranks(world)(train, precise(moments, overlap=True), timeout=SECONDS):
        assert not wrong and losses[2] < losses[0]


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [ONE, TWO])
def test_precision_aware_resume_is_exact(gpu_ranks: Ranks, world: int, moments: torch.dtype) -> None:
    for same, wrong in gpu_ranks(world)(resume, precise(moments, overlap=True), "fully_reshardable", timeout=SECONDS):
        assert all(same.values()), same
        assert not wrong


@pytest.mark.parametrize("streams", [False, True], ids=["one optimizer", "one a master"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("world", [ONE, TWO])
def test_optimizer_cpu_offload(gpu_ranks: Ranks, world: int, fraction: float, streams: bool) -> None:
    """Masters that are updated on the host, the others by its FusedAdam."""
    case = offloaded(fraction=fraction, streams=streams, precise=True, overlap=True, bucket_size=10_000)
    for losses, wrong, ok, sides in gpu_ranks(world)(offloading.train, case, timeout=SECONDS):
        assert not wrong and ok and losses[2] < losses[0]
        assert sides.offloaded == sides.standing == sides.cast_there > 0


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("world", [ONE, TWO])
def test_offloaded_resume_is_exact(gpu_ranks: Ranks, world: int, fraction: float) -> None:
    case = offloaded(fraction=fraction, precise=True, overlap=True)
    for same, wrong in gpu_ranks(world)(resume, case, "fully_reshardable", timeout=SECONDS):
        assert all(same.values()), same
        assert not wrong
