"""The mistakes of a first hour, and what is said of them; what `print` shows of a model, a recipe and a plan."""

import copy
import pickle
import pydoc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import zerocast
from tests.workers import error_of, on_ranks
from zerocast import CastPlan, Recipe, ZeroAdamW, quantize_

FP8 = {"*.weight": "fp8_current"}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, bias=False))


def quantized() -> nn.Sequential:
    model = net()
    quantize_(model, FP8)
    return model


def of_another_shape() -> None:
    """Load a state of a model with other shapes."""
    small, large = (ZeroAdamW(quantize_(nn.Sequential(nn.Linear(n, 32)), FP8).named_parameters()) for n in (16, 32))
    large.load_state_dict(small.state_dict())


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "format in place of a recipe": (
        lambda: quantize_(net(), "nvfp4"),  # type: ignore[arg-type]
        "TypeError: a recipe maps patterns of parameter names to formats, such as {'*.weight': 'fp8_block'}, got 'nvfp4'",
    ),
    "list of formats": (lambda: Recipe(["nvfp4"]), "TypeError: a recipe maps patterns"),  # type: ignore[arg-type]
    "unknown format": (
        lambda: zerocast.fsdp2.prepare(net(), {"*": "nvfp5"}),
        "ValueError: unknown format 'nvfp5'; did you mean 'nvfp4'? known: fp8_block",
    ),
    "lr as text": (lambda: ZeroAdamW(net().named_parameters(), lr="1e-3"), "TypeError: lr is a number, got '1e-3'"),  # type: ignore[arg-type]
    "lr as text under FSDP2": (
        lambda: zerocast.fsdp2.FusedAdamW(zerocast.fsdp2.prepare(net(), FP8).parameters(), lr="1e-3"),  # type: ignore[arg-type]
        "TypeError: lr is a number, got '1e-3'",
    ),
    "no names": (lambda: ZeroAdamW(net().parameters()), "TypeError: parameters must have names"),
    "convolution": (
        lambda: quantize_(nn.Sequential(nn.Conv2d(16, 16, 3)), FP8),
        "ValueError: 0.weight is the kernel of a convolution and cannot be fp8_current: match it with 'identity'",
    ),
    "convolution of a shape that no format takes": (
        lambda: quantize_(nn.Sequential(nn.Conv2d(16, 16, 3)), {"*.weight": "nvfp4"}),
        "ValueError: 0.weight is the kernel of a convolution and cannot be nvfp4: match it with 'identity'",
    ),
    "one beta": (
        lambda: ZeroAdamW(net().named_parameters(), betas=0.9),  # type: ignore[arg-type]
        "TypeError: betas are two numbers, got 0.9",
    ),
    "betas as text": (
        lambda: ZeroAdamW(net().named_parameters(), betas=("0.9", "0.95")),  # type: ignore[arg-type]
        "TypeError: betas are two numbers, got ('0.9', '0.95')",
    ),
    "prepare after quantize_": (
        lambda: zerocast.fsdp2.prepare(quantized(), FP8),
        "ValueError: 0.weight is a QuantizedWeight, and FSDP2 shards masters: call prepare and not quantize_",
    ),
    "plan without lists": (
        lambda: CastPlan(quantized()[0].weight, torch.zeros(1024), 0),  # type: ignore[arg-type]
        "TypeError: model_weights is a list with one entry per weight, got a QuantizedWeight",
    ),
    "state of another model": (
        of_another_shape,
        "ValueError: 0.weight has shape (32, 16) in the state and (32, 32) in the optimizer",
    ),
    "fully_shard after quantize_": (
        lambda: quantized()[0].weight.chunk(2),
        "zerocast.fsdp2.prepare, not quantize_, before fully_shard",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str) -> None:
    make, said = MISTAKES[mistake]
    assert said in error_of(make)


@on_ranks(2)
def test_quantize_after_fully_shard() -> None:
    model = net()
    fully_shard(model)
    said = "ValueError: 0.weight is sharded already: call zerocast.fsdp2.prepare, not quantize_, before fully_shard"
    assert error_of(lambda: quantize_(model, FP8)) == said


@pytest.mark.parametrize("prepare", [quantize_, zerocast.fsdp2.prepare])
def test_a_mapping_stands_for_a_recipe_and_print_shows_formats(prepare: Callable[..., nn.Module]) -> None:
    model = prepare(net(), {"0.weight": "fp8_block"})
    assert "in_features=32, out_features=32, bias=True, weight=fp8_block)" in repr(model)
    assert "in_features=32, out_features=32, bias=False)" in repr(model)


def test_copies_show_their_own_formats() -> None:
    model = quantized()
    copied = copy.deepcopy(model)
    copied[0].weight = nn.Parameter(torch.zeros(32, 32))
    assert repr(copied[0]) == repr(net()[0]) != repr(model[0])
    assert repr(pickle.loads(pickle.dumps(model[0]))).startswith("Linear(in_features=32")


def test_help_begins_with_every_public_name() -> None:
    assert zerocast.__doc__ and [name for name in zerocast.__all__ if name not in zerocast.__doc__] == []


def test_help_and_completion_show_no_internal_module() -> None:
    public = {*zerocast.__all__, "serve"}
    assert {name for name in dir(zerocast) if not name.startswith("__")} == public
    shown = pydoc.render_doc(zerocast, renderer=pydoc.plaintext).partition("\nSUBMODULES\n")[2].partition("\n\n")[0]
    assert shown.split() == []


def test_recipes_and_plans_are_short() -> None:
    assert repr(Recipe(FP8)) == "Recipe({'*.weight': 'fp8_current'}, default='identity')"
    weights = [layer.weight for layer in quantized()]
    plan = CastPlan(weights, [torch.zeros(1024), torch.zeros(512)], [0, 0])
    assert repr(plan) == f"CastPlan(2 x fp8_current; 1,536 of 2,048 elements on rank 0 of 1, backend {plan.backend})"


@on_ranks(2)
def test_ranks_with_other_settings_read_what_differs() -> None:
    rank = torch.distributed.get_rank()
    groups = [
        {"params": [item], "weight_decay": 0.1 * rank * index} for index, item in enumerate(net().named_parameters())
    ]
    config = zerocast.ZeroConfig(bucket_size=1 << (20 + rank))
    said = (
        "ValueError: settings differ between ranks: bucket_size is 1048576 on rank 0 and 2097152 on rank 1, "
        "weight_decay of group 1 is 0.0 on rank 0 and 0.1 on rank 1, weight_decay of group 2 is 0.0 on rank 0 and 0.2 on rank 1"
    )
    assert error_of(lambda: ZeroAdamW(groups, lr=1e-3, config=config)) == said
