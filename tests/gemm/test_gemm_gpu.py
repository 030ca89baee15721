"""FP8 products on a GPU: the kernels that ran, the numbers that came out, and what happens where they cannot run."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import zerocast
from tests import devices
from zerocast import gemm
from zerocast.formats import Element, FormatSpec
from zerocast.formats.element import E4M3, E5M2
from zerocast.gemm import inputs, torch_api
from zerocast.quantize import cast_whole

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

BF16 = torch.bfloat16
OP = {"per_tensor": "aten::_scaled_mm", "block_128": "aten::_scaled_mm_v2"}
CASES = [
    ("per_tensor", "fp8_current", (272, 528)),
    ("per_tensor", "fp8_delayed:amax_history_len=4", (512, 640)),
    ("per_tensor", "fp8_current:element=e5m2,power_of_2_scale=True", (128, 1024)),
    ("per_tensor", "nvfp4:exact_in_fp8", (272, 528)),
    ("block_128", "fp8_block", (256, 640)),  # 5 and 2 blocks: scale rows padded to 8 and 4
    ("block_128", "fp8_block", (128, 128)),
    ("block_128", "fp8_block:power_of_2_scale=False", (384, 1024)),
    ("block_128", "mxfp4", (256, 640)),
    ("block_128", "nvfp4:exact_in_fp8", (256, 640)),
]
ONE_OF_EACH = [("per_tensor", "fp8_current"), ("block_128", "fp8_block"), ("block_128", "mxfp4")]


@pytest.fixture(autouse=True)
def preferred(request: pytest.FixtureRequest) -> Iterator[None]:
    """A weight that two paths can multiply takes the one that a test names."""
    parameters = getattr(request.node, "callspec", None)
    path = parameters.params.get("path") if parameters else None
    with gemm.use("block_128" if path == "block_128" else "auto"):
        yield


def has_power_of_2_scales(fmt: FormatSpec) -> bool:
    """Return whether the scales of inputs are powers of two, as those of the weight's blocks are."""
    return fmt.power_of_2_scale or fmt.scale_group is not None


def parameter(fmt: str, shape: tuple[int, int], dtype: torch.dtype = BF16) -> Any:
    """A weight whose rows differ in magnitude, so that a scale in the wrong place shows."""
    weight = zerocast.QuantizedWeight.empty(shape, fmt, dtype, "cuda")
    if weight.scale is not None:
        weight.scale.fill_(16.0)
    cast_whole(weight, torch.randn(shape, device="cuda") * torch.logspace(-1, 1, shape[0], device="cuda")[:, None])
    return nn.Parameter(weight)


def needs(path: str, weight: Any) -> None:
    """Skip where this GPU has no such tensor cores; on the GPUs that the path is for, never."""
    choice = weight.gemm_choice()
    major = torch.cuda.get_device_capability()[0]
    if choice.path != path and not (major == 9 or (path == "per_tensor" and major > 9)):
        pytest.skip(choice.reason)
    assert choice == (path, "")


def traced(function: Callable[[], Any]) -> tuple[set[str], set[str]]:
    """Names of the operators and of the GEMM kernels that ran."""
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    events = profiler.events() or []
    kernels = {event.name for event in events if event.device_type == DeviceType.CUDA}
    operators = {event.name for event in events if event.device_type == DeviceType.CPU}
    return operators, {name for name in kernels if re.search("gemm|nvjet|cutlass|xmma", name)}


