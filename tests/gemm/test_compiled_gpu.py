"""Products under torch.compile on a GPU: tensor cores inside the graph, the bytes of eager, and what is kept, counted in memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerocast
from tests.gemm import test_compiled
from tests.gemm.test_gemm_gpu import CASES, OP, needs, parameter, preferred, traced
from zerocast import backends, gemm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

BF16 = torch.bfloat16
__all__ = ["preferred"]  # a fixture, which every test here uses
ROWS, WIDTH, HIDDEN = 4096, 1024, 4096


def layer(fmt: str, shape: tuple[int, int]) -> nn.Linear:
    linear = nn.Linear(shape[1], shape[0], bias=False, device="cuda", dtype=BF16)
    linear.weight = parameter(fmt, shape)
    return linear


def passes(function: Any, model: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, the input gradient and the weight gradients."""
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *model.parameters()], grad)]


@pytest.mark.parametrize("weight_gradients", ["nominal", "fp8", "fp8_groups"])
@pytest.mark.parametrize("rows", [512, 200])
@pytest.mark.parametrize(("path", "fmt", "shape"), CASES)
def test_inductor_quantizes_as_the_kernels_do(
    path: str, fmt: str, shape: tuple[int, int], rows: int, weight_gradients: str
) -> None:
    """A product alone, whose input nothing is fused with: the bits of eager, and its operators are those of tensor cores."""
    model = layer(fmt, shape)
    needs(path, model.weight)
    x = (
        torch.randn(rows, shape[1], device="cuda", dtype=BF16)
        * torch.logspace(-2, 2, rows, device="cuda")[:, None].bfloat16()
    )
    grad = torch.randn(rows, shape[0], device="cuda", dtype=BF16)
    torch._dynamo.reset()  # torch's cache of graphs stays: it must tell the two apart
    with gemm.use(weight_gradients=weight_gradients):
        function = torch.compile(model, fullgraph=True)
        expected, found = (passes(f, model, x, grad) for f in (model, function))
        operators, _ = traced(lambda: passes(function, model, x, grad))
    assert all(map(torch.equal, found[:2], expected))
    torch.testing.assert_close(found[2], expected[2])
    assert OP[path] in operators and "zerocast::dequantize" not in operators
    assert ("aten::mm" in operators) == (weight_gradients == "nominal")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "fmt", ["fp8_current", "fp8_delayed:amax_history_len=4", "fp8_block", "mxfp4", "mxfp8", "nvfp4"]
)
def test_a_model_compiles_whole(fmt: str, backend: str) -> None:
    model = test_compiled.built(fmt, device="cuda", shape=(256, 512))
    rows = {row.name: row.path for row in backends.report(model).layers}
    x = torch.randn(384, 256, device="cuda", dtype=BF16)
    torch._dynamo.reset()
    expected = test_compiled.run(model, x)
    found = test_compiled.run(torch.compile(model, backend=backend, fullgraph=True), x)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs) or backend == "inductor"
        assert (ours - theirs).norm() <= 0.05 * theirs.norm()
    if torch.cuda.get_device_capability()[0] == 9:
        upcast = "block_128 after upcast to e4m3, cuda backend"
        path = {"fp8_c": "per_tensor", "fp8_d": "per_tensor", "fp8_b": "block_128", "mxfp4": upcast}.get(
            fmt[:5], "dequantize to bfloat16, cuda backend"
        )
        assert set(rows.values()) == {path}, "the report says what ran"


def losses(fmt: str, compiled: bool) -> list[float]:
    """Return the losses of three steps of a ZeroAdamW, which casts into the storage that graphs read."""
    torch._dynamo.reset()
    model = test_compiled.built(fmt, on_demand=False, device="cuda", shape=(256, 512))
    optimizer = zerocast.ZeroAdamW(model.named_parameters(), lr=1e-2)
    function, found = torch.compile(model, fullgraph=True) if compiled else model, []
    x = torch.randn(384, 256, device="cuda", dtype=BF16, generator=torch.Generator("cuda").manual_seed(0))
    for _ in range(3):
        loss = function(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_block", "nvfp4"])
def test_steps_of_an_optimizer(fmt: str) -> None:
    found = losses(fmt, compiled=True)
    assert found == pytest.approx(losses(fmt, compiled=False), rel=0.02)
    assert found[2] < 0.99 * found[0]


def kept(fmt: str | None) -> int:
    """Bytes that are alive after a compiled forward pass and were not before it, its output aside."""
    torch._dynamo.reset()
    model = test_compiled.built(fmt, device="cuda", shape=(WIDTH, HIDDEN))
    function = torch.compile(model, fullgraph=True)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=BF16, requires_grad=True)
    function(x).sum().backward()
    before = torch.cuda.memory_allocated()
    y = function(x)
    return torch.cuda.memory_allocated() - before - y.nbytes


PREDICTED = (
    ROWS * (WIDTH + 3 * HIDDEN) * 2
)  # the norm's result, gate, up and the input of down, as the partitioner has it
SMALL = 2**20  # a number a row, scales, what the allocator rounds


@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_block", "mxfp4", "mxfp8", "nvfp4"])
def test_a_graph_keeps_what_that_of_bf16_keeps(fmt: str) -> None:
    """Neither a dequantized weight nor a transposed one."""
    assert abs(kept(None) - PREDICTED) < SMALL
    assert abs(kept(fmt) - PREDICTED) < SMALL


def test_a_graph_keeps_no_input_for_a_quantized_weight_gradient() -> None:
    with gemm.use(weight_gradients="fp8"):
        assert kept("fp8_current") < PREDICTED - 2 * ROWS * (WIDTH + HIDDEN) + SMALL
