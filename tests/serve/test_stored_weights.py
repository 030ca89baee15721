"""Masters of a mixture of experts from what save_pretrained wrote: experts are stored one by one and held in one tensor."""

from pathlib import Path
from typing import Any

import pytest
import torch

import zerocast
from tests.serve.models import made, quantized
from zerocast import optim
from zerocast.serve import stored_weights


def load(folder: str) -> bool:
    """Whether masters and weights are the stored ones, however they are sharded."""
    model = quantized("qwen3_moe", "fp8_block")
    optimizer = zerocast.ZeroAdamW(model.named_parameters(), lr=1e-3)
    wanted = made("qwen3_moe")
    for parameter in wanted.parameters():
        parameter.data.mul_(2.0)
    optim.load_masters(optimizer, stored_weights(model, folder))
    right = zerocast.quantize_(wanted, {"*_proj.weight": "fp8_block", "*.experts.*": "fp8_block"}, dtype=torch.bfloat16)
    same = [
        torch.equal(p.dequantize(), right.get_parameter(name).dequantize())  # type: ignore[operator]
        for name, p in model.named_parameters()
        if isinstance(p, zerocast.QuantizedWeight)
    ]
    return all(same) and len(same) == 6 and zerocast.verify(optimizer).ok


@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_masters_of_experts(ranks: Any, tmp_path: Path, world: int) -> None:
    model: Any = made("qwen3_moe")
    for parameter in model.parameters():
        parameter.data.mul_(2.0)
    model.save_pretrained(tmp_path)
    optimizer = zerocast.ZeroAdamW(quantized("qwen3_moe", "fp8_block").named_parameters(), lr=1e-3)
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj of shape .* is missing in the source"):
        optim.load_masters(optimizer, tmp_path)
    assert (load(str(tmp_path)) if world == 1 else all(ranks(world)(load, str(tmp_path)))) is True


def test_a_box_of_experts(tmp_path: Path) -> None:
    model: Any = made("qwen3_moe")
    model.save_pretrained(tmp_path)
    source = stored_weights(quantized("qwen3_moe", "fp8_block"), str(tmp_path))
    experts = [name for name in source.entries if ".experts." in name]
    boxes = [source.read(name, (1, 2, 3), (1, 5, 7)) for name in experts]
    wanted = [model.get_parameter(name)[1:2, 2:7, 3:10] for name in experts]
    assert len(experts) == 2 and all(map(torch.equal, boxes, wanted))