@pytest.mark.parametrize(("path", "fmt", "shape"), CASES)
def test_the_kernel_that_ran(path: str, fmt: str, shape: tuple[int, int]) -> None:
    weight, x = parameter(fmt, shape), torch.randn(256, shape[1], device="cuda", dtype=BF16)
    needs(path, weight)
    frozen, plain = weight.detach(), weight.dequantize()
    grad = torch.randn(256, shape[0], device="cuda", dtype=BF16)
    operators, kernels = traced(lambda: F.linear(x, frozen))
    _, of_bf16 = traced(lambda: F.linear(x, plain))
    assert OP[path] in operators
    assert not operators & {"zerocast::dequantize", "aten::linear", "aten::mm", "aten::addmm"}
    assert kernels and of_bf16 and not kernels & of_bf16, (kernels, of_bf16)

    needs_x = x.clone().requires_grad_()
    y = F.linear(needs_x, frozen)
    operators, _ = traced(lambda: torch.autograd.grad(y, needs_x, grad, retain_graph=True))
    assert OP[path] in operators and not operators & {"zerocast::dequantize", "aten::mm"}

    with gemm.use("dequantize"):
        operators, kernels = traced(lambda: F.linear(x, frozen))
    assert "zerocast::dequantize" in operators and not operators & set(OP.values()) and kernels == of_bf16


def seen(path: str, x: Tensor, element: Element, power_of_2: bool) -> Tensor:
    """The input as the product sees it, in FP64."""
    rows = x.reshape(-1, x.shape[-1])
    if path == "per_tensor":
        codes, scale_inv = inputs.per_tensor(rows, element)
    else:
        codes, scale_inv = inputs.groups(rows, 128, element, power_of_2)
        scale_inv = scale_inv.repeat_interleave(128, 1)
    return (codes.double() * scale_inv.double()).view(x.shape)


def assert_product(found: Tensor, left: Tensor, right: Tensor, bias: Tensor | float = 0.0) -> None:
    """Each element within the rounding of a 16-bit result and 2**-9 of the sum of magnitudes, for an accumulator of about 14 bits;
    the whole within one percent in the Frobenius norm, which a block scaled wrongly by a factor of 2 is far outside of.
    """
    exact = left @ right + bias
    error = found.double() - exact
    assert (error.abs() <= 2**-8 * exact.abs() + 2**-9 * (left.abs() @ right.abs()) + 1e-30).all()
    assert error.norm() <= 0.01 * exact.norm()


@pytest.mark.parametrize("rows", [(256,), (37,), (1,), (2, 5, 16), ()])
@pytest.mark.parametrize(("path", "fmt", "shape"), CASES)
def test_forward_and_gradients(path: str, fmt: str, shape: tuple[int, int], rows: tuple[int, ...]) -> None:
    """Against an FP64 product of the dequantized operands, quantized inputs included."""
    weight = parameter(fmt, shape)
    needs(path, weight)
    x = torch.randn(*rows, shape[1], device="cuda", dtype=BF16).requires_grad_()
    bias = torch.randn(shape[0], device="cuda", dtype=BF16).requires_grad_()
    y = F.linear(x, weight, bias)
    grad = torch.randn_like(y)
    y.backward(grad)
    rowwise, columnwise = (weight.read(columnwise=c, dtype=torch.float32).double() for c in (False, True))
    power_of_2 = has_power_of_2_scales(weight.format)
    assert_product(y, seen(path, x.detach(), E4M3, power_of_2), rowwise.t(), bias.detach().double())
    element = E5M2 if path == "per_tensor" and weight.format.element != E5M2 else E4M3
    assert x.grad is not None and bias.grad is not None
    assert_product(x.grad, seen(path, grad, element, power_of_2), columnwise)
    flat = grad.reshape(-1, shape[0])
    torch.testing.assert_close(weight.grad, flat.t() @ x.detach().reshape(-1, shape[1]))
    torch.testing.assert_close(bias.grad, flat.sum(0))


@pytest.mark.parametrize(("path", "fmt"), ONE_OF_EACH)
def test_other_dtypes_strides_and_ways_to_write_it(path: str, fmt: str) -> None:
    weight = parameter(fmt, (256, 384))
    needs(path, weight)
    x = torch.randn(384, 48, device="cuda", dtype=BF16).t()
    y = F.linear(x, weight)
    assert torch.equal(y, F.linear(x.contiguous(), weight))
    assert torch.equal(y, x @ weight.t()) and torch.equal(y, torch.mm(x, weight.T))
    bias = torch.randn(256, device="cuda", dtype=BF16)
    assert torch.equal(torch.addmm(bias, x, weight.t()), F.linear(x, weight, bias))
    leaf = x.detach().clone().requires_grad_()
    F.linear(leaf, weight).sum().backward()  # an expanded gradient
    assert leaf.grad is not None and leaf.grad.isfinite().all()
    half = parameter(fmt, (256, 384), torch.float16)
    left = seen(path, x.half(), E4M3, has_power_of_2_scales(half.format))
    right = half.read(columnwise=False, dtype=torch.float32).double().t()
    assert_product(F.linear(x.half(), half), left, right)


