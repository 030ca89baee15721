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


BAD = {
    "no config": (["in.pt", "out", "--naming", "bf16"], "zerocast export: "),
    "no weights": (["model", "out", "--naming", "bf16", "--format", "nvfp4"], "--format needs --weights"),
    "no format": (["model", "out", "--naming", "bf16", "--share-amax", "llama"], "--share-amax needs --format"),
    "a config of another model": (
        ["model", "out", "--naming", "bf16", "--model", "other"],
        "these weights are not those of Qwen3",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_exported(tmp_path: Path, capsys: Any, monkeypatch: Any, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(4, 4)}, "in.pt")
    made("llama").save_pretrained("model")
    made("qwen3").config.save_pretrained("other")
    arguments, message = BAD[case]
    try:
        status: Any = main(["export", *arguments])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2 and message in " ".join(capsys.readouterr().err.replace("│", "").split())
    assert not Path("out").exists()
