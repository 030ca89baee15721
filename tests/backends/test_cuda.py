"""The same bytes on a GPU: plans, products and the optimizer on CUDA tensors, with every backend that serves them there."""

import copy
import dataclasses
from typing import Literal

import pytest
import torch
from torch import nn

import zerocast
from tests.backends import stages
from tests.devices import gpu_params
from tests.optim.runs import DETERMINISTIC, CapturedCase, compare_with_captured
from zerocast import backends
from zerocast.backends import reference
from zerocast.backends.reference.codec import pack, unpack
from zerocast.formats import layout
from zerocast.formats.layout import BUFFERS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

FORMATS = ("fp8_current", "fp8_delayed", "fp8_block", "fp8_block:element=e5m2", "mxfp8", "mxfp8:block=32x32")
FORMATS += (
    "mxfp4",
    "mxfp4:exact_in_fp8=False,scale_rounding=floor",
    "nvfp4",
    "nvfp4:exact_in_fp8=True",
    "int4",
    "identity",
)

MomentDtype = torch.dtype | Literal["8bit"]
MOMENT_DTYPES: tuple[MomentDtype, ...] = (torch.float32, "8bit")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, as bytes."""
    return tensor.detach().cpu().contiguous().view(torch.uint8)


@pytest.fixture(params=["reference", *gpu_params()])
def on_gpu(request: pytest.FixtureRequest) -> str:
    """Every backend that is usable on CUDA tensors here."""
    name: str = request.param
    return name


def assert_cast(weight: zerocast.QuantizedWeight, master: torch.Tensor) -> None:
    expected = reference.quantize(weight.format, master, weight.dtype, torch.ones(1))
    for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax"):
        found, wanted = getattr(weight, name), getattr(expected, name)
        assert (found is None) == (wanted is None), name
        if found is not None:
            assert torch.equal(bytes_of(found), bytes_of(wanted)), name


@pytest.mark.parametrize("nominal", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_cast_gives_the_bytes_of_the_cpu(on_gpu: str, fmt: str, nominal: torch.dtype) -> None:
    master = torch.randn(160, 96) * torch.logspace(-4, 4, 160)[:, None]
    weight = zerocast.QuantizedWeight.empty((160, 96), fmt, nominal, "cuda")
    plan = zerocast.CastPlan([weight], [master.view(-1).cuda()], [0], backend=on_gpu)
    plan.cast()
    plan.post_all_gather()
    assert_cast(weight, master)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_cast_follows_the_current_stream(on_gpu: str, fmt: str) -> None:
    """The master arrives late, on a stream that is not the default one."""
    master = torch.randn(320, 544)
    weight = zerocast.QuantizedWeight.empty(master.shape, fmt, torch.bfloat16, "cuda")
    late, arriving = torch.zeros_like(master, device="cuda"), master.cuda()
    plan = zerocast.CastPlan([weight], [late.view(-1)], [0], backend=on_gpu)
    plan.cast()  # what is made at first use is made here
    plan.post_all_gather()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        late.copy_(arriving)
        if weight.scale is not None:
            weight.scale.fill_(1.0)
        plan.cast()
        plan.post_all_gather()
    torch.cuda.synchronize()
    assert_cast(weight, master)


@pytest.mark.parametrize("backend", gpu_params())
@pytest.mark.parametrize("fmt", ["fp8_current", "nvfp4"])
def test_a_transpose_beyond_32_bits(backend: str, fmt: str) -> None:
    rows, columns, spec = 2**16 + 32, 2**15 + 32, zerocast.get_format(fmt)
    noise = torch.randint(256, (rows, columns // spec.elements_per_byte), dtype=torch.uint8, device="cuda")
    turned = torch.empty(columns, rows // spec.elements_per_byte, dtype=torch.uint8, device="cuda")
    buffers = layout.rowwise_scale_inv(spec, rows, columns), layout.columnwise_scale_inv(spec, rows, columns)
    scales = [torch.zeros(b.shape, dtype=b.dtype, device="cuda").view(-1) for b in buffers if b]
    where = {"rows": rows, "columns": columns}
    for name in ("row_data", "column_data", "row_scale", "column_scale"):
        where |= {f"{name}_base": 0, f"{name}_offset": 0}
    line = stages.table(stages.row(**where)).cuda()
    data, copy = [noise.view(-1)], [turned.view(-1)]
    backends.load(backend).transpose(spec, line, data, scales[:1], copy, scales[1:])
    for edge in (slice(0, 64), slice(columns - 64, columns)):
        codes = noise[:, edge]
        if spec.elements_per_byte == 2:
            codes = unpack(noise[:, edge.start // 2 : edge.stop // 2])
        expected = codes.t()
        assert torch.equal(turned[edge], pack(expected) if spec.elements_per_byte == 2 else expected)


@pytest.mark.parametrize("moment_dtype", MOMENT_DTYPES)
def test_a_captured_step_gives_the_bits_of_ordinary_ones(on_gpu: str, moment_dtype: MomentDtype) -> None:
    if on_gpu == "reference":
        pytest.skip("the reference asks the host")
    config = dataclasses.replace(DETERMINISTIC, backend=on_gpu, moment_dtype=moment_dtype)
    assert compare_with_captured(CapturedCase(config=config, device="cuda")) == 1


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt != "identity"])
def test_products_and_gradients(on_gpu: str, fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROCAST_BACKEND", on_gpu)
    layer = nn.Linear(96, 160, bias=True, device="cuda")
    zerocast.quantize_(layer, zerocast.Recipe({"weight": fmt}), dtype=torch.bfloat16)
    layer.bias.data = layer.bias.data.bfloat16()
    x = torch.randn(32, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with zerocast.gemm.use("dequantize"):
        y = layer(x)
    y.backward(torch.ones_like(y))
    assert torch.equal(y, nn.functional.linear(x, layer.weight.dequantize(), layer.bias))
    assert x.grad is not None and layer.weight.grad is not None
    assert layer.weight.grad.shape == (160, 96)


def two_models(
    on_gpu: str, recipe: zerocast.Recipe, moment_dtype: MomentDtype = torch.float32
) -> tuple[list[nn.Module], list[zerocast.ZeroAdamW]]:
    """The same model and optimizer on the CPU and on the GPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 160), nn.LayerNorm(160), nn.Linear(160, 64), nn.Linear(64, 64))
    zerocast.quantize_(model, recipe)
    models: list[nn.Module] = [model, copy.deepcopy(model).to("cuda")]
    config = zerocast.ZeroConfig(deterministic=True, moment_dtype=moment_dtype)
    configs = [dataclasses.replace(config, backend=backend) for backend in (None, on_gpu)]
    optimizers = [
        zerocast.ZeroAdamW(m.named_parameters(), lr=1e-2, config=config)
        for m, config in zip(models, configs, strict=True)
    ]
    return models, optimizers


