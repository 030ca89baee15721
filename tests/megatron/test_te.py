"""attach() over models whose weights are TransformerEngine's tensors, by its own Python classes, on the CPU."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests import casts
from tests.casts import Weight
from tests.megatron import attaching, ranks_host
from tests.megatron.host_on_cpu import needs_four_bits, needs_megatron
from tests.megatron.ranks_host import host
from tests.megatron.training import (
    ALL_LAYERS,
    FORMATS,
    Case,
    Model,
    build,
    build_attached,
    build_chunk,
    build_optimizer,
    configuration,
    train,
    wrap,
)
from tests.selection import worlds
from tests.transformer_engine import tensors
from tests.transformer_engine.host_on_cpu import needs_te
from tests.workers import Ranks, on_ranks
from zerocast import get_format
from zerocast.integrations import megatron as integration

SLOW = pytest.mark.slow
PARALLEL = "data, TransformerEngine's tensors"

pytestmark = [needs_megatron, needs_four_bits, needs_te]


@pytest.mark.shows(host="Megatron-Core", parallel=PARALLEL, formats=lambda formats: FORMATS[formats].values())
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize(
    "formats", [*(pytest.param(f, marks=SLOW) for f in ("fp8_block", "fp8_current", "nvfp4", "tiles")), "te"]
)
@pytest.mark.parametrize("world", [2, 3])
def test_live_bytes_are_the_cast_of_the_masters(ranks: Ranks, world: int, formats: str, overlap: bool) -> None:
    """In every run `te` has all formats but tiles, which `test_tiles_are_one_byte_an_element` trains."""
    ranks(world)(train, Case(formats, overlap, te=ALL_LAYERS))


@pytest.mark.shows(host="Megatron-Core", parallel=PARALLEL, formats=["fp8_delayed", "fp8_current"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_delayed_scaling_is_left_to_transformer_engine(ranks: Ranks, world: int) -> None:
    ranks(world)(attaching.train_delayed, "delayed", ALL_LAYERS)


@pytest.mark.parametrize("formats", ["te", "tiles"])
def test_every_byte_counts(ranks: Ranks, formats: str) -> None:
    ranks(2)(attaching.flip_every_buffer, formats)


@on_ranks(2)
def test_tensors_of_two_formats_are_refused() -> None:
    """Tensors of 1x32 blocks are in `pretraining.CASES`."""

    def parameter(fmt: str, value: torch.Tensor, device: torch.device) -> Any:
        case = Weight(fmt, tuple(value.shape), ((0, value.numel()),), value.dtype)
        return nn.Parameter(tensors.hybrid(case, case))

    said = "layers.0.weight: a HybridQuantizedTensor has codes of two formats"
    hybrid = mock.patch.object(ranks_host, "te_parameter", parameter)
    with host(ALL_LAYERS), hybrid, pytest.raises(ValueError, match=said):
        build_attached(Case("fp8_current", te="0"))


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("world", worlds(2, 3, slow=[1]))
def test_tiles_are_one_byte_an_element(ranks: Ranks, world: int, overlap: bool) -> None:
    ranks(world)(attaching.train_tiles, overlap)


@on_ranks(2)
@pytest.mark.notices(
    "an optimizer over MXFP8Tensors in tiles of 32x32 is built outside, or steps before attach or after detach()",
    where="Megatron",
    answer="raises on all ranks, nothing changed",
)
def test_tiles_without_an_attachment() -> None:
    case = Case("tiles", te=ALL_LAYERS)
    with host(ALL_LAYERS):
        with integration.quantized_params():
            run = build(case)
        run.forward_and_backward(0)
        before = ranks_host.te_bytes_of(run.weights["layers.0.weight"])[1]
        with pytest.raises(RuntimeError, match="is not attached: Megatron's own copy would write over the codes"):
            run.optimizer.step()
        integration.attach(run.optimizer, run.ddp).detach()
        with pytest.raises(RuntimeError, match="was detached: nothing casts its masters"):
            run.optimizer.step()
        casts.assert_same_bytes(ranks_host.te_bytes_of(run.weights["layers.0.weight"])[1], before)
        chunks = []
        inside = "inside the same quantized_params"
        with pytest.raises(RuntimeError, match=f"MXFP8Tensors in tiles .* {inside}"), integration.quantized_params():
            chunks.append(build_chunk(case))
        with pytest.raises(RuntimeError, match=f"a MXFP8Tensor in tiles .* {inside}"), integration.quantized_params():
            build_optimizer(case, chunks)


def test_a_recipe_of_tiles(ranks: Ranks) -> None:
    ranks(1)(attaching.check_recipes)


AS_FP8 = "module.layers.[0-3].weight was attached as fp8_current"
AS_TILES = "module.layers.[01].weight was attached as mxfp8:block=32x32 and has a quantizer of mxfp8 now"
# By the formats of a model: what TransformerEngine then changes of a weight, and the error.
CHANGES: list[tuple[str, Callable[[Any], Any], str]] = [
    ("fp8_current", lambda weight: quantize_by(weight, "fp8_delayed"), AS_FP8),
    ("nvfp4", lambda weight: setattr(weight._quantizer, "stochastic_rounding", True), "stochastic_rounding is True"),
    ("nvfp4", lambda weight: setattr(weight, "_rowwise_data", None), "it has no _rowwise_data: dropped"),
    ("tiles", lambda weight: quantize_by(weight, "mxfp8"), AS_TILES),
    ("tiles", lambda weight: setattr(weight._quantizer, "with_2d_quantization", False), AS_TILES),
]


def quantize_by(weight: Any, fmt: str) -> None:
    weight.update_quantizer(tensors.quantizer(get_format(fmt), str(weight.device)))


@on_ranks(2)
@pytest.mark.notices(
    "a forward pass under another recipe gives a tensor of TransformerEngine a quantizer of another format",
    where="Megatron",
    answer="the next step raises",
)
@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_what_has_changed_since_is_refused(number: int) -> None:
    formats, change, message = CHANGES[number]
    with host(ALL_LAYERS):
        run, _ = build_attached(Case(formats, te=ALL_LAYERS))
        run.step(0)
        change(next(iter(run.te_tensors.values())))
        run.ddp.start_grad_sync()
        run.ddp.finish_grad_sync()
        with pytest.raises((ValueError, RuntimeError), match=message):
            run.optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "mxfp8:block=32x32", "fp8_block", "fp8_current", "fp8_delayed"])
def test_several_experts_in_one_tensor_are_refused(fmt: str) -> None:
    """They are by name, where the model is wrapped."""
    with host(ALL_LAYERS), integration.quantized_params():
        model = Model(configuration(), ALL_LAYERS)
        model.experts = nn.Module()
        model.experts.weight = nn.Parameter(attaching.grouped(fmt))
        with pytest.raises(ValueError, match=r"experts.weight is a GroupedTensor with the codes of several experts"):
            wrap(Case(te=ALL_LAYERS), configuration(), model)
