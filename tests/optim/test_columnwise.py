"""Columnwise copies that products make, beside those that are kept: the same bits in every way that a weight is read."""

import copy
import dataclasses
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocast
from tests import casts
from zerocast import QuantizedWeight, ZeroAdamW, ZeroConfig

BF16 = torch.bfloat16
FORMATS = ("fp8_current", "fp8_delayed", "fp8_block", "nvfp4", "mxfp8")
DEMAND = ZeroConfig(bucket_size=4096)
KEPT = dataclasses.replace(DEMAND, keep_columnwise=True)


def trained(fmt: str, config: ZeroConfig, steps: int = 2) -> tuple[nn.Module, ZeroAdamW, list[Tensor]]:
    """A small model after some steps of two micro-batches each, and its losses and input gradients."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 160, bias=False), nn.GELU(), nn.Linear(160, 64, bias=False)).to(BF16)
    zerocast.quantize_(model, zerocast.Recipe({"*": fmt}))
    optimizer = ZeroAdamW(model.named_parameters(), lr=1e-2, config=config)
    found = []
    for _ in range(steps):
        for _ in range(2):
            x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
            loss = model(x).float().square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            found += [loss.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, found


def input_gradient(model: nn.Module) -> Tensor:
    """From the columnwise copies of all weights."""
    x = torch.ones(4, 64, dtype=BF16, requires_grad=True)
    model(x).float().square().mean().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("preference", ["dequantize", "scaled_mm"])
def test_the_bits_of_kept_copies(fmt, preference):
    if preference == "scaled_mm" and not fmt.startswith(("fp8_current", "fp8_delayed")):
        pytest.skip("torch emulates no other scaled product on the CPU")
    with zerocast.gemm.use(preference):
        (demand, optimizer, found), (kept, _, expected) = trained(fmt, DEMAND), trained(fmt, KEPT)
        assert all(map(torch.equal, found, expected))
        for made, held in zip(demand.parameters(), kept.parameters(), strict=True):
            assert isinstance(made, QuantizedWeight)
            assert isinstance(held, QuantizedWeight)
            assert (made.columnwise_data is None) == (fmt != "mxfp8")
            assert held.columnwise_data is not None
            casts.assert_same_bytes(casts.bytes_of(made), casts.bytes_of(held), fmt)
        assert zerocast.verify(optimizer).ok
        assert torch.equal(input_gradient(demand), input_gradient(kept))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def loaded(model: nn.Module) -> nn.Module:
    """Into a model whose own copies were kept and belong to other bytes."""
    other, optimizer, _ = trained("nvfp4", KEPT, steps=1)
    other.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_to_overwrite())
    other.load_state_dict(model.state_dict())
    zerocast.post_all_gather_processing(list(other.parameters()))  # type: ignore[arg-type]
    return other


COPIES: list[Callable[[Any], nn.Module]] = [copy.deepcopy, saved, loaded, lambda model: model.to("cpu")]


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "saved", "loaded", "to"])
def test_copies_of_a_model_have_input_gradients(copied):
    """Without an optimizer that would make columnwise copies for them."""
    model, _, _ = trained("nvfp4", DEMAND)
    assert torch.equal(input_gradient(copied(model)), input_gradient(model))


def test_nothing_is_kept_by_hand_either():
    """Copies that the next step would leave stale are not made; the optimizer that takes over decides anew."""
    model, optimizer, _ = trained("fp8_block", DEMAND)
    weights: list[Any] = list(model.parameters())
    zerocast.post_all_gather_processing(weights)
    assert all(weight.columnwise_data is None for weight in weights)
    del optimizer
    kept = ZeroAdamW(model.named_parameters(), config=KEPT)
    assert all(weight.columnwise_data is not None for weight in weights)
    del kept
    demand = ZeroAdamW(model.named_parameters(), config=DEMAND)
    assert all(weight.columnwise_data is None for weight in weights)
    assert zerocast.verify(demand).ok


@pytest.mark.parametrize("copied", [copy.deepcopy, saved, lambda model: model], ids=["deepcopy", "saved", "the same"])
@pytest.mark.parametrize("fmt", ["fp8_current", "nvfp4"])
def test_a_plan_of_the_caller_keeps_them_again(fmt, copied):
    """Weights of an optimizer that is gone, and copies of weights, are as others under a plan and under the two calls."""
    model, optimizer, _ = trained(fmt, DEMAND)
    del optimizer
    weights: list[Any] = list(copied(model).parameters())
    masters = [weight.dequantize().float().view(-1) for weight in weights]
    plan = zerocast.CastPlan(weights, masters, [0, 0])
    plan.cast()
    plan.post_all_gather()
    by_plan = [weight.columnwise_data.clone() for weight in weights]
    zerocast.quantize_master_weights(weights, masters, [0, 0])
    zerocast.post_all_gather_processing(weights)
    assert all(torch.equal(weight.columnwise_data, made) for weight, made in zip(weights, by_plan, strict=True))
