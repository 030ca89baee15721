"""ModelOpt's own tensors decode what its naming holds, to the bit."""

from pathlib import Path

import pytest
import torch

from tests.serve.modelopt_reader import decoded
from tests.serve.test_export import model, read
from zerocast import QuantizedWeight
from zerocast.export import export_safetensors

pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed: make readers")


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4:exact_in_fp8", "mxfp8", "fp8_block", "fp8_current"])
def test_values(tmp_path: Path, fmt: str) -> None:
    source = model(fmt)
    export_safetensors(source, tmp_path / "out", "modelopt")
    found = decoded(read(tmp_path / "out"))
    for name in ("up.weight", "zeros.weight"):
        weight = source.get_parameter(name)
        assert isinstance(weight, QuantizedWeight)
        assert torch.equal(found[name], weight.dequantize())
