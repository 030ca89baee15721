"""On GPUs, with TransformerEngine's compiled extension: the bytes that it leaves are those that zerocast leaves."""

import numpy as np
import pytest
import torch

from tests import casts, devices, sharded
from tests.sharded import Weight
from tests.transformer_engine import casting, gpu_cases
from tests.transformer_engine.host_on_cpu import needs_te
from tests.workers import Ranks
from zerocast import get_format
from zerocast.formats import layout

pytestmark = [needs_te, pytest.mark.te, *devices.gpus(1)]

SHAPES = ((288, 128), (768, 288), (128, 768), (32, 4096))
ONLY_ZEROCAST = ("nvfp4",)  # TransformerEngine's FP4 conversion is for Blackwell
BY_BOTH = ("fp8_delayed", "fp8_current", "fp8_current:element=e5m2,power_of_2_scale=True", "fp8_block", "mxfp8")
CONTENTS = ("lcg", "normal", "wide", "zero", "some_zero")
WORLDS = [1, pytest.param(2, marks=devices.gpus(2))]


def cut(world: int, numel: int, offset: int) -> tuple[tuple[int, int], ...]:
    """Near-even spans of `world` ranks."""
    inner = [numel * rank // world + offset for rank in range(1, world)]
    return tuple(zip([0, *inner], [*inner, numel], strict=True))


def cases(world: int, formats: tuple[str, ...], offset: int = 0) -> tuple[Weight, ...]:
    """Every format, shape and content."""
    return tuple(
        Weight(fmt, shape, cut(world, shape[0] * shape[1], offset), torch.bfloat16, content, seed)
        for fmt in formats
        for shape in SHAPES
        for seed, content in enumerate(CONTENTS)
    )


def without_padding(case: Weight, found: casts.Bytes) -> casts.Bytes:
    """TransformerEngine leaves the padding of columnwise scales as it was allocated."""
    fmt, name = get_format(case.fmt), "columnwise_scale_inv"
    if fmt.name == "fp8_block" and name in found:
        across = -(-case.shape[0] // 128)
        shape = layout.buffers(fmt, layout.matrix_shape(case.shape), case.nominal)[name]
        assert shape is not None
        found[name] = np.ascontiguousarray(found[name].view(np.float32).reshape(shape.shape)[:, :across]).view(np.uint8)
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("fmt", BY_BOTH)
def test_bytes_are_those_of_transformer_engine(gpu_ranks: Ranks, world: int, fmt: str) -> None:
    """Data, scales and their padding, amaxes, columnwise copies, after two steps, from masters cut anywhere."""
    drawn = cases(world, (fmt,), offset=5 if fmt != "fp8_block" else 64)
    for (their, our), complaints in gpu_ranks(world)(gpu_cases.cast_by_both, drawn, timeout=300.0):
        assert not complaints
        for case, expected, found in zip(drawn, their, our, strict=True):
            assert set(found) == set(expected)
            casts.assert_same_bytes(without_padding(case, found), without_padding(case, expected), str(case))


@pytest.mark.shows(host="TransformerEngine", parallel="data", formats=(*BY_BOTH, *ONLY_ZEROCAST))
@pytest.mark.parametrize("world", WORLDS)
def test_every_format_on_a_gpu(gpu_ranks: Ranks, world: int) -> None:
    """NVFP4 too, on any GPU, K of any multiple of 16, odd cuts: the bytes of the unsharded reference."""
    drawn = cases(world, (*BY_BOTH, "nvfp4", "identity"), offset=7)
    drawn += tuple(Weight("nvfp4", (144, 272), cut(world, 144 * 272, 1), torch.bfloat16, "lcg", s) for s in range(3))
    for outcome in gpu_ranks(world)(casting.cast_and_gather, drawn, 1, "cuda", timeout=300.0):
        assert not outcome.complaints
        for case, found in zip(drawn, outcome.steps[0], strict=True):
            expected = sharded.expected(case)
            casts.assert_same_bytes(found, {name: expected[name] for name in expected if name in found}, str(case))


def test_the_host_makes_the_copies_by_default(gpu_ranks: Ranks) -> None:
    """Automatic post-processing: what TransformerEngine's own kernels make of the rowwise codes is what zerocast would."""
    drawn = cases(1, ("fp8_delayed", "fp8_current", "fp8_block", "nvfp4"))
    (found,) = gpu_ranks(1)(gpu_cases.host_makes_copies, drawn)
    for case, held in zip(drawn, found, strict=True):
        expected = sharded.expected(case)
        names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data")
        casts.assert_same_bytes(held, {name: expected[name] for name in names}, str(case))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
def test_another_import_and_the_same_training(gpu_ranks: Ranks, world: int, recipe: str) -> None:
    """Losses and bytes of a loop over TransformerEngine's layers, cast by it and by zerocast, are equal to the bit."""
    expected = gpu_ranks(world)(gpu_cases.train, recipe, False, timeout=300.0)
    found = gpu_ranks(world)(gpu_cases.train, recipe, True, timeout=300.0)
    for (their_losses, their_bytes), (losses, held) in zip(expected, found, strict=True):
        assert losses == their_losses
        assert losses[-1] < losses[0]
        for name in ("rowwise_data", "rowwise_scale_inv"):
            casts.assert_same_bytes(held, {name: their_bytes[name]}, recipe)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("recipe", "fmt"),
    [("Float8CurrentScaling", "fp8_current"), ("Float8BlockScaling", "fp8_block")],
)
def test_a_transformer_layer_under_fsdp2(gpu_ranks: Ranks, world: int, recipe: str, fmt: str) -> None:
    """Gathered bytes computed with by TransformerEngine's modules: verified, with the losses of its own FP8 primary weights.

    Attention may add in another order from run to run. Activation recomputation changes no more than that.
    """
    expected = gpu_ranks(world)(gpu_cases.train_primary, recipe, timeout=300.0)
    for recompute in (False, True):
        found = gpu_ranks(world)(gpu_cases.train_gathered, recipe, fmt, 4, recompute, timeout=300.0)
        for theirs, ours in zip(expected, found, strict=True):
            assert ours[-1] < ours[0]
            np.testing.assert_allclose(ours, theirs, rtol=2e-3)
