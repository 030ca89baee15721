"""GEMM paths on any machine: what they hand to torch, and what comes out."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import casts
from zerocast import QuantizedWeight, gemm, get_format, quantize_
from zerocast.backends.reference import dequantize
from zerocast.gemm import block_128, inputs, per_tensor, torch_api
from zerocast.weight.linear import multiply, multiply_gradient

BF16 = torch.bfloat16


def cast(fmt: str, shape: tuple[int, int] = (48, 64), nominal: torch.dtype = BF16) -> nn.Parameter:
    spread = torch.logspace(-2, 1, shape[0])[:, None]
    return nn.Parameter(casts.cast_whole(fmt, torch.randn(shape) * spread, nominal, scale=8.0))


# --- products on the CPU, by torch's own emulation --------------------------------------------------------------------------------

PER_TENSOR = ("fp8_current", "fp8_current:element=e5m2,power_of_2_scale=True", "fp8_delayed:amax_history_len=4")
PER_TENSOR += ("nvfp4:exact_in_fp8",)


def weights_of(weight: Any) -> tuple[Tensor, Tensor]:
    return weight.read(columnwise=False, dtype=torch.float32), weight.read(columnwise=True, dtype=torch.float32)


def rounded(x: Tensor, element: str) -> Tensor:
    """`x` as the product sees it, f32."""
    codes, scale_inv = inputs.per_tensor(x.reshape(-1, x.shape[-1]), get_format("fp8_current", element=element).element)
    return (codes.float() * scale_inv).view(x.shape)


def assert_product(found: Tensor, left: Tensor, right: Tensor, bias: Tensor | float = 0.0) -> None:
    """Within the rounding of the result and 2**-16 of the sum of magnitudes for the order of summation."""
    exact = left.double() @ right.double() + bias
    bound = 2**-8 * exact.abs() + 2**-16 * (left.double().abs() @ right.double().abs()) + 1e-30
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.usefixtures("scaled_mm")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [(5,), (2, 3), (), (0,), (2, 0)])
@pytest.mark.parametrize("fmt", PER_TENSOR)
def test_per_tensor_products(fmt: str, batch: tuple[int, ...], dtype: torch.dtype) -> None:
    weight, bias = cast(fmt, nominal=dtype), torch.randn(48).to(dtype).requires_grad_()
    x = torch.randn(*batch, 64).to(dtype).requires_grad_()
    y = F.linear(x, weight, bias)
    grad = torch.randn(y.shape).to(dtype)
    y.backward(grad)
    assert y.dtype is dtype and y.shape == (*batch, 48)
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    if 0 in batch:
        assert x.grad.shape == x.shape and not weight.grad.any()
        return
    rowwise, columnwise = weights_of(weight)
    assert_product(y, rounded(x.detach(), "e4m3"), rowwise.t(), bias.detach().double())
    element = "e4m3" if "e5m2" in fmt else "e5m2"
    assert_product(x.grad, rounded(grad, element), columnwise)
    rows = grad.reshape(-1, 48)
    assert torch.equal(weight.grad, rows.t() @ x.detach().reshape(-1, 64)), "the weight gradient is the usual product"
    assert torch.equal(bias.grad, rows.sum(0))


@pytest.mark.usefixtures("scaled_mm")
@pytest.mark.parametrize("columnwise", [False, True])
def test_an_exact_nvfp4_product_is_the_fp8_product_of_the_dequantized_weight(columnwise: bool) -> None:
    weight: Any = cast("nvfp4:exact_in_fp8")
    weight.state.columnwise_on_demand = True
    tensor_scale = 8 * (weight.amax / 2688)
    values = weight.read(columnwise=False, dtype=torch.float32)
    fp8 = (values / tensor_scale).to(torch.float8_e4m3fn)
    assert torch.equal(fp8.float() * tensor_scale, values)
    x = torch.randn(16, 48 if columnwise else 64).to(BF16)
    operands = per_tensor.quantize(x, weight.format, gradient=columnwise)
    found = per_tensor.multiply(operands, weight, columnwise, False, None, BF16)
    b = fp8 if columnwise else fp8.t()
    b = b.t().contiguous().t()  # column by column
    options = {"out_dtype": BF16, "use_fast_accum": not columnwise}
    assert torch.equal(found, torch._scaled_mm(operands[0], b, operands[1], tensor_scale, **options))


@pytest.mark.parametrize("rows", [(5,), (2, 3), (), (0,)])
@pytest.mark.parametrize("fmt", PER_TENSOR)
def test_quantized_weight_gradients(fmt: str, rows: tuple[int, ...]) -> None:
    """The product of both operands as the other products see them; FP32 and `main_grad` too; the quantized input is kept."""
    weight: Any = cast(fmt)
    weight.grad_dtype = torch.float32
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(48, 64), False
    x = torch.randn(*rows, 64).to(BF16)
    with gemm.use("scaled_mm", weight_gradients="fp8"):
        y = F.linear(x, weight)
    grad = torch.randn(y.shape).to(BF16)
    (found,) = torch.autograd.grad(y, weight, grad, retain_graph=True)
    if 0 in rows:
        assert not found.any()
        return
    assert not found.any() and weight.grad_added_to_main_grad, "a placeholder"
    element = "e4m3" if "e5m2" in fmt else "e5m2"
    left, right = (rounded(t.reshape(-1, t.shape[-1]), e) for t, e in ((grad, element), (x, "e4m3")))
    once = weight.main_grad.clone()
    assert_product(once, left.t(), right, 0.0)
    torch.autograd.grad(y, weight, grad, retain_graph=True)
    assert torch.equal(weight.main_grad, 2 * once)
    del weight.grad_added_to_main_grad
    (found,) = torch.autograd.grad(y, weight, grad)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, once, rtol=1e-5, atol=1e-5)


def test_only_where_a_path_has_it() -> None:
    weight, x, grad = cast("fp8_current"), torch.randn(5, 64).to(BF16), torch.randn(5, 48).to(BF16)
    with gemm.use(weight_gradients="fp8"):
        F.linear(x, weight).backward(grad)
    assert weight.grad is not None and torch.equal(weight.grad, grad.t() @ x)
    with pytest.raises(ValueError, match="one of nominal, fp8, fp8_groups, got 'fp4'"):
        gemm.use("dequantize", weight_gradients="fp4")
    assert weight.gemm_choice().reason != "asked for"  # type: ignore[operator]


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("tokens", [256, 200])
@pytest.mark.parametrize("power_of_2", [False, True])
def test_block_weight_gradients(power_of_2: bool, tokens: int) -> None:
    """Both operands in groups of 128 tokens, or the input in blocks of 128x128, each quantized from BF16; the blocks are as
    exact for every feature, of magnitudes three orders apart within a block.
    """
    fmt = get_format("fp8_block", power_of_2_scale=power_of_2)
    grad, x = (torch.randn(tokens, n).to(BF16) * torch.logspace(-3, 3, n).to(BF16) for n in (128, 256))
    exact, errors = grad.float().t() @ x.float(), []
    _, of_grad = block_128.quantize_both_ways(grad, fmt, gradient=True, is_square=False)
    for is_square in (False, True):
        _, of_x = block_128.quantize_both_ways(x, fmt, gradient=False, is_square=is_square)
        error = block_128.weight_gradient(of_grad, of_x, torch.float32) - exact
        assert (error.norm(dim=1) <= 0.15 * exact.norm(dim=1)).all(), "no row is lost to the scale of another"
        errors.append(error.norm(dim=0) / exact.norm(dim=0))
    assert errors[0].mean() > 0.001 and not torch.equal(*errors)
    assert abs(errors[1].mean() / errors[0].mean() - 1) < 0.12 and errors[1].max() < 2 * errors[0].max()


@pytest.mark.usefixtures("scaled_mm")
def test_what_autograd_keeps() -> None:
    """The input and the quantized weight: no code of the input and nothing dequantized outlives the forward pass."""
    kept: list[Tensor] = []
    weight, x = cast("fp8_current"), torch.randn(4, 64).to(BF16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        F.linear(x, weight)
    assert [type(t) for t in kept] == [Tensor, QuantizedWeight] and kept[0].data_ptr() == x.data_ptr()
    assert kept[1].state is weight.state
    kept.clear()
    with (
        gemm.use(weight_gradients="fp8"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        F.linear(x, weight)
    assert [t.dtype for t in kept] == [torch.float8_e4m3fn, torch.float32, BF16] and kept[0].shape == (64, 16)


@pytest.mark.usefixtures("scaled_mm")
def test_inputs_and_gradients_of_any_strides() -> None:
    weight = cast("fp8_current")
    x = torch.randn(64, 6).to(BF16).t().requires_grad_()
    y = F.linear(x, weight)
    assert torch.equal(y, F.linear(x.detach().contiguous(), weight))
    (found,) = torch.autograd.grad(y.sum(), x)  # an expanded gradient, all strides 0
    assert_product(found, torch.ones(6, 48), weights_of(weight)[1])


@pytest.mark.usefixtures("scaled_mm")
def test_an_input_gradient_by_operators() -> None:
    """torch.func and DTensor compute it so: its codes have the element of gradients there too."""
    weight, x, grad = cast("fp8_current"), torch.randn(4, 64).to(BF16).requires_grad_(), torch.randn(4, 48).to(BF16)
    F.linear(x, weight).backward(grad)
    _, pull_back = torch.func.vjp(lambda x: F.linear(x, weight), x.detach())
    assert torch.equal(pull_back(grad)[0], x.grad)


@pytest.mark.usefixtures("scaled_mm")
def test_autocast() -> None:
    weight, x = cast("fp8_current", nominal=torch.float32), torch.randn(4, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="not float32"):
        F.linear(x, weight)
    with torch.autocast("cpu", BF16):
        y = F.linear(x, weight, torch.randn(48))
    y.float().sum().backward()
    assert y.dtype is BF16 and x.grad is not None and x.grad.dtype is torch.float32


@pytest.mark.usefixtures("scaled_mm")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    weight, x = cast("fp8_current"), torch.randn(4, 64).to(BF16)
    x[1, 7] = bad
    assert F.linear(x, weight).isnan().all(), "one scale: nothing of this tensor can be trusted"
    x = torch.randn(4, 64).to(BF16).requires_grad_()
    grad = torch.ones(4, 48).to(BF16)
    grad[3, 0] = bad
    F.linear(x, weight).backward(grad)
    assert x.grad is not None and x.grad.isnan().all()


# --- what the other paths hand to torch -------------------------------------------------------------------------------------------


def direction(weight: QuantizedWeight, columnwise: bool) -> Tensor:
    """The weight `[M, K]` in FP32, from the executable specification."""
    value = torch.empty(weight.matrix_shape)
    data, scale_inv = weight.direction(columnwise)
    rows, columns = weight.matrix_shape
    dequantize(weight.format, data, scale_inv, weight.amax, rows, columns, columnwise, value)
    return value


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("rows", [(32,), (37,), (2, 5), (0,)])
@pytest.mark.parametrize(
    ("path", "fmt", "shape", "loss"),
    [
        ("block_128", "fp8_block", (256, 640), 0.04),
        ("block_128", "fp8_block:power_of_2_scale=False", (128, 128), 0.04),
        ("block_128", "mxfp4", (256, 640), 0.04),
        ("mxfp8", "mxfp8", (160, 96), 0.04),
        ("mxfp8", "mxfp8:block=32x32", (160, 96), 0.04),
        ("mxfp4", "mxfp4", (160, 96), 0.14),
        ("mxfp4", "mxfp4:exact_in_fp8=False", (160, 96), 0.14),
        ("nvfp4", "nvfp4", (160, 96), 0.14),
    ],
)
def test_operands_multiply_to_the_product(path: str, fmt: str, shape: tuple[int, int], loss: float, rows: Any) -> None:
    """Against an emulation of the documented interface: right up to the rounding of the input, in both directions."""
    weight: Any = cast(fmt, shape)
    x, grad = (torch.randn(*rows, n).to(BF16) for n in (shape[1], shape[0]))
    bias = torch.randn(shape[0]).to(BF16)
    y, dx = multiply(path, x, weight, bias=bias), multiply_gradient(path, grad, weight)
    assert y.shape == grad.shape and dx.shape == x.shape and y.dtype is dx.dtype is BF16
    for found, exact in (
        (y - bias, x.float() @ direction(weight, False).t()),
        (dx, grad.float() @ direction(weight, True)),
    ):
        error = (found.float() - exact).norm() / exact.norm().clamp(min=1e-9)
        assert error < loss, f"relative error {error:.4f}"
        assert exact.numel() == 0 or error > loss / 40, "the input was quantized"


def four_and_eight_bits() -> tuple[Any, Any]:
    """An mxfp4 weight, and its exact value stored as fp8_block."""
    spread = torch.exp2(torch.randint(-12, 13, (8, 20)).float()).repeat_interleave(32, 0).repeat_interleave(32, 1)
    weight: Any = nn.Parameter(casts.cast_whole("mxfp4", torch.randn(256, 640) * spread, torch.float32))
    exact = weight.read(columnwise=False, dtype=torch.float32)
    eight: Any = nn.Parameter(casts.cast_whole("fp8_block", exact, torch.float32))
    assert torch.equal(eight.read(columnwise=False, dtype=torch.float32), exact)
    return weight, eight


def exact_nvfp4_and_blocks() -> tuple[Any, Any]:
    """A weight of exact nvfp4, and an fp8_block weight with the same FP8 values and the scale of the tensor."""
    weight: Any = nn.Parameter(casts.cast_whole("nvfp4:exact_in_fp8", torch.randn(256, 640), torch.float32))
    tensor_scale = 8 * (weight.amax / 2688)
    codes = (weight.read(columnwise=False, dtype=torch.float32) / tensor_scale).to(torch.float8_e4m3fn)
    # Any cast makes the buffers, which are then overwritten.
    eight: Any = nn.Parameter(casts.cast_whole("fp8_block:power_of_2_scale=False", torch.ones(256, 640), torch.float32))
    eight.state.columnwise_on_demand = True
    eight.state.buffers["rowwise_data"].copy_(codes.view(torch.uint8))
    eight.state.buffers["rowwise_scale_inv"].fill_(float(tensor_scale))
    return weight, eight


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize("make", [four_and_eight_bits, exact_nvfp4_and_blocks])
def test_products_are_those_of_the_same_values_in_fp8_block(make: Any, on_demand: bool) -> None:
    """They are to the bit by path block_128, gradients too."""
    weight, eight = make()
    weight.state.columnwise_on_demand = on_demand
    x, grad, bias = torch.randn(37, 640).to(BF16), torch.randn(37, 256).to(BF16), torch.randn(256).to(BF16)
    found, expected = (
        (multiply("block_128", x, w, bias=bias), multiply_gradient("block_128", grad, w)) for w in (weight, eight)
    )
    assert all(map(torch.equal, found, expected)) and found[0].any()


@pytest.mark.parametrize("power_of_2", [False, True])
def test_inputs_have_scales_of_the_kind_that_the_weight_has(power_of_2: bool) -> None:
    weight: Any = cast(f"fp8_block:power_of_2_scale={power_of_2}", (128, 256))
    _, scale_inv = block_128.quantize(torch.randn(16, 256).to(BF16), weight.format, gradient=False)
    assert (scale_inv.frexp()[0] == 0.5).all() == power_of_2


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize(
    ("path", "fmt"), [("block_128", "fp8_block"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4")]
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so_in_groups(path: str, fmt: str, bad: float) -> None:
    x = torch.randn(16, 256).to(BF16)
    x[3, 200] = bad
    y = multiply(path, x, cast(fmt, (128, 256)))
    assert y[3].isnan().all()
    others = torch.cat((y[:3], y[4:]))
    assert others.isnan().all() if fmt == "nvfp4" else others.isfinite().all()


@pytest.mark.parametrize("swizzle", [(), ("SWIZZLE_32_4_4", "NO_SWIZZLE")])
def test_the_operator_is_given_what_the_function_gives_it(monkeypatch: pytest.MonkeyPatch, swizzle: Any) -> None:
    """So that a torch whose function changes is noticed here."""
    given: list[tuple[Any, ...]] = []

    def note(*arguments: Any) -> Tensor:
        given.append(arguments)
        return torch.zeros(())

    monkeypatch.setattr(torch, "_scaled_mm_v2", note)
    a, scales, names = torch.zeros(16, 16), [torch.ones(1), torch.ones(1)], ["BlockWise1x16", "TensorWise"]
    torch_api.scaled_mm(a, scales, a, scales, names, names[::-1], None, BF16, swizzle)
    functional = torch.nn.functional
    members = [getattr(functional.ScalingType, name) for name in names]
    swizzles = [getattr(functional.SwizzleType, name) for name in swizzle] or None
    functional.scaled_mm(a, a, scales, members, scales, members[::-1], swizzles, swizzles, output_dtype=BF16)
    direct, by_function = given
    assert str(direct) == str(by_function[:10])
    assert [*by_function[10:]] == [(), False]  # as the operator has them by itself


def test_a_cpu_without_bf16_instructions_multiplies_in_fp32(monkeypatch, caplog):
    """Forward pass and both gradients are the FP32 products of the bf16 operands, rounded; it is said once."""
    monkeypatch.setattr(gemm.plain, "HAS_BF16_PRODUCTS", False)
    gemm.plain.log_fp32_products.cache_clear()
    caplog.set_level("INFO", "zerocast.gemm")
    for _ in range(2):
        module = torch.nn.Linear(64, 32, bias=False).bfloat16()
        quantize_(module, {"weight": "nvfp4"})
        x = torch.randn(8, 64).bfloat16().requires_grad_()
        grad = torch.randn(8, 32).bfloat16()
        y = module(x)
        y.backward(grad)
        rowwise, columnwise = (module.weight.read(way, torch.bfloat16).float() for way in (False, True))
        assert torch.equal(y, (x.float() @ rowwise.T).bfloat16())
        assert torch.equal(x.grad, (grad.float() @ columnwise).bfloat16())
        assert torch.equal(module.weight.grad, (grad.float().T @ x.float()).bfloat16())
    said = [record for record in caplog.records if "no bf16 instructions" in record.getMessage()]
    assert len(said) == 1


@pytest.mark.parametrize(
    ("onednn", "avx2", "avx512_bf16", "amx", "expected"),
    [
        (False, True, True, True, False),
        (True, True, False, False, False),  # AVX-512 alone, for which oneDNN emulates them
        (True, True, True, False, True),
        (True, True, False, True, True),
        (True, False, False, False, True),  # no x86 CPU
    ],
)
def test_bf16_products_are_those_of_instructions(monkeypatch, onednn, avx2, avx512_bf16, amx, expected):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: avx2)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert gemm.plain._has_bf16_products() is expected
