"""torch.compile by block without a graph break, and of the whole model: as eager to the bit, and
no weight dequantized is kept.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_inductor_cache
from torch.distributed.fsdp import fully_shard

import zerocast
from tests import casts
from tests.fsdp2 import models, test_tensor_parallel
from tests.fsdp2.models import Net
from tests.workers import on_ranks
from zerocast import QuantizedWeight, gemm

WIDTH, HIDDEN = 64, 96


def build(how: str, backend: str, formats: tuple[str, ...], reshard: bool) -> Any:
    """Return a sharded model, compiled by block before it is sharded, as a whole, or not at all."""
    torch._dynamo.reset()
    model = Net(formats, WIDTH, HIDDEN)
    zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe))
    if how == "blocks":
        for block in model.blocks:
            block.compile(fullgraph=True, backend=backend)
    models.sharded(model, prepare=False, reshard_after_forward=reshard)
    return torch.compile(model, backend=backend) if how == "whole" else model


def losses(how: str, backend: str, reshard: bool) -> tuple[list[float], dict[str, str]]:
    """Return the losses of three steps and digests of the masters after them."""
    model = build(how, backend, ("nvfp4", "mxfp8"), reshard)
    optimizer = models.OPTIMIZERS["AdamW"](model)
    found = []
    for step in range(3):
        loss = model(models.batch(step, WIDTH)).float().square().mean()
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found, {name: casts.sha(p.full_tensor()) for name, (p, _) in models.masters(model).items()}


@pytest.mark.parametrize(
    ("how", "reshard"), [("blocks", True), ("whole", False), models.slow("blocks", False), models.slow("whole", True)]
)
@on_ranks(2)
def test_compiled_equals_eager(how: str, reshard: bool) -> None:
    assert losses(how, "aot_eager", reshard) == losses("eager", "", reshard)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["blocks", "whole"])
@on_ranks(2, timeout=600.0)
def test_inductor(how: str) -> None:
    """Inductor rounds otherwise between fused bf16 operators, so results are close to eager and not equal."""
    (expected, _), (found, _) = losses("eager", "", True), losses(how, "inductor", True)
    assert found == pytest.approx(expected, rel=0.05)


class Layer(nn.Linear):
    """A layer with a forward of its own, since torch.compile skips that of nn.Linear."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with the weight, like nn.Linear."""
        return nn.functional.linear(x, self.weight)


@pytest.mark.parametrize("backend", ["aot_eager", models.slow("inductor")])
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_current", models.slow("mxfp8")])
@on_ranks(2, timeout=300.0)
def test_a_graph_of_several_layers(fmt: str, backend: str) -> None:
    """The second and the third layer, whose inputs have gradients, share a graph. It takes the codes of each
    from its place.
    """
    torch._dynamo.reset()
    counters.clear()
    passes = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model: Any = models.Block(*(Layer(WIDTH, WIDTH, bias=False) for _ in range(3)))
        zerocast.fsdp2.prepare(model, {"*.weight": fmt})
        for layer in model if compiled else ():
            layer.compile(fullgraph=True, backend=backend)
        fully_shard(model, mesh=models.mesh(), mp_policy=models.BF16, reshard_after_forward=True)
        # A dequantized product reads no columnwise copy.
        with gemm.use("scaled_mm" if fmt == "fp8_current" else "auto"):
            for step in range(2):
                y = model(models.batch(step, WIDTH))
                y.float().square().mean().backward()
        passes.append([y, *(parameter.grad.full_tensor() for parameter in model.parameters())])
    assert all(map(torch.equal, *passes))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
@on_ranks(2, timeout=300.0)
def test_inductor_of_slices() -> None:
    """Graphs of DTensors over quantized weights are compiled for each format, which torch's own key does not tell."""
    with fresh_inductor_cache():
        for fmt in ("mxfp8", "nvfp4", "fp8_current"):
            torch._dynamo.reset()
            passes = []
            for compiled in (False, True):
                model: Any = test_tensor_parallel.parallel(fmt)
                y = (torch.compile(model) if compiled else model)(models.batch(0, test_tensor_parallel.WIDTH, rank=0))
                y.float().square().mean().backward()
                passes.append([y, *(parameter.grad.full_tensor() for parameter in models.held(model))])  # type: ignore[union-attr]
            assert all(map(torch.equal, *passes)), fmt


@pytest.mark.parametrize("how", ["eager", "blocks", models.slow("whole")])
@on_ranks(2)
def test_no_dequantized_weight_is_kept(how: str) -> None:
    """Autograd keeps codes for the backward pass, and no floating-point tensor as large as a weight."""
    model = build(how, "aot_eager", ("nvfp4", "fp8_current", "mxfp8"), True)
    found, codes = [], 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal codes
        codes += isinstance(tensor, QuantizedWeight) or tensor.dtype == torch.uint8
        if not isinstance(tensor, QuantizedWeight) and tensor.is_floating_point() and tensor.numel() >= WIDTH * HIDDEN:
            found.append((tensor.dtype, tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(models.batch(0, WIDTH)).float().square().mean().backward()
    assert not found
    assert codes >= 6
