"""Products of a weight of three dimensions, the experts of a layer: all at once over the dequantized weight, or one by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocast
from tests import casts
from tests.devices import gpus
from tests.gemm import test_compiled
from zerocast import QuantizedWeight

EXPERTS, M, K = 3, 160, 64  # blocks of 128 rows would span two experts
ROWS = 32
ENDS = (40, 40, 96)  # the second expert has no rows
BF16 = torch.bfloat16


def experts(fmt: str, device: str = "cpu", dtype: torch.dtype = BF16) -> nn.Parameter:
    return nn.Parameter(casts.example(fmt, (EXPERTS, M, K), dtype).to(device))


def offsets() -> Tensor:
    return torch.tensor(ENDS, dtype=torch.int32)


def grouped(x: Tensor, weight: Any) -> Tensor:
    return torch._grouped_mm(x, weight, offs=offsets().to(x.device))


def batched(x: Tensor, weight: Any) -> Tensor:
    return torch.bmm(x.view(EXPERTS, ROWS, -1), weight).flatten(0, 1)


def weight_first(x: Tensor, weight: Any) -> Tensor:
    return torch.bmm(weight.transpose(1, 2), x.view(EXPERTS, ROWS, -1).mT).mT.flatten(0, 1)


def one_by_one(x: Tensor, weight: Any) -> Tensor:
    return torch.cat([rows @ weight[number] for number, rows in enumerate(x.split(ROWS))])


def of_the_last(x: Tensor, weight: Any) -> Tensor:
    """By other names, one expert alone."""
    return nn.functional.linear(x, weight.select(0, -1).t()) + torch.matmul(x, weight.unbind()[EXPERTS - 1])


PRODUCTS: list[tuple[str, Callable[[Tensor, Any], Tensor]]] = [
    *((fmt, product) for fmt in casts.FORMATS for product in (grouped, one_by_one)),
    *(("mxfp8", product) for product in (batched, weight_first, of_the_last)),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpus(1))])
@pytest.mark.parametrize("is_as_stored", [False, True])
@pytest.mark.parametrize(("fmt", "product"), PRODUCTS)
def test_products_and_gradients(
    fmt: str, product: Callable[[Tensor, Any], Tensor], is_as_stored: bool, device: str
) -> None:
    """A product sums over the blocks of the copy that it reads: of a weight `[E, M, K]` that is the rowwise copy, and of
    `[E, K, M]`, which is multiplied as stored, the columnwise copy. Input gradients read the other one.
    """
    weight: Any = experts(fmt, device)
    rows, columns = (
        weight.read(columnwise, BF16).view(weight.shape).clone().requires_grad_() for columnwise in (False, True)
    )
    features = (M, K) if is_as_stored else (K, M)
    x, grad = (torch.randn(ENDS[-1], n, dtype=BF16, device=device) for n in features)
    found, forward, backward = x.clone().requires_grad_(), x.clone().requires_grad_(), x.clone().requires_grad_()
    operands = (weight, columns, rows) if is_as_stored else (weight.mT, rows.mT, columns.mT)
    with zerocast.gemm.use("dequantize"):
        y = product(found, operands[0])
        y.backward(grad)
    expected = product(forward, operands[1])
    expected.backward(grad)
    product(backward, operands[2]).backward(grad)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(found.grad, backward.grad)
    torch.testing.assert_close(weight.grad, (columns if is_as_stored else rows).grad)
    assert weight.grad.dtype is BF16


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has torch._grouped_mm alone")
def test_the_public_name() -> None:
    weight: Any = experts("nvfp4")
    x = torch.randn(ENDS[-1], K, dtype=BF16)
    found = torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=offsets())
    assert torch.equal(found, grouped(x, weight.dequantize().transpose(-2, -1)))


def test_a_gradient_in_fp32_is_not_rounded() -> None:
    x = torch.randn(EXPERTS, ROWS, K, dtype=BF16)
    for product in (lambda weight: x.bmm(weight.mT), lambda weight: nn.functional.linear(x[1], weight[1])):
        weight: Any = experts("nvfp4")
        weight.grad_dtype = torch.float32
        product(weight).sum().backward()
        expected = x.float().sum(1, keepdim=True).expand(EXPERTS, M, K)
        assert weight.grad.dtype is torch.float32
        torch.testing.assert_close(weight.grad[1], expected[1])


def test_a_host_accumulates_what_an_expert_learns() -> None:
    weight: Any = experts("nvfp4")
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(EXPERTS, M, K), False
    nn.functional.linear(torch.ones(4, K, dtype=BF16), weight[2]).sum().backward()
    assert weight.grad_added_to_main_grad and not weight.grad.any()
    assert torch.equal(weight.main_grad, torch.tensor([1.0, 1.0, 5.0])[:, None, None].expand(EXPERTS, M, K))


def test_a_detached_reading_gives_no_gradient() -> None:
    weight: Any = experts("nvfp4")
    x = torch.randn(ROWS, K, dtype=BF16, requires_grad=True)
    for operand in (weight[1].t().detach(), weight[1].detach().t(), weight.mT.detach()[1]):
        (x @ operand).sum().backward()
        assert weight.grad is None and x.grad is not None
    (x @ weight[1].t()).sum().backward()
    assert weight.grad[1].any() and not weight.grad[0].any()


def test_autocast() -> None:
    weight: Any = experts("fp8_current", dtype=torch.float32)
    x = torch.randn(EXPERTS, ROWS, K)
    with torch.autocast("cpu", dtype=BF16):
        found = torch.bmm(x, weight.mT)
    assert found.dtype is BF16
    torch.testing.assert_close(found, torch.bmm(x.bfloat16(), weight.dequantize().bfloat16().mT))


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
    with pytest.raises(RuntimeError, match=r"t\(\) expects a weight of two dimensions, got shape \(3, 160, 64\)"):
        weight.t()
    with pytest.raises(IndexError, match="index 3 is out of range for a weight of 3 experts"):
        weight[3]
    for call, reason in (
        (lambda: torch._grouped_mm(x, weight, offs=offsets()), r"expects an input \[rows, K\], a weight"),
        (lambda: torch._grouped_mm(x, turned), "offs None"),
        (lambda: torch._grouped_mm(x.float(), turned, offs=offsets()), "expects an input of that dtype"),
        (lambda: x @ turned, r"products expect a weight of two dimensions.* as weight\[i\]"),
        (lambda: torch.bmm(x[None], turned), r"expects an input \[E, rows, K\] and a weight"),
        (lambda: torch.bmm(x.float().view(EXPERTS, ROWS, K), turned), "the input is torch.float32"),
        (lambda: torch.bmm(weight, turned), "expects one QuantizedWeight"),
        (lambda: weight[torch.tensor([0, 1])], "experts_implementation='grouped_mm'"),
        (lambda: torch.func.vmap(lambda row: nn.functional.linear(row, weight[0]))(x), "no products of single experts"),
        (lambda: weight[:1], "call dequantize"),
        (lambda: weight[0][0], "call dequantize"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            call()
    weight.grad_dtype = torch.float32
    with pytest.raises(
        RuntimeError, match=r"weight gradients of the nominal torch.bfloat16, and grad_dtype is torch.float32"
    ):
        torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets())


@pytest.mark.parametrize(
    ("fmt", "product", "is_as_stored"),
    [
        ("nvfp4", grouped, False),
        ("fp8_block", batched, True),
        ("nvfp4", one_by_one, True),
        ("fp8_block", one_by_one, False),
    ],
)
def test_a_compiled_product_keeps_no_plain_weight(
    fmt: str, product: Callable[[Tensor, Any], Tensor], is_as_stored: bool
) -> None:
    """The bits of eager, and one op of ours for a product in each graph."""
    weight: Any = experts(fmt)
    x, grad = (torch.randn(ENDS[-1], n, dtype=BF16) for n in ((M, K) if is_as_stored else (K, M)))
    function = lambda x, w: product(x, w if is_as_stored else w.transpose(-2, -1))  # noqa: E731
    compiled = test_compiled.compiled(function)
    found = []
    for call in (compiled[0], function):
        leaf = x.clone().requires_grad_()
        y = call(leaf, weight)
        found.append([y, *torch.autograd.grad(y, [leaf, weight], grad)])
    assert all(map(torch.equal, *found))
    expected = (
        {"zerocast.multiply.default": EXPERTS} if product is one_by_one else {"zerocast.multiply_experts.default": 1}
    )
    for graph in ("forward", "backward"):
        ours = {name: count for name, count in compiled[1].counts(graph).items() if name.startswith("zerocast")}
        assert ours == expected
