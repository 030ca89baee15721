"""Products: forward from the rowwise copy, input gradient from the columnwise copy, weight gradient in its own dtype."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import casts
from zerocast import CastPlan, QuantizedWeight, quantize_master_weights
from zerocast.distributed.group import ONE_PROCESS

SHAPE = (32, 64)  # M output features, K input features
BATCHES = ((), (5,), (2, 3), (0,))


def cast(fmt: str, nominal: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter whose two directions differ where the format has two."""
    return nn.Parameter(casts.example(fmt, SHAPE, nominal))


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def directions(weight: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The dequantized rowwise and columnwise weight, `[M, K]`."""
    return weight.read(columnwise=False, dtype=dtype), weight.read(columnwise=True, dtype=dtype)


def backward(y: Tensor, gradient: Tensor, *leaves: Any) -> list[Tensor | None]:
    y.backward(gradient)
    return [leaf.grad for leaf in leaves]


def check(y: Tensor, x: Tensor, weight: Any, rowwise: Tensor, columnwise: Tensor, turned: bool) -> None:
    """`y` must be `x @ rowwise.T` (or `x @ rowwise`), and its gradients those of the same product with `columnwise`."""
    plain, grad = rowwise.detach().clone().requires_grad_(), torch.randn_like(y)
    twin = x.detach().clone().requires_grad_()
    expected = twin @ (plain if turned else plain.t())
    expected.backward(grad)
    assert torch.equal(y, expected)
    y.backward(grad)
    assert torch.equal(x.grad, grad @ (columnwise.t() if turned else columnwise))
    assert weight.grad.dtype is weight.dtype
    torch.testing.assert_close(weight.grad, plain.grad)


PRODUCTS: dict[str, tuple[Callable[[Tensor, Any], Tensor], bool]] = {
    "linear": (F.linear, False),
    "linear of t": (lambda x, w: F.linear(x, w.t()), True),
    "matmul": (torch.matmul, True),
    "matmul of t": (lambda x, w: x.matmul(w.t()), False),
    "@": (lambda x, w: x @ w, True),
    "@ of T": (lambda x, w: x @ w.T, False),
    "@ of transpose": (lambda x, w: x @ w.transpose(-2, -1), False),
    "mm": (torch.mm, True),
    "mm of t": (lambda x, w: x.mm(torch.t(w)), False),
    "mm of t of t": (lambda x, w: x.mm(w.t().t()), True),
    "addmm": (lambda x, w: torch.addmm(torch.zeros(64), x, w), True),
    "addmm of t": (lambda x, w: torch.zeros(x.shape[0], 32).addmm(x, w.t()), False),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("fmt", casts.FORMATS)
def test_products(fmt: str, name: str) -> None:
    product, turned = PRODUCTS[name]
    weight = cast(fmt)
    rowwise, columnwise = directions(weight, torch.float32)
    x = leaf(5, SHAPE[0] if turned else SHAPE[1])
    check(product(x, weight), x, weight, rowwise, columnwise, turned)


def test_the_directions_of_mxfp8_differ() -> None:
    """Else the tests above could not tell which copy a gradient came from."""
    rowwise, columnwise = directions(cast("mxfp8"), torch.float32)
    assert not torch.equal(rowwise, columnwise)
    torch.testing.assert_close(rowwise, columnwise, rtol=0.13, atol=0.02)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("nominal", casts.NOMINAL)
def test_batch_dimensions_bias_and_dtypes(batch: tuple[int, ...], nominal: torch.dtype) -> None:
    weight, bias = cast("mxfp8", nominal), leaf(SHAPE[0], dtype=nominal)
    rowwise, columnwise = directions(weight, nominal)
    x = leaf(*batch, SHAPE[1], dtype=nominal)
    y = F.linear(x, weight, bias)
    assert torch.equal(y, F.linear(x, rowwise, bias))
    assert y.dtype is nominal
    grad = torch.randn_like(y)
    grad_x, grad_weight, grad_bias = backward(y, grad, x, weight, bias)
    assert grad_x is not None and grad_weight is not None and grad_bias is not None
    assert torch.equal(grad_x, grad @ columnwise)
    rows = grad.reshape(-1, SHAPE[0])
    torch.testing.assert_close(grad_weight, rows.t() @ x.detach().reshape(-1, SHAPE[1]))
    torch.testing.assert_close(grad_bias, rows.sum(0))
    assert grad_weight.dtype is grad_bias.dtype is nominal


def test_a_weight_gradient_does_not_need_the_columnwise_copy() -> None:
    """The first layer of a model: its input wants no gradient."""
    weight = QuantizedWeight.empty(SHAPE, "nvfp4", torch.float32)
    quantize_master_weights([weight], [torch.randn(32 * 64)], [0], ONE_PROCESS)
    parameter = nn.Parameter(weight)
    F.linear(torch.randn(3, 64), parameter).sum().backward()
    assert parameter.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad(dtype: torch.dtype) -> None:
    """A host with fused gradient accumulation finds the gradient added, and a placeholder that costs one element."""
    weight: Any = cast("nvfp4", torch.bfloat16)
    weight.main_grad = torch.ones(SHAPE, dtype=dtype)
    weight.grad_added_to_main_grad = False
    x, grad = torch.randn(7, SHAPE[1]).bfloat16(), torch.randn(7, SHAPE[0]).bfloat16()
    expected = weight.main_grad.clone()
    for _ in range(2):
        F.linear(x, weight).backward(grad)
        expected += grad.float().t() @ x.float() if dtype is torch.float32 else grad.t() @ x
        assert torch.equal(weight.main_grad, expected)
    assert weight.grad_added_to_main_grad is True
    assert weight.grad.shape == SHAPE
    assert (weight.grad == 0).all()


def test_autocast() -> None:
    weight, bias = cast("mxfp8", torch.float32), leaf(SHAPE[0])
    x, grad = leaf(5, SHAPE[1]), torch.randn(5, SHAPE[0]).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, weight, bias)
    rowwise, columnwise = directions(weight, torch.bfloat16)
    assert torch.equal(y, F.linear(x.bfloat16(), rowwise, bias.bfloat16()))
    grad_x, grad_weight, grad_bias = backward(y, grad, x, weight, bias)
    assert grad_x is not None and grad_weight is not None and grad_bias is not None
    assert torch.equal(grad_x, (grad @ columnwise).float())
    assert grad_x.dtype is grad_weight.dtype is grad_bias.dtype is torch.float32


def test_autocast_of_addmm() -> None:
    weight, extra = cast("nvfp4", torch.float32), torch.randn(5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.addmm(extra, torch.randn(5, 32), weight).dtype is torch.bfloat16


@pytest.mark.notices(
    "a backward pass reads a columnwise copy that is older than the last cast", where="Weights", answer="raises"
)
@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_block", "nvfp4"])
def test_a_stale_columnwise_copy_is_never_read(fmt: str) -> None:
    weight, master = QuantizedWeight.empty(SHAPE, fmt, torch.float32), torch.randn(32 * 64)
    plan = CastPlan([weight], [master], [0], ONE_PROCESS)
    for _ in range(2):
        plan.cast()
        x = leaf(2, 64)
        y = F.linear(x, weight)
        with pytest.raises(RuntimeError, match="older than its last cast"):
            y.sum().backward()
        assert x.grad is None
        plan.post_all_gather()
        F.linear(x, weight).sum().backward()
        assert x.grad is not None


@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_block", "nvfp4"])
def test_what_is_dequantized_is_the_rowwise_copy(fmt: str) -> None:
    """To decode a transposed copy would turn it back, which takes ten times its bytes."""
    weight: Any = cast(fmt)
    _, before = directions(weight, torch.bfloat16)
    weight.columnwise_data.zero_()
    _, after = directions(weight, torch.bfloat16)
    assert torch.equal(after, before) and before.count_nonzero()


@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_delayed", "fp8_block", "nvfp4"])
def test_lazy_rebuild(fmt: str) -> None:
    """`manual_post_all_gather_processing=False`: the first backward pass makes the columnwise copy, once a cast."""
    weight, master = QuantizedWeight.empty(SHAPE, fmt, torch.float32), torch.randn(32 * 64)
    for _ in range(2):
        master.neg_()
        quantize_master_weights([weight], [master], [0], ONE_PROCESS, None, False)
        assert weight.columnwise_data is None
        for _ in range(2):
            x = leaf(2, 64)
            F.linear(x, weight).sum().backward()
            assert x.grad is not None
            assert torch.equal(x.grad, torch.ones(2, 32) @ weight.dequantize())
        assert weight.columnwise_data is not None


WRONG: dict[str, Callable[[Any], Any]] = {
    "other dtype": lambda w: F.linear(torch.randn(2, 64).bfloat16(), w),
    "other features": lambda w: F.linear(torch.randn(2, 63), w),
    "mm of more dimensions": lambda w: torch.mm(torch.randn(2, 2, 32), w),
    "addmm of more dimensions": lambda w: torch.addmm(torch.zeros(64), torch.randn(2, 2, 32), w),
    "addmm with alpha": lambda w: torch.addmm(torch.zeros(64), torch.randn(2, 32), w, alpha=0.5),
    "three dimensions": lambda w: F.linear(
        torch.randn(2, 64), QuantizedWeight.empty((2, 32, 64), "fp8_current", torch.float32)
    ),
    "t of three dimensions": lambda w: QuantizedWeight.empty((2, 32, 64), "fp8_current", torch.float32).t(),
}


@pytest.mark.parametrize("name", WRONG)
def test_products_that_are_none(name: str) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        WRONG[name](cast("fp8_current"))


# A penalty on input gradients, of inputs `x` of a product. In the first a path of the graph passes by the product, in the second
# the gradient that arrives at the product is a constant.
PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of the product": lambda x, y: y.square(),
    "of a residual path too": lambda x, y: x.sum(-1, keepdim=True).square() + y.square(),
    "of a linear head": lambda x, y: y,
}
PRODUCTS_OF = {
    "linear": (SHAPE, lambda x, w: F.linear(x, w)),
    "experts": ((2, *SHAPE), lambda x, w: torch.bmm(x.expand(2, *x.shape), w.mT)),
}


@pytest.mark.notices(
    "second derivatives of a product (`torch.autograd.functional.hvp`, a penalty on gradients)",
    where="Weights",
    answer="raises; not in compiled graphs",
)
@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
@pytest.mark.parametrize(("shape", "product"), PRODUCTS_OF.values(), ids=PRODUCTS_OF)
def test_second_derivatives_raise(shape: tuple[int, ...], product: Any, penalty: Any) -> None:
    """The weight is not differentiable twice: silence would be a wrong number."""
    plain, weight = nn.Linear(64, 64), nn.Parameter(casts.example("nvfp4", shape, torch.float32))
    for of in (lambda loss: loss.backward(), lambda loss: torch.autograd.grad(loss, [plain.weight, weight])):
        hidden = plain(x := leaf(2, 64)).tanh()
        (first,) = torch.autograd.grad(penalty(hidden, product(hidden, weight)).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="has no second derivatives"):
            of(first.square().sum())


def test_a_weight_gradient_is_not_differentiated_by_the_layers_above() -> None:
    """It depends on them by the gradient that arrives."""
    weight, head = cast("nvfp4"), nn.Linear(32, 1)
    loss = head(F.linear(torch.randn(2, 64), weight)).square().sum()
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        torch.autograd.grad(first.sum(), head.weight)


def test_gradients_of_plain_parts_are_differentiated_twice() -> None:
    """`create_graph` changes no gradient, and a second derivative that does not touch the product is torch's."""
    x, weight = leaf(2, 64), cast("nvfp4")
    (expected,) = torch.autograd.grad(F.linear(x, weight).square().sum(), x)
    (first, plain) = torch.autograd.grad(
        F.linear(x, weight).square().sum() + (z := leaf(3)).pow(3).sum(), (x, z), create_graph=True
    )
    assert torch.equal(first, expected)
    plain.sum().backward()
    torch.testing.assert_close(z.grad, 6 * z)
