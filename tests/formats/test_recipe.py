"""Recipes, and the models that they are applied to."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocast
from tests import casts
from zerocast import QuantizedWeight, Recipe, get_format, quantize_


class Block(nn.Module):
    """A bit of a transformer: linears, a norm, an embedding whose table is also the head."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(32, 96), "out": nn.Linear(32, 32, bias=False)})
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)


def formats_of(model: nn.Module) -> dict[str, str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: str(p.format) for name, p in named if isinstance(p, QuantizedWeight)}


def values_of(model: nn.Module) -> dict[str, Any]:
    return {name: p if isinstance(p, QuantizedWeight) else p.detach().clone() for name, p in model.named_parameters()}


def test_first_match_wins() -> None:
    recipe = Recipe({"*.qkv.*": "mxfp8", "attn.*": "nvfp4"}, default="fp8_block:element=e5m2")
    assert str(recipe.format_of("attn.qkv.weight")) == "mxfp8"
    assert str(recipe.format_of("attn.out.weight")) == "nvfp4"
    assert recipe.format_of("head.weight") == get_format("fp8_block", element="e5m2")
    assert str(Recipe({}).format_of("anything")) == "identity"


def test_a_recipe_is_a_plain_value() -> None:
    recipe = Recipe({"*.mlp.*": "nvfp4"}, default=get_format("fp8_current"))
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert hash(recipe) == hash(Recipe({"*.mlp.*": "nvfp4"}, default="fp8_current"))
    with pytest.raises(AttributeError):
        recipe.default = get_format("nvfp4")  # type: ignore[misc]


def test_a_recipe_with_a_misspelt_format() -> None:
    with pytest.raises(ValueError, match="unknown format"):
        Recipe({"*": "nvfp8"})


def test_quantize_swaps_what_matches() -> None:
    model = Block()
    before = values_of(model)
    assert quantize_(model, Recipe({"attn.*": "nvfp4", "mlp.0.*": "mxfp8", "mlp.2.*": "identity"})) is model
    assert formats_of(model) == {"attn.qkv.weight": "nvfp4", "attn.out.weight": "nvfp4", "mlp.0.weight": "mxfp8"}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        if isinstance(parameter, QuantizedWeight):
            expected = casts.unsharded(str(parameter.format), before[name], torch.bfloat16)
            casts.assert_same_bytes(casts.bytes_of(parameter), expected, name)
            assert torch.equal(parameter.high_precision_init_val, before[name])
            parameter.read(columnwise=True, dtype=torch.float32)
        else:
            assert torch.equal(parameter, before[name])


def test_the_nominal_dtype_can_be_chosen() -> None:
    model = Block(torch.float32)
    value = model.mlp[0].weight.detach().clone()
    quantize_(model, Recipe({"mlp.*": "nvfp4"}), dtype=torch.bfloat16)
    weight: Any = model.mlp[0].weight
    assert weight.dtype is torch.bfloat16
    assert weight.high_precision_init_val.dtype is torch.float32
    assert torch.equal(weight.high_precision_init_val, value)
    casts.assert_same_bytes(casts.bytes_of(weight), casts.unsharded("nvfp4", value, torch.bfloat16))


def test_a_delayed_scale_is_seeded() -> None:
    model = Block()
    value: Tensor = model.mlp[0].weight.detach().clone()
    quantize_(model, Recipe({"mlp.0.*": "fp8_delayed"}))
    weight: Any = model.mlp[0].weight
    scale = 448 / value.abs().max().float()
    assert weight.scale.item() == scale
    casts.assert_same_bytes(casts.bytes_of(weight), casts.unsharded("fp8_delayed", value, torch.bfloat16, scale.item()))
    assert weight.amax_history[-1].item() == value.abs().max()


def test_shared_weights_stay_shared() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    quantize_(model, Recipe({"*.weight": "nvfp4"}))
    assert model[0].weight is model[1].weight
    assert isinstance(model[0].weight, QuantizedWeight)


def test_frozen_weights_stay_frozen() -> None:
    model = Block()
    model.attn["out"].weight.requires_grad_(False)
    quantize_(model, Recipe({"attn.*": "nvfp4"}))
    assert not model.attn["out"].weight.requires_grad
    assert model.attn["qkv"].weight.requires_grad


def test_quantizing_again_changes_nothing() -> None:
    model = quantize_(Block(), Recipe({"mlp.*": "nvfp4"}))
    weight = model.mlp[0].weight
    quantize_(model, Recipe({"mlp.*": "nvfp4", "attn.*": "mxfp8"}))
    assert model.mlp[0].weight is weight
    assert formats_of(model)["attn.out.weight"] == "mxfp8"
    quantize_(model, Recipe({"embed.*": "identity"}))  # what a recipe does not name stays as it is
    assert model.mlp[0].weight is weight


@pytest.mark.parametrize(
    ("fmt", "dtype", "said"),
    [
        ("mxfp8", None, "as nvfp4 of torch.bfloat16"),
        ("nvfp4", torch.float32, "and the recipe says nvfp4 of torch.float32"),
    ],
)
def test_quantizing_again_in_another_format_is_refused(fmt: str, dtype: torch.dtype | None, said: str) -> None:
    model = quantize_(Block(), Recipe({"mlp.*": "nvfp4"}))
    before = formats_of(model)
    with pytest.raises(ValueError, match=r"mlp.0.weight is quantized already, .*" + said):
        quantize_(model, Recipe({"attn.*": "mxfp8", "mlp.*": fmt}), dtype=dtype)
    assert formats_of(model) == before


def attention(*names: str) -> nn.Module:
    """Return a model with Linears of these names side by side."""
    return nn.ModuleDict({"layer": nn.ModuleDict({name: nn.Linear(32, 32) for name in names})})


