"""The same bytes on a GPU: plans, products and the optimizer on CUDA tensors, whatever backend serves them there."""

import copy

import pytest
import torch
from torch import nn

import zerocast
from zerocast.backends import reference
from zerocast.layout import BUFFERS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

FORMATS = ("fp8_current", "fp8_delayed", "fp8_block", "fp8_block:element=e5m2", "mxfp8", "nvfp4", "identity")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, as bytes."""
    return tensor.detach().cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("nominal", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_cast_gives_the_bytes_of_the_cpu(fmt: str, nominal: torch.dtype) -> None:
    master = torch.randn(160, 96) * torch.logspace(-4, 4, 160)[:, None]
    weight = zerocast.QuantizedWeight.empty((160, 96), fmt, nominal, "cuda")
    zerocast.quantize_master_weights([weight], [master.view(-1).cuda()], [0])
    zerocast.post_all_gather_processing([weight])
    expected = reference.quantize(weight.format, master, nominal, torch.ones(1))
    for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax"):
        found, wanted = getattr(weight, name), getattr(expected, name)
        assert (found is None) == (wanted is None), name
        if found is not None:
            assert torch.equal(bytes_of(found), bytes_of(wanted)), name


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt != "identity"])
def test_products_and_gradients(fmt: str) -> None:
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


def test_the_optimizer_gives_the_bits_of_the_cpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 160), nn.LayerNorm(160), nn.Linear(160, 64), nn.Linear(64, 64))
    recipe = zerocast.Recipe({"0.weight": "nvfp4", "2.weight": "fp8_delayed:amax_history_len=4", "3.weight": "mxfp8"})
    zerocast.quantize_(model, recipe)
    models = [model, copy.deepcopy(model).to("cuda")]
    optimizers = [
        zerocast.ZeroAdamW(m.named_parameters(), lr=1e-2, config=zerocast.ZeroConfig(deterministic=True))
        for m in models
    ]
    for _ in range(5):
        gradients = [torch.randn(parameter.shape) for parameter in model.parameters()]
        for m, optimizer in zip(models, optimizers, strict=True):
            for parameter, gradient in zip(m.parameters(), gradients, strict=True):
                parameter.grad = gradient.to(parameter.device)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
    for mine, theirs in zip(*(m.parameters() for m in models), strict=True):
        if not isinstance(mine, zerocast.QuantizedWeight):
            assert torch.equal(mine, theirs.cpu())
            continue
        for name in BUFFERS:
            if mine.state.buffers[name] is not None:
                assert torch.equal(bytes_of(mine.state.buffers[name]), bytes_of(theirs.state.buffers[name])), name
