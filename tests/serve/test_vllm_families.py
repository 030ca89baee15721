"""Every causal family that one rule builds small: vLLM's loaders find in an export what they find in the same values in bf16."""

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import zerocast
from tests.serve.test_families import CAUSAL, matrices, small
from tests.serve.test_vllm import NEEDS_VLLM, VLLM
from zerocast import Recipe
from zerocast.export import export_hf

READER = Path(__file__).with_name("vllm_families_reader.py")

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(7200)]

CASES = [("compressed-tensors", "nvfp4"), ("modelopt", "mxfp8"), ("deepseek", "fp8_block")]
# Families of different shape and naming, each of which vLLM reads under `compressed-tensors`.
SOME = ("llama", "gpt_neox", "qwen3", "gemma2", "phi3", "opt", "mamba2", "biogpt")


def exported(family: str, naming: str, fmt: str, folder: Path) -> str:
    """Export a family quantized and the same values in bf16; why there is none, if so."""
    try:
        model = small(family)
    except Exception as error:  # of any kind, by its family
        return f"not built: {type(error).__name__}"
    recipe = matrices(model, fmt)
    if not recipe:
        return "no weight"
    try:
        zerocast.quantize_(model, Recipe(recipe), dtype=torch.bfloat16, serve="vllm")
        export_hf(model, folder / "quantized", naming)
        export_hf(model, folder / "plain", "bf16")
    except ValueError as error:
        return f"refused by the export: {error}"
    return ""


def outcomes(families: Sequence[str], naming: str, fmt: str, root: Path) -> dict[str, str]:
    """What vLLM says of each family."""
    said = {family: exported(family, naming, fmt, root / family) for family in families}
    folders = [str(root / f / kind) for f in families if not said[f] for kind in ("plain", "quantized")]
    report = root / "report.json"
    with (root / "log").open("w") as log:
        subprocess.run([VLLM, str(READER), str(report), *folders], cwd=root, stdout=log, stderr=log, check=False)
    found = json.loads(report.read_text()) if report.exists() else {}
    for family in families:
        said[family] = said[family] or found.get(str(root / family / "quantized"), "vLLM ended before")
        shutil.rmtree(root / family, ignore_errors=True)
    return said


@pytest.mark.parametrize(("naming", "fmt"), CASES)
def test_some_families(tmp_path: Path, naming: str, fmt: str) -> None:
    assert set(outcomes(SOME, naming, fmt, tmp_path).values()) == {"equal"}


@pytest.mark.parametrize(("naming", "fmt"), CASES)
def test_all_families(tmp_path: Path, naming: str, fmt: str) -> None:
    """What vLLM loads in bf16 it reads as it is, or training refuses it. The counts are those of the page on exports."""
    said = outcomes(sorted(CAUSAL), naming, fmt, tmp_path)
    counts = Counter(text.partition(":")[0] for text in said.values())
    print(naming, fmt, dict(counts), *(f"{family}: {text}" for family, text in said.items()), sep="\n")
    known = ("equal", "not loaded in bf16", "not built", "no weight", "refused by the export")
    assert counts.keys() <= {*known} and counts["equal"] > 50
