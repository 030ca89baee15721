"""Grouped products of a weight of three dimensions, the experts of a layer: torch's own, over the dequantized weight."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import casts
from tests.devices import gpus
from tests.gemm import test_compiled
from tests.matrices import lcg_matrix
from zerocast import QuantizedWeight

EXPERTS, M, K = 3, 128, 64
ENDS = (40, 40, 96)  # the second expert has no rows
BF16 = torch.bfloat16


def experts(fmt: str, device: str = "cpu") -> nn.Parameter:
    value = torch.from_numpy(lcg_matrix(EXPERTS * M, K, 0)).view(EXPERTS, M, K)
    return nn.Parameter(casts.cast_whole(fmt, value, BF16).to(device))


def offsets() -> Tensor:
    return torch.tensor(ENDS, dtype=torch.int32)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpus(1))])
@pytest.mark.parametrize("fmt", casts.FORMATS)
def test_products_and_gradients(fmt: str, device: str) -> None:
    """Forward by the rowwise copy, the input gradient by the columnwise copy, each expert's weight gradient by its rows."""
    weight: Any = experts(fmt, device)
    rows, columns = (weight.read(columnwise, BF16).view(EXPERTS, M, K) for columnwise in (False, True))
    x = torch.randn(ENDS[-1], K, dtype=BF16, device=device, requires_grad=True)
    grad = torch.randn(ENDS[-1], M, dtype=BF16, device=device)
    y = torch._grouped_mm(x, weight.bfloat16().transpose(-2, -1), offs=offsets().to(device))
    y.backward(grad)
    assert x.grad is not None and weight.grad is not None
    start = 0
    for expert, end in enumerate(ENDS):
        mine = slice(start, end)
        torch.testing.assert_close(y[mine], x[mine] @ rows[expert].t())
        torch.testing.assert_close(x.grad[mine], grad[mine] @ columns[expert])
        torch.testing.assert_close(weight.grad[expert], grad[mine].t() @ x.detach()[mine])
        start = end
    assert weight.grad.dtype is BF16 and not weight.grad[1].any()


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has torch._grouped_mm alone")
def test_the_public_name() -> None:
    weight: Any = experts("nvfp4")
    x = torch.randn(ENDS[-1], K, dtype=BF16)
    found = torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=offsets())
    assert torch.equal(found, torch._grouped_mm(x, weight.dequantize().transpose(-2, -1), offs=offsets()))


def test_what_autograd_keeps_is_quantized() -> None:
    weight: Any = experts("nvfp4")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        torch._grouped_mm(
            torch.randn(ENDS[-1], K, dtype=BF16, requires_grad=True), weight.transpose(1, 2), offs=offsets()
        )
    shapes = {tuple(tensor.shape) for tensor in kept if not isinstance(tensor, QuantizedWeight)}
    assert shapes == {(ENDS[-1], K), (EXPERTS,)}


def test_a_weight_read_the_other_way() -> None:
    weight: Any = experts("fp8_block")
    assert weight.transpose(-1, -2).transpose(1, 2) is weight
    assert weight.transpose(1, 2).shape == (EXPERTS, K, M)
    assert torch.equal(weight.transpose(1, 2).dequantize(), weight.dequantize().transpose(1, 2))


def test_what_is_refused() -> None:
    weight: Any = experts("nvfp4")
    x, turned = torch.randn(ENDS[-1], K, dtype=BF16), weight.transpose(1, 2)
    with pytest.raises(RuntimeError, match="transposed in its last two dimensions, got 0 and 1"):
        weight.transpose(0, 1)
    with pytest.raises(RuntimeError, match=r"t\(\) takes a weight of two dimensions, got shape \(3, 128, 64\)"):
        weight.t()
    for call, reason in (
        (lambda: torch._grouped_mm(x, weight, offs=offsets()), r"takes an input \[rows, K\], weight.transpose"),
        (lambda: torch._grouped_mm(x, turned), "offs None"),
        (lambda: torch._grouped_mm(x.float(), turned, offs=offsets()), "takes an input of that dtype"),
        (lambda: x @ turned, "products take a weight of two dimensions"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            call()
    weight.grad_dtype = torch.float32
    with pytest.raises(
        RuntimeError, match=r"weight gradients of the nominal torch.bfloat16, and grad_dtype is torch.float32"
    ):
        torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets())


def test_a_compiled_product_keeps_no_plain_weight() -> None:
    """The bits of eager, and one op in each graph."""
    weight: Any = experts("nvfp4")
    x, grad = (torch.randn(ENDS[-1], n, dtype=BF16) for n in (K, M))
    product = test_compiled.compiled(lambda x, w, offs: torch._grouped_mm(x, w.transpose(-2, -1), offs=offs))
    found = []
    for function in (product[0], lambda x, w, offs: torch._grouped_mm(x, w.transpose(-2, -1), offs=offs)):
        leaf = x.clone().requires_grad_()
        y = function(leaf, weight, offsets())
        found.append([y, *torch.autograd.grad(y, [leaf, weight], grad)])
    assert all(map(torch.equal, *found))
    for graph in ("forward", "backward"):
        ours = {name: count for name, count in product[1].counts(graph).items() if name.startswith("zerocast")}
        assert ours == {"zerocast.grouped_multiply.default": 1}