@pytest.mark.parametrize(("path", "fmt"), ONE_OF_EACH)
def test_autocast_and_no_rows(path: str, fmt: str) -> None:
    weight = parameter(fmt, (256, 384), torch.float32)
    x = torch.randn(16, 384, device="cuda", requires_grad=True)
    needs(path, parameter(fmt, (256, 384)))
    assert "not float32" in weight.gemm_choice().reason
    with torch.autocast("cuda", BF16):
        operators, _ = traced(lambda: F.linear(x, weight))
        F.linear(x, weight, torch.randn(256, device="cuda")).float().sum().backward()
    assert OP[path] in operators
    assert x.grad is not None and x.grad.dtype is weight.grad.dtype is torch.float32
    empty = torch.empty(2, 0, 384, device="cuda", dtype=BF16, requires_grad=True)
    y = F.linear(empty, parameter(fmt, (256, 384)))
    y.sum().backward()
    assert y.shape == (2, 0, 256) and empty.grad is not None and empty.grad.shape == empty.shape


@pytest.mark.parametrize("on_demand", [False, True])
def test_four_bits_multiply_as_eight(on_demand: bool) -> None:
    """An mxfp4 weight gives the bits of its exact value stored as fp8_block; what is read is upcast, never dequantized."""
    four = parameter("mxfp4", (4096, 1024))
    needs("block_128", four)
    four.state.columnwise_on_demand = on_demand
    eight = zerocast.QuantizedWeight.empty((4096, 1024), "fp8_block", BF16, "cuda")
    cast_whole(eight, four.read(columnwise=False, dtype=torch.float32))
    x, grad = (torch.randn(200, n, device="cuda", dtype=BF16) for n in (1024, 4096))
    x.requires_grad_()

    def products(weight: Any) -> tuple[Tensor, Tensor]:
        y = F.linear(x, weight)
        return y, torch.autograd.grad(y, x, grad)[0]

    assert all(map(torch.equal, products(four), products(nn.Parameter(eight))))
    operators, _ = traced(lambda: products(four))
    assert "zerocast::upcast" in operators and "zerocast::transposed" not in operators
    model = nn.Linear(1024, 4096, device="cuda", dtype=BF16)
    model.weight = four
    (row,) = zerocast.backends.report(model).layers
    assert row.path == "block_128 after upcast to e4m3, cuda backend" and not row.reason


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("path", "fmt"), ONE_OF_EACH)
def test_what_is_not_finite_stays_so(path: str, fmt: str, bad: float) -> None:
    weight = parameter(fmt, (256, 384))
    needs(path, weight)
    x = torch.randn(32, 384, device="cuda", dtype=BF16)
    x[5, 200] = bad
    y = F.linear(x, weight)
    assert not y[5].isfinite().any()
    if path == "block_128":
        assert torch.cat((y[:5], y[6:])).isfinite().all()
    leaf, grad = torch.randn_like(x).requires_grad_(), torch.ones(32, 256, device="cuda", dtype=BF16)
    grad[7, 0] = bad
    F.linear(leaf, weight).backward(grad)
    assert leaf.grad is not None and not leaf.grad[7].isfinite().any()


