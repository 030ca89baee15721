"""Collectives of training with FSDP2: quantized bytes in gathers, and one all-reduce a step, or none."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import DELAYED, EACH, FORMATS, SMALL, Net
from tests.observed import Traffic
from tests.selection import worlds
from tests.workers import Ranks, on_ranks

PER_ELEMENT = {
    "nvfp4": 0.504,
    "nvfp4:exact_in_fp8": 0.5 + 1 / 256,
    "fp8_current": 1.0,
    "fp8_block": 1.0003,
    "mxfp8": 2.0625,
    "mxfp8:block=32x32": 1.001,
    "mxfp4": 0.501,
    DELAYED: 1.0,
}


def gathered_bytes(fmt: str) -> float:
    """Return the bytes an element that the shards of one large weight put into its gather."""
    weight = nn.Linear(1024, 1024, bias=False, device=models.place())
    zerocast.fsdp2.prepare(weight, zerocast.Recipe({"weight": fmt}))
    fully_shard(weight, mesh=models.mesh(), mp_policy=models.BF16)
    with Traffic() as seen, torch.no_grad():
        weight(torch.zeros(1, 1024, device=models.place()))
    (size,) = seen.sent["all-gather"][-1:]
    return size * models.mesh().size() / 1024**2


@pytest.mark.parametrize("fmt", PER_ELEMENT)
def test_bytes_an_element(ranks: Ranks, fmt: str) -> None:
    found = ranks(2)(gathered_bytes, fmt)
    assert found == pytest.approx([PER_ELEMENT[fmt]] * 2, abs=5e-4)


@on_ranks(*worlds(2, slow=[1, 3]))
def test_gathered_operands_are_aligned() -> None:
    """Codes and scales begin where cuBLASLt takes them, so that no product on tensor cores copies a scale."""
    for formats, width, hidden in ((FORMATS, 32, 96), (FORMATS, 96, 160), (SMALL, 33, 7), (SMALL, 50, 131)):
        model = models.sharded(Net(formats, width, hidden), keep_codes=None, reshard_after_forward=True)
        for name, weight in models.unsharded(model):
            for buffer, tensor in weight.state.buffers.items():
                assert tensor is None or tensor.data_ptr() % 16 == 0, (weight.format, name, buffer)
            with zerocast.gemm.use("scaled_mm"):
                assert "does not begin" not in weight.gemm_choice().reason


@pytest.mark.parametrize("optimizers", [1, 3])
@on_ranks(3)
def test_one_reduction_a_step(optimizers: int) -> None:
    """One reduction a step suffices for any number of weights, formats and optimizers."""
    model = models.sharded(Net(EACH, 128, 256))
    x = models.batch(0, 128)
    with torch.no_grad():
        model(x)
    parameters = list(model.parameters())
    made = [torch.optim.SGD(parameters[i::optimizers], lr=1e-2) for i in range(optimizers)]
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        for optimizer in made:
            optimizer.step()
        with Traffic() as seen, torch.no_grad():
            model(x)
        assert len(seen.sent["all-reduce"]) == 1