def train(models: list[nn.Module], optimizers: list[zerocast.ZeroAdamW], steps: int) -> None:
    for _ in range(steps):
        gradients = [torch.randn(parameter.shape) for parameter in models[0].parameters()]
        for m, optimizer in zip(models, optimizers, strict=True):
            for parameter, gradient in zip(m.parameters(), gradients, strict=True):
                parameter.grad = gradient.to(parameter.device)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()


def assert_same_bytes(models: list[nn.Module]) -> None:
    for mine, theirs in zip(*(m.parameters() for m in models), strict=True):
        if not isinstance(mine, zerocast.QuantizedWeight):
            assert torch.equal(mine, theirs.cpu())
            continue
        assert isinstance(theirs, zerocast.QuantizedWeight) and mine.format == theirs.format
        for name in BUFFERS:
            assert (mine.state.buffers[name] is None) == (theirs.state.buffers[name] is None), name
            if mine.state.buffers[name] is not None:
                assert torch.equal(bytes_of(mine.state.buffers[name]), bytes_of(theirs.state.buffers[name])), name


@pytest.mark.parametrize("moment_dtype", MOMENT_DTYPES)
def test_the_optimizer_gives_the_bits_of_the_cpu(on_gpu: str, moment_dtype: MomentDtype) -> None:
    recipe = zerocast.Recipe({"0.weight": "nvfp4", "2.weight": "fp8_delayed:amax_history_len=4", "3.weight": "mxfp8"})
    models, optimizers = two_models(on_gpu, recipe, moment_dtype)
    train(models, optimizers, 5)
    assert_same_bytes(models)


def test_switches_give_the_bits_of_the_cpu(on_gpu: str) -> None:
    first, *others = ("nvfp4", "mxfp4", "mxfp8:block=32x32", "identity", "fp8_block", "mxfp4", "fp8_delayed")
    models, optimizers = two_models(on_gpu, zerocast.Recipe({"[02].weight": first}))
    for fmt in others:
        train(models, optimizers, 2)
        for optimizer in optimizers:
            zerocast.switch(optimizer, zerocast.Recipe({"[02].weight": fmt}))
        assert_same_bytes(models)
    train(models, optimizers, 2)
    assert_same_bytes(models)
    zerocast.verify(optimizers[1]).raise_for_differences()
