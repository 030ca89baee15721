"""vLLM loads our exports, fuses their layers and decodes their values.

`make vllm` builds an environment with a CPU build of vLLM; ZEROCAST_VLLM names the Python of another one.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.serve.models import quantized
from zerocast import QuantizedWeight
from zerocast.export import export_hf

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / "build/hosts/vllm"
VLLM = os.environ.get("ZEROCAST_VLLM") or (str(ENVIRONMENT / "bin/python") if (ENVIRONMENT / "READY").exists() else "")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

NEEDS_VLLM = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM, reason="no environment has vLLM: make vllm, or ZEROCAST_VLLM names its Python"),
]
pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(1600)]
FORMATS = {
    "nvfp4": ["compressed-tensors", "modelopt"],
    "mxfp4": ["compressed-tensors"],
    "int4": ["compressed-tensors"],
    "mxfp8:block=32x32": ["compressed-tensors", "modelopt"],
    "fp8_block": ["deepseek", "modelopt", "compressed-tensors"],
    "fp8_current": ["compressed-tensors", "modelopt"],
}
CASES = [("llama", fmt, naming) for fmt, namings in FORMATS.items() for naming in namings]
CASES += [("qwen3", "nvfp4", "compressed-tensors"), ("qwen3", "fp8_block", "deepseek")]
# `assert self.is_static_input_scheme is False`, which is None for weights alone, in compressed_tensors_w8a16_fp8.py
NOT_READ = ("llama", "fp8_block", "compressed-tensors")


def fused(model: torch.nn.Module) -> dict[str, Tensor]:
    """The quantized matrices as vLLM names and fuses them."""
    named = model.named_parameters()
    values = {n.removesuffix(".weight"): p.dequantize() for n, p in named if isinstance(p, QuantizedWeight)}
    for whole, parts in FUSED.items():
        for name in [name for name in values if name.endswith(parts[0])]:
            prefix = name.removesuffix(parts[0])
            values[prefix + whole] = torch.cat([values.pop(prefix + part) for part in parts])
    return values


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], dict[str, Any]]:
    """What vLLM, which takes most of a minute to start, finds in an export of each case, and of the same values in bf16."""
    root = tmp_path_factory.mktemp("exports")
    cases = [*CASES, *{(name, fmt, "bf16") for name, fmt, _ in CASES}]
    folders = {case: root / str(number) for number, case in enumerate(cases)}
    for (name, fmt, naming), folder in folders.items():
        export_hf(quantized(name, fmt, "llama"), folder, naming)
    command = [VLLM, str(Path(__file__).with_name("vllm_reader.py")), str(root / "found"), *map(str, folders.values())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.load(root / "found")
    return {case: found[str(folder)] for case, folder in folders.items()}


@pytest.mark.parametrize("case", [case for case in CASES if case != NOT_READ], ids=" ".join)
def test_values_and_probabilities(case: tuple[str, str, str], read: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    """Decoded matrices are ours to the bit, so with products of the same values probabilities are too."""
    (name, fmt, _), found = case, read[case]
    assert "error" not in found, found["error"]
    wanted = fused(quantized(name, fmt, "llama"))
    assert found["layers"].keys() == wanted.keys()
    assert [layer for layer, value in wanted.items() if not torch.equal(found["layers"][layer], value)] == []
    assert torch.equal(found["logprobs"], read[name, fmt, "bf16"]["logprobs"])


def test_what_vllm_does_not_read(read: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    """The page on exports says so; where this fails, vLLM has been mended."""
    assert read[NOT_READ]["error"].startswith("AssertionError")
