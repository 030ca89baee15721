"""TransformerEngine's modules under FSDP2: the tensors that they see, how long those live, and what is refused."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import zerocast
from tests.transformer_engine import gathering
from tests.transformer_engine.host_on_cpu import integration, needs_te
from tests.workers import Ranks
from zerocast.fsdp2.parameter import MasterParameter

pytestmark = needs_te

FORMATS = (*gathering.RECIPES, "mxfp8:block=32x32", "nvfp4:exact_in_fp8")
EVERY_MODULE = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("fmt", FORMATS)
def test_modules_compute_with_their_own_tensors(ranks: Ranks, world: int, fmt: str) -> None:
    """Class, quantizer and bytes, over FSDP2's memory, after each step; nothing stays once it is resharded."""
    kinds = EVERY_MODULE if fmt == "fp8_current" else ("Linear", "LayerNormLinear")
    for wrong in ranks(world)(gathering.train, fmt, kinds):
        assert wrong == []


def test_copies_that_the_host_leaves_are_dropped(ranks: Ranks) -> None:
    """GroupedLinear never clears the transposes that its backward pass makes, here no module does; weights may be frozen."""
    for wrong in ranks(1)(gathering.train, "fp8_current", ("Linear", "GroupedLinear"), False):
        assert wrong == []
    assert ranks(1)(gathering.frozen) == [[]]


def test_inputs_that_live_as_long_as_the_model(ranks: Ranks) -> None:
    """A parameter as the input: each pass drops its copies, and no pass leaves a hook more."""
    for grown, copies in ranks(2)(gathering.of_long_lived_inputs, 10):
        assert not grown and not copies


def test_a_class_that_derives_from_the_hosts() -> None:
    """As Megatron's TELinear does: its forward pass is the host's, and so is what it multiplies."""
    with gathering.host():
        layer = type("Mine", (gathering.module("module.linear").Linear,), {})(
            64, 64, device="cpu", params_dtype=torch.float32
        )
        model = nn.ModuleDict({"layer": layer})
        with pytest.raises(
            ValueError, match="weight of a Mine is multiplied as one of transformer_engine's own tensors"
        ):
            zerocast.fsdp2.prepare(model, zerocast.Recipe({"*weight": "fp8_current"}))
        assert not isinstance(layer.weight, MasterParameter)
        presented = integration().present(layer, "weight", layer.weight)
        assert type(presented).__name__ == "GatheredWeight"


@pytest.mark.parametrize("fmt", ["fp8_current", "mxfp8"])
def test_weights_that_stay_gathered(ranks: Ranks, fmt: str) -> None:
    """What TransformerEngine clears after a backward pass is there again in the next one; after a step copies are new."""
    for wrong in ranks(2)(gathering.left_gathered, fmt):
        assert wrong == []


def test_meta_device_and_recomputation(ranks: Ranks) -> None:
    """`reset_parameters` of sharded modules writes masters; a recomputed forward pass changes nothing."""
    for wrong in [*ranks(2)(gathering.by_meta_device), *ranks(2)(gathering.recomputed)]:
        assert wrong == []


@pytest.mark.notices(
    "te.autocast computes in another format than that of the gathered weights",
    where="TransformerEngine",
    answer="raises before the pass, and names both formats",
)
def test_the_recipe_in_use_must_be_that_of_the_weights(ranks: Ranks) -> None:
    """Each recipe takes the weights that it would cast, and no others, whatever its options are."""
    for fmt, recipe in gathering.RECIPES.items():
        assert ranks(1)(gathering.under_recipe, fmt, recipe, {}) == [""]
    (error,) = ranks(1)(gathering.under_recipe, "fp8_block", "Float8CurrentScaling", {})
    assert "is gathered as fp8_block" in error
    assert "fp8_current: pass that format to zerocast.fsdp2.prepare" in error
    (error,) = ranks(1)(gathering.under_recipe, "nvfp4", "NVFP4BlockScaling", {"disable_2d_quantization": True})
    assert "16x16 tiles" in error


def refusal(layer: Any, fmt: str = "fp8_current") -> str:
    """The error of `prepare`, which leaves the model as it was."""
    model = nn.Module()
    model.layer = layer
    before = dict(model.named_parameters())
    with pytest.raises((TypeError, ValueError)) as caught:
        zerocast.fsdp2.prepare(model, zerocast.Recipe({"*weight*": fmt}), present=integration().present)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not layer._forward_pre_hooks
    return str(caught.value)


def test_exact_scales_are_said_not_to_be_the_hosts(caplog: pytest.LogCaptureFixture) -> None:
    """Once, since its own quantizer, which the gathered tensors have, would make other bytes of the same masters."""
    with gathering.host(), caplog.at_level("INFO"):
        gathered = importlib.import_module("zerocast.integrations.transformer_engine.gathered_weights")
        gathered._log_exact_scales.cache_clear()
        for fmt, count in (("nvfp4", 0), ("nvfp4:exact_in_fp8", 1), ("nvfp4:exact_in_fp8", 1)):
            gathered.GatheredWeight().check(zerocast.get_format(fmt))
            assert (
                len([line for line in caplog.messages if "NVFP4Quantizer would make the scales of plain" in line])
                == count
            )


def test_what_is_refused() -> None:
    """Before anything has changed, with what to do instead."""
    with gathering.host():
        linear = gathering.module("module.linear").Linear
        options: dict[str, Any] = {"device": "cpu", "params_dtype": torch.float32}
        split = linear(64, 96, bias=False, parameters_split=("query", "key", "value"), **options)
        assert "fuse_qkv_params=True" in refusal(split)
        assert "fuse_wgrad_accumulation=False" in refusal(linear(64, 64, fuse_wgrad_accumulation=True, **options))
        quantized = linear(64, 64, **options)
        quantized.primary_weights_in_fp8 = True
        assert "outside of te.quantized_model_init" in refusal(quantized)
        assert "no tensor that holds mxfp4" in refusal(linear(64, 64, **options), "mxfp4")