@pytest.mark.parametrize(
    ("fmt", "shape", "reason"),
    [
        ("fp8_current", (272, 520), "multiples of 16"),
        ("fp8_block", (256, 192), "multiples of 128"),
        ("fp8_block:element=e5m2", (256, 256), "must be e4m3"),
        ("mxfp4", (4128, 256), "multiples of 128"),
        ("mxfp4:exact_in_fp8=False", (256, 256), "Blackwell"),
        ("mxfp8", (96, 64), "Blackwell"),
        ("nvfp4", (96, 64), "Blackwell"),
    ],
)
def test_what_cannot_run_is_dequantized_or_refused(fmt: str, shape: tuple[int, int], reason: str) -> None:
    if "Blackwell" in reason and torch.cuda.get_device_capability()[0] == 10:
        pytest.skip("this is a Blackwell GPU")
    weight, x = parameter(fmt, shape), torch.randn(16, shape[1], device="cuda", dtype=BF16)
    model = nn.Linear(shape[1], shape[0], device="cuda", dtype=BF16)
    model.weight = weight
    (row,) = zerocast.backends.report(model).layers
    assert row.path.startswith("dequantize") and reason in row.reason
    assert torch.equal(F.linear(x, weight), F.linear(x, weight.dequantize()))
    with gemm.use("scaled_mm"), pytest.raises(RuntimeError, match=reason):
        F.linear(x, weight)


@pytest.mark.parametrize(("path", "fmt"), ONE_OF_EACH)
def test_a_captured_product_follows_its_inputs(path: str, fmt: str) -> None:
    """No synchronisation, no allocation that a CUDA graph could not hold; a replay gives the bits of an eager run."""
    weight = parameter(fmt, (256, 384)).detach()
    needs(path, weight)
    x, grad = (torch.randn(32, n, device="cuda", dtype=BF16) for n in (384, 256))
    x.requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        y = F.linear(x, weight)
        return y, torch.autograd.grad(y, x, grad)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for factor in (1.0, 100.0):
        with torch.no_grad():
            x.copy_(torch.randn_like(x) * factor)
        grad.copy_(torch.randn_like(grad) / factor)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
    with devices.waiting_is_an_error():
        step()


def test_a_replay_swizzles_the_scales_of_its_time() -> None:
    """They are kept until the next cast, of which a graph that was recorded before it knows nothing."""
    weight = parameter("nvfp4", (256, 384)).detach()
    torch_api.swizzled_scales(weight, columnwise=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch_api.swizzled_scales(weight, columnwise=False)
    before = captured.clone()
    cast_whole(weight, torch.randn(256, 384, device="cuda"))
    graph.replay()
    assert torch.equal(captured, torch_api.swizzled_scales(weight, columnwise=False))
    assert not torch.equal(captured, before)


@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "nvfp4:exact_in_fp8"])
def test_a_copy_made_for_a_product_makes_the_host_wait_for_nothing(fmt: str) -> None:
    """Under FSDP2 a backward pass makes it, in other memory every time; the bits are those of a kept one."""
    weight = parameter(fmt, (256, 512))
    x = torch.randn(64, 512, dtype=BF16, device="cuda", requires_grad=True)
    grad = torch.randn(64, 256, dtype=BF16, device="cuda")
    (expected,) = torch.autograd.grad(F.linear(x, weight), x, grad)
    weight.state.columnwise_on_demand = True
    torch.autograd.grad(F.linear(x, weight), x, grad)
    with devices.waiting_is_an_error():
        found = [torch.autograd.grad(F.linear(x, weight), x, grad)[0] for _ in range(3)]
    assert all(torch.equal(one, expected) for one in found)


@pytest.mark.parametrize("kernels", ["fused", "torch"])
@pytest.mark.parametrize("element", [E4M3, E5M2])
def test_input_bytes_are_those_of_the_cpu(element: Element, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "fused":
        assert inputs._fused(torch.empty(1, device="cuda")) is not None
    else:
        monkeypatch.setattr(inputs, "_kernels", lambda device: None)
    for dtype in (torch.bfloat16, torch.float16):
        x = (torch.randn(40, 256) * torch.logspace(-4, 4, 40)[:, None]).to(dtype)
        pairs = [(inputs.per_tensor(x, element), inputs.per_tensor(x.cuda(), element))]
        pairs += [(inputs.groups(x, 128, element, p), inputs.groups(x.cuda(), 128, element, p)) for p in (False, True)]
        for (codes, scale_inv), (found, found_inv) in pairs:
            assert torch.equal(found.cpu().view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(found_inv.cpu(), scale_inv)