def test_a_recipe_for_an_engine_shares_what_it_fuses(caplog: pytest.LogCaptureFixture) -> None:
    model = attention("q_proj", "k_proj", "v_proj", "o_proj")
    caplog.set_level("INFO", "zerocast")
    recipe = Recipe({"*.weight": "nvfp4"}, fast=True).for_reader("vllm", model)
    fused = {f"layer.{part}_proj.weight" for part in "qkv"}
    shared = recipe.shared_amaxes([name for name, _ in model.named_parameters() if name.endswith("weight")])
    assert shared.keys() == fused and {frozenset(group.names) for group in shared.values()} == {frozenset(fused)}
    assert recipe.fast
    assert "vllm fuses now share a tensor amax: *.q_proj.weight, *.k_proj.weight, *.v_proj.weight" in caplog.text
    # Nothing is left to add.
    assert recipe.for_reader("sglang", model) is recipe


def test_formats_without_a_global_scale_share_nothing_for_an_engine() -> None:
    recipe = Recipe({"*.weight": "fp8_current"})
    assert recipe.for_reader("vllm", attention("q_proj", "k_proj", "v_proj")) is recipe


@pytest.mark.parametrize(
    ("reader", "recipe", "names", "said"),
    [
        ("tgi", Recipe({"*.weight": "nvfp4"}), ["q_proj"], "the reader is one of vllm, sglang, got 'tgi'"),
        ("sglang", Recipe({"*.weight": "mxfp8"}), ["q_proj"], r"mxfp8, and sglang 0.5.23 reads fp8_block, "),
        (
            "vllm",
            Recipe({"*.q_proj.weight": "nvfp4"}),
            ["q_proj", "k_proj"],
            r"q_proj.weight is nvfp4 and layer.k_proj.weight is not quantized: engines compute the 2 weights",
        ),
        (
            "vllm",
            Recipe({"*.weight": "nvfp4"}, share_amax=[("*.q_proj.weight", "*.k_proj.weight")]),
            ["q_proj", "k_proj", "v_proj"],
            "but share_amax has only some of them: put all of them into one group",
        ),
        (
            "vllm",
            Recipe({"*.weight": "fp8_block"}),
            ["q_proj", "k_proj"],
            "has no scales for blocks of less than 128 rows between them",
        ),
        (
            "vllm",
            Recipe({"*.weight": "nvfp4"}),
            ["experts", "gate"],
            "layer.gate.weight is nvfp4 and the weight of a router of experts",
        ),
    ],
)
def test_what_an_engine_could_not_read_is_refused_before_training(
    reader: str, recipe: Recipe, names: list[str], said: str
) -> None:
    model = attention(*names)
    before = values_of(model)
    with pytest.raises(ValueError, match=said):
        quantize_(model, recipe, serve=reader)
    with pytest.raises(ValueError, match=said):
        zerocast.fsdp2.prepare(model, recipe, serve=reader)
    assert formats_of(model) == {} and values_of(model).keys() == before.keys()


UNFIT: dict[str, tuple[Recipe, str]] = {
    "no match": (
        Recipe({"mlp.*": "nvfp4", "*.ffn.*": "nvfp4"}),
        r"'\*\.ffn\.\*' matches no weight; there are: embed.weight",
    ),
    "only a bias matches": (Recipe({"mlp.*": "nvfp4", "*.bias": "nvfp4"}), r"'\*\.bias' matches no weight"),
    "embedding": (Recipe({"mlp.*": "nvfp4", "embed.*": "nvfp4"}), "embed.weight is the table of an embedding"),
    "tied embedding": (Recipe({"mlp.*": "nvfp4", "head.*": "nvfp4"}), "table of an embedding"),
    "default on an embedding": (Recipe({"mlp.*": "nvfp4"}, default="fp8_block"), "table of an embedding"),
    "shape": (
        Recipe({"mlp.*": "nvfp4", "odd.*": "nvfp4"}),
        "odd.weight: nvfp4 needs rows that are a multiple of 16, got 5",
    ),
    "two formats": (
        Recipe({"mlp.*": "nvfp4", "one.*": "nvfp4", "two.*": "mxfp8"}),
        "two.weight is shared and its names match two",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_changes_nothing(name: str) -> None:
    recipe, message = UNFIT[name]
    model: Any = Block()
    model.odd, model.one, model.two = nn.Linear(32, 5), nn.Linear(32, 32), nn.Linear(32, 32)
    model.two.weight = model.one.weight
    with pytest.raises(ValueError, match=message):
        quantize_(model, recipe)
    assert formats_of(model) == {}


def test_a_nominal_dtype_that_is_none_changes_nothing() -> None:
    model = Block()
    with pytest.raises(TypeError, match="nominal dtype"):
        quantize_(model, Recipe({"mlp.*": "nvfp4"}), dtype=torch.float64)
    assert formats_of(model) == {}


def test_attributes_of_a_parameter_go_over_to_its_weight() -> None:
    model = nn.Linear(32, 32, bias=False)
    model.weight.partition_dim = 1
    zerocast.quantize_(model, Recipe({"weight": "fp8_block"}))
    assert model.weight.partition_dim == 1 and isinstance(model.weight, zerocast.QuantizedWeight)


def test_a_weight_expands_to_its_own_shape_only() -> None:
    model = zerocast.quantize_(nn.Linear(32, 32, bias=False), Recipe({"weight": "nvfp4"}))
    accumulator = model.weight.expand_as(model.weight).grad_fn.next_functions[0][0]
    assert type(accumulator).__name__ == "AccumulateGrad"
    with pytest.raises(RuntimeError, match="its codes have one layout"):
        model.weight.expand(2, 32, 32)
