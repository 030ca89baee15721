"""zerocast export: from a checkpoint and from somebody's weights, the folder that export_hf writes of the live model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zerocast
from tests.serve.models import logits, made, quantized, read
from tests.serve.test_export import read as read_tensors
from tests.serve.test_live import assert_same
from zerocast import Recipe, optim
from zerocast.cli import main
from zerocast.export import export_hf


def check_same(one: Path, other: Path) -> None:
    assert_same(read_tensors(one), read_tensors(other))
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (one, other))
    assert ours["quantization_config"] == theirs["quantization_config"]


@pytest.mark.parametrize(
    ("fmt", "naming", "share"), [("nvfp4", "compressed-tensors", "llama"), ("fp8_block", "deepseek", ())]
)
def test_a_run_is_exported_as_its_live_model(tmp_path: Path, fmt: str, naming: str, share: Any) -> None:
    """Weights that were shared in training are shared in the export, without an option."""
    model = quantized("llama", fmt, share)
    optimizer = zerocast.ZeroAdamW(model.named_parameters(), lr=1e-3)
    optim.save(optimizer, tmp_path / "checkpoint")
    export_hf(model, tmp_path / "live", naming)
    made("llama").config.save_pretrained(tmp_path / "model")
    arguments = [tmp_path / "checkpoint", tmp_path / "out", "--model", tmp_path / "model", "--naming", naming]
    assert main(["export", *map(str, arguments)]) == 0
    check_same(tmp_path / "out", tmp_path / "live")


@pytest.mark.parametrize("name", ["llama", "llama, tied"])
def test_weights_of_transformers(tmp_path: Path, capsys: Any, name: str) -> None:
    """An untied head, which is no part of `model.`, is not lost; experts are cast one by one."""
    made(name).save_pretrained(tmp_path / "in")
    options = ["--naming", "compressed-tensors", "--format", "nvfp4", "--weights", "*_proj.weight"]
    assert main(["export", str(tmp_path / "in"), str(tmp_path / "out"), *options]) == 2
    assert "groups of weights that engines fuse" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["export", str(tmp_path / "in"), str(tmp_path / "out"), *options, "--share-amax", "llama"]) == 0
    export_hf(quantized(name, "nvfp4", "llama"), tmp_path / "live", "compressed-tensors")
    check_same(tmp_path / "out", tmp_path / "live")


@pytest.mark.slow
def test_experts_of_transformers(tmp_path: Path) -> None:
    model = made("qwen3_moe")
    model.save_pretrained(tmp_path / "in")  # type: ignore[operator]
    options = ["--naming", "deepseek", "--format", "fp8_block", "--weights", "*_proj.weight"]
    assert main(["export", str(tmp_path / "in"), str(tmp_path / "out"), *options]) == 0
    zerocast.quantize_(model, Recipe({"*_proj.weight": "fp8_block", "*.experts.*": "fp8_block"}), dtype=torch.bfloat16)
    export_hf(model, tmp_path / "live", "deepseek")
    check_same(tmp_path / "out", tmp_path / "live")
    assert torch.equal(logits(read(tmp_path / "out")), logits(read(tmp_path / "live")))


def test_a_config_of_another_model(tmp_path: Path, capsys: Any) -> None:
    made("llama").save_pretrained(tmp_path / "model")
    made("qwen3").config.save_pretrained(tmp_path / "other")
    arguments = [tmp_path / "model", tmp_path / "out", "--naming", "bf16", "--model", tmp_path / "other"]
    assert main(["export", *map(str, arguments)]) == 2
    assert "these weights are not those of Qwen3" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
