"""All products of an input share one quantization of it, until the input is written."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import casts
from zerocast import gemm, get_format
from zerocast.gemm import inputs, operands

BF16 = torch.bfloat16


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The tensors that were quantized, one after another."""
    seen: list[Tensor] = []
    plain = inputs.per_tensor
    monkeypatch.setattr(inputs, "per_tensor", lambda x, element: (seen.append(x.clone()), plain(x, element))[1])
    with gemm.use("scaled_mm"):
        yield seen
    gemm.forget()


def weights(count: int = 3) -> list[Any]:
    return [nn.Parameter(casts.cast_whole("fp8_current", torch.randn(48, 64), BF16)) for _ in range(count)]


def recorded(rows: int = 5) -> Tensor:
    """An input that autograd recorded."""
    return torch.randn(rows, 64, requires_grad=True).to(BF16)


def test_products_of_one_input_quantize_it_once(quantized: list[Tensor]) -> None:
    x, layers = recorded(), weights()
    found = [F.linear(x, weight) for weight in layers]
    assert len(quantized) == 1
    for y, weight in zip(found, layers, strict=True):
        assert torch.equal(y, F.linear(x.detach(), weight))


def test_what_changed_is_quantized_again(quantized: list[Tensor]) -> None:
    x, (weight, *_) = recorded(), weights()
    F.linear(x, weight.detach())
    with torch.no_grad():
        x.mul_(3)
    y = F.linear(x, weight)
    assert len(quantized) == 2 and torch.equal(y, F.linear(x.detach(), weight))
    other: Any = nn.Parameter(casts.cast_whole("fp8_current:element=e5m2", torch.randn(48, 64), BF16))
    F.linear(x, other)
    F.linear(recorded(), weight)
    assert len(quantized) == 5, "another format, another input"


@pytest.mark.parametrize("how", ["no gradient", "a leaf", "inference"])
def test_what_autograd_does_not_count_is_not_shared(quantized: list[Tensor], how: str) -> None:
    """A kernel may write there and nothing would tell."""
    (weight, *_) = weights()
    with torch.inference_mode(how == "inference"):
        x = torch.randn(5, 64).to(BF16).requires_grad_(how == "a leaf")
        for _ in range(2):
            F.linear(x, weight)
    assert len(quantized) == 2


def test_it_is_dropped_with_its_input_and_by_a_backward_pass(quantized: list[Tensor]) -> None:
    weight, *_ = weights()
    x = recorded()
    y = F.linear(x, weight.detach())
    assert operands._last is not None
    del x, y
    gc.collect()
    assert operands._last is None
    x = recorded()
    y = F.linear(x, weight)
    y.sum().backward()
    assert operands._last is None and len(quantized) == 3
    with gemm.use("dequantize"):
        F.linear(x, weight)
    assert operands._last is None, "an input as it is would keep itself alive"


@pytest.mark.parametrize(("weight_gradients", "scales"), [("fp8", (4, 2)), ("fp8_groups", (256, 2))])
def test_the_input_of_a_blocked_weight_gradient(weight_gradients: str, scales: tuple[int, int]) -> None:
    """It has blocks of 128x128, whose scales are padded to a multiple of 4, or groups of 128 tokens; tokens are padded to 16."""
    fmt, x = get_format("fp8_block"), torch.randn(200, 256).to(BF16)
    (codes, scale_inv), of_gradient = operands.of_input("block_128", x, fmt, weight_gradients)
    assert codes.shape == (208, 256) and scale_inv.shape == (208, 2)
    assert [t.shape for t in of_gradient] == [(256, 208), scales]
