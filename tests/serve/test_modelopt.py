"""ModelOpt's own tensors decode what its naming holds, to the bit."""

from pathlib import Path

import pytest
import torch

import zerocast
from tests.serve.test_export import model, read
from zerocast.export import export_safetensors

qtensor = pytest.importorskip(
    "modelopt.torch.quantization.qtensor", reason="nvidia-modelopt is not installed: make readers"
)


@pytest.mark.parametrize("name", ["up.weight", "zeros.weight"])
@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4:exact_in_fp8"])
def test_nvfp4(tmp_path: Path, name: str, fmt: str) -> None:
    source = model(fmt)
    export_safetensors(source, tmp_path / "out", "modelopt")
    found, weight = read(tmp_path / "out"), source.get_parameter(name)
    assert isinstance(weight, zerocast.QuantizedWeight)
    tensor = qtensor.NVFP4QTensor(weight.shape, torch.bfloat16, found[name])
    scales = {"scale": found[f"{name}_scale"], "double_scale": found[f"{name}_scale_2"], "block_sizes": {-1: 16}}
    assert torch.equal(tensor.dequantize(dtype=torch.bfloat16, **scales), weight.dequantize())


def test_mxfp8(tmp_path: Path) -> None:
    source = model("mxfp8")
    export_safetensors(source, tmp_path / "out", "modelopt")
    found, weight = read(tmp_path / "out"), source.get_parameter("up.weight")
    assert isinstance(weight, zerocast.QuantizedWeight)
    tensor = qtensor.MXFP8QTensor(weight.shape, torch.bfloat16, found["up.weight"])
    assert torch.equal(tensor.dequantize(dtype=torch.bfloat16, scale=found["up.weight_scale"]), weight.dequantize())


@pytest.mark.parametrize(("fmt", "spread"), [("fp8_block", 128), ("fp8_current", 1)])
def test_fp8(tmp_path: Path, fmt: str, spread: int) -> None:
    source = model(fmt)
    export_safetensors(source, tmp_path / "out", "modelopt")
    found, weight = read(tmp_path / "out"), source.get_parameter("up.weight")
    assert isinstance(weight, zerocast.QuantizedWeight)
    tensor = qtensor.FP8QTensor(weight.shape, torch.bfloat16, found["up.weight"])
    scale = found["up.weight_scale"]
    scale = (
        scale.repeat_interleave(128, 0)[:288].flatten(1).repeat_interleave(128, 1)[:, :160]
        if spread > 1
        else scale[:, None]
    )
    decoded = tensor.dequantize(dtype=torch.float32, scale=scale).bfloat16()
    assert torch.equal(decoded, weight.dequantize())
