"""A fast recipe is FP8 weight gradients and compiled blocks, by the call that takes it."""

import copy
import io
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocast
from tests.fsdp2 import models
from tests.workers import error_of, on_ranks
from zerocast import QuantizedWeight, gemm

WIDTH = 64
FAST = zerocast.Recipe({"blocks.*.weight": "fp8_current"}, fast=True)


class Net(nn.Module):
    """Two blocks of two layers, and a head that is not quantized."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(
                models.Block(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
            )
            self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks and the head."""
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


def gradient(model: Any) -> Tensor:
    """The gradient of the first layer by tensor cores' arithmetic."""
    with gemm.use("scaled_mm"):
        model(models.batch(0, WIDTH, 0).bfloat16()).float().square().mean().backward()
    weight: Tensor = model.blocks[0][0].weight
    assert weight.grad is not None
    return weight.grad.clone()


def quantized(recipe: zerocast.Recipe) -> nn.Module:
    return zerocast.quantize_(Net().bfloat16(), recipe)


def test_it_computes_weight_gradients_in_fp8_and_compiles_each_block() -> None:
    plain = zerocast.Recipe({"blocks.*.weight": "fp8_current"})
    with mock.patch.object(nn.Module, "compile", autospec=True) as compiled:
        model = quantized(FAST)
    assert [call.args[0] for call in compiled.call_args_list] == [*model.blocks]  # type: ignore[misc]
    assert all(call.kwargs == {"fullgraph": True} for call in compiled.call_args_list)
    with gemm.use(weight_gradients="fp8"):
        expected = gradient(quantized(plain))
    found = gradient(model)
    assert torch.equal(found, expected)
    assert not torch.equal(found, gradient(quantized(plain)))


def test_copies_and_files_keep_it() -> None:
    weight = QuantizedWeight.empty((WIDTH, WIDTH), "fp8_current")
    weight.state.was_cast = weight.state.fp8_weight_gradients = True
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    for other in (copy.deepcopy(weight), torch.load(file)):
        assert other.state.fp8_weight_gradients
    inner, context = weight.__tensor_flatten__()
    tensors = {name: getattr(weight, name) for name in inner}
    rebuilt = QuantizedWeight.__tensor_unflatten__(tensors, context, weight.shape, weight.stride())
    assert rebuilt.state.fp8_weight_gradients and rebuilt.__tensor_flatten__()[1] == context


def sharded_gradient(fast: bool) -> tuple[Tensor, int]:
    """The gradient of the first layer under FSDP2, and the number of compiled blocks."""
    recipe = zerocast.Recipe({"blocks.*.weight": "fp8_current"}, fast=fast)
    model = Net()
    with mock.patch.object(nn.Module, "compile") as compiled:
        zerocast.fsdp2.prepare(model, recipe)
    return gradient(models.sharded(model, prepare=False)).to_local(), compiled.call_count  # type: ignore[attr-defined]


@on_ranks(1)
def test_under_fsdp2() -> None:
    fast, compiled = sharded_gradient(True)
    with gemm.use(weight_gradients="fp8"):
        plain, others = sharded_gradient(False)
    assert torch.equal(fast, plain)
    assert (compiled, others) == (2, 0)


@on_ranks(2)
def test_ranks_that_disagree_are_refused() -> None:
    recipe = zerocast.Recipe({"blocks.*.weight": "fp8_current"}, fast=dist.get_rank() == 0)
    sharded, replicated = Net(), Net().bfloat16()
    with mock.patch.object(nn.Module, "compile"):
        zerocast.fsdp2.prepare(sharded, recipe)
        zerocast.quantize_(replicated, recipe)
    under_fsdp2 = error_of(lambda: gradient(models.sharded(sharded, prepare=False)))
    errors = under_fsdp2, error_of(lambda: zerocast.ZeroAdamW(replicated.named_parameters(), lr=1e-3))
    assert all("FP8 weight gradients" in error for error in errors), errors


@pytest.mark.parametrize("call", [zerocast.quantize_, zerocast.fsdp2.prepare])
def test_a_model_without_blocks_is_refused_unchanged(call: Any) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    before = dict(model.named_parameters())
    said = error_of(lambda: call(model, zerocast.Recipe({"*.weight": "fp8_current"}, fast=True)))
    assert said.startswith("ValueError") and "nn.ModuleList" in said
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_a_switch_does_not_take_it() -> None:
    model = quantized(zerocast.Recipe({"blocks.*.weight": "fp8_current"}))
    with pytest.raises(ValueError, match="fast is settled when weights are quantized"):
        zerocast.switch(model, FAST)
