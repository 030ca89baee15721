"""Masters of a mixture of experts from what save_pretrained wrote: experts are stored one by one and held in one tensor."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerocast
from tests.serve.models import made, quantized
from tests.workers import on_ranks
from zerocast import optim
from zerocast.serve import stored_weights


def doubled() -> Any:
    """A model with values that no model has by itself."""
    model = made("qwen3_moe")
    for parameter in model.parameters():
        parameter.data.mul_(2.0)
    return model


@on_ranks(0, pytest.param(3, marks=pytest.mark.slow))
def test_masters_of_experts(tmp_path: Path) -> None:
    """Masters and weights are the stored ones, however they are sharded."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        doubled().save_pretrained(tmp_path)
    if dist.is_initialized():
        dist.barrier()
    model = quantized("qwen3_moe", "fp8_block")
    optimizer = zerocast.ZeroAdamW(model.named_parameters(), lr=1e-3)
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj of shape .* is missing in the source"):
        optim.load_masters(optimizer, tmp_path)
    optim.load_masters(optimizer, stored_weights(model, str(tmp_path)))
    recipe = {"*_proj.weight": "fp8_block", "*.experts.*": "fp8_block"}
    right = dict(zerocast.quantize_(doubled(), recipe, dtype=torch.bfloat16).named_parameters())
    weights = {name: p for name, p in model.named_parameters() if isinstance(p, zerocast.QuantizedWeight)}
    assert len(weights) == 6 and zerocast.verify(optimizer).ok
    assert all(torch.equal(p.dequantize(), right[name].dequantize()) for name, p in weights.items())


def test_a_box_of_experts(tmp_path: Path) -> None:
    model: Any = made("qwen3_moe")
    model.save_pretrained(tmp_path)
    source = stored_weights(quantized("qwen3_moe", "fp8_block"), str(tmp_path))
    experts = [name for name in source.entries if ".experts." in name]
    boxes = [source.read(name, (1, 2, 3), (1, 5, 7)) for name in experts]
    wanted = [model.get_parameter(name)[1:2, 2:7, 3:10] for name in experts]
    assert len(experts) == 2 and all(map(torch.equal, boxes, wanted))
