"""Columnwise copies that products make have the bits of those that are kept."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import zerocast
from tests import casts
from zerocast import QuantizedWeight, ZeroAdamW, ZeroConfig

BF16 = torch.bfloat16
FORMATS = ("fp8_current", "fp8_delayed", "fp8_block", "nvfp4", "mxfp8")
DEMAND = ZeroConfig(bucket_size=4096)
KEPT = dataclasses.replace(DEMAND, keep_columnwise=True)


def trained(fmt: str, config: ZeroConfig, steps: int = 2) -> tuple[nn.Module, ZeroAdamW, list[Tensor]]:
    """A small model after some steps of two micro-batches each, and its losses and input gradients."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 160, bias=False), nn.GELU(), nn.Linear(160, 64, bias=False)).to(BF16)
    zerocast.quantize_(model, zerocast.Recipe({"*": fmt}))
    optimizer = ZeroAdamW(model.named_parameters(), lr=1e-2, config=config)
    found = []
    for _ in range(steps):
        for _ in range(2):
            x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
            loss = model(x).float().square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            found += [loss.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, found


def input_gradient(model: nn.Module) -> Tensor:
    """From the columnwise copies of all weights."""
    x = torch.ones(4, 64, dtype=BF16, requires_grad=True)
    model(x).float().square().mean().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("preference", ["dequantize", "scaled_mm"])
def test_the_bits_of_kept_copies(fmt, preference):
    if preference == "scaled_mm" and not fmt.startswith(("fp8_current", "fp8_delayed")):
        pytest.skip("torch emulates no other scaled product on the CPU")
    with zerocast.gemm.use(preference):
        (demand, optimizer, found), (kept, _, expected) = trained(fmt, DEMAND), trained(fmt, KEPT)
        assert all(map(torch.equal, found, expected))
        for made, held in zip(demand.parameters(), kept.parameters(), strict=True):
            assert isinstance(made, QuantizedWeight)
            assert isinstance(held, QuantizedWeight)
            assert (made.columnwise_data is None) == (fmt != "mxfp8")
            assert held.columnwise_data is not None
            casts.assert_same_bytes(casts.bytes_of(made), casts.bytes_of(held), fmt)
        assert zerocast.verify(optimizer).ok
        assert torch.equal(input_gradient(demand), input_gradient(kept))
