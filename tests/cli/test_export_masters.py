"""zerocast export to a checkpoint and back is what it was, and safetensors hold the weights that the library would export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zerocast
from tests.checkpoint.storage import SOURCES, new_values
from tests.optim.probe import MIXED
from tests.optim.runs import Run, Trainer
from tests.serve.test_export import LAYOUTS, decode
from zerocast import QuantizedWeight, optim
from zerocast.checkpoint.sources import open_source
from zerocast.checkpoint.sources.source import Span, read_span
from zerocast.cli import main

SHAPES: dict[str, tuple[int, ...]] = {
    "up.weight": (128, 256),
    "experts": (2, 128, 64),
    "embed": (40, 16),
    "norm": (16,),
}


def exported(capsys: Any, to: str, *arguments: object) -> dict[str, Any]:
    assert main(["export", *map(str, arguments), "--to", to, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("kind", ["file", "safetensors", "safetensors_folder", "dcp"])
def test_into_a_checkpoint_of_masters(capsys: Any, tmp_path: Path, kind: str) -> None:
    """An optimizer takes the exported checkpoint, and exporting it back gives the same values."""
    (tmp_path / "in").mkdir()
    state = new_values(SHAPES, torch.bfloat16)
    source = SOURCES[kind](state, tmp_path / "in")
    found = exported(capsys, "checkpoint", source, tmp_path / "c")
    assert found["tensors"] == len(SHAPES) and "manifest.json" in found["files"]
    opened = open_source(tmp_path / "c")
    for name, tensor in state.items():
        assert opened.entries[f"model.{name}"].dtype == "float32"
        assert torch.equal(read_span(opened, f"model.{name}", Span(0, tensor.numel())), tensor.float().reshape(-1))
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(t.shape)) for name, t in state.items() if "." not in name})
    optim.load_masters(zerocast.ZeroAdamW(model.named_parameters()), tmp_path / "c", ignore=["*up.weight"])
    assert all(torch.equal(parameter, state[name].float()) for name, parameter in model.items())
    exported(capsys, "safetensors", tmp_path / "c", tmp_path / "back", "--dtype", "float32")
    back = load_file(tmp_path / "back" / "model-00001-of-00001.safetensors")
    assert set(back) == set(state)
    assert all(torch.equal(back[name], tensor.float()) for name, tensor in state.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masters_of_either_dtype(capsys: Any, tmp_path: Path, dtype: str) -> None:
    """The command says which it wrote, and an optimizer loads both."""
    state = new_values(SHAPES, torch.float32)
    save_file(state, tmp_path / "m.safetensors")
    options = ["--to", "checkpoint", *(["--masters", dtype] if dtype != "float32" else [])]
    assert main(["export", str(tmp_path / "m.safetensors"), str(tmp_path / "c"), *options]) == 0
    assert f"{len(SHAPES)} masters in {dtype}; formats are recorded for 0" in capsys.readouterr().out
    assert {entry.dtype for entry in open_source(tmp_path / "c").entries.values()} == {dtype}
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(state[name].shape)) for name in ("embed", "norm")})
    optim.load_masters(zerocast.ZeroAdamW(model.named_parameters()), tmp_path / "c", ignore=["*up.weight", "*experts"])
    for name, parameter in model.items():
        assert torch.equal(parameter, state[name].to(getattr(torch, dtype)).float())


@pytest.mark.parametrize(("naming", "fmt"), [("compressed-tensors", "nvfp4"), ("deepseek", "fp8_block")])
def test_into_the_namings_of_engines(capsys: Any, tmp_path: Path, naming: str, fmt: str) -> None:
    """Files in the namings of engines decode by their rules to the cast that the library makes."""
    state = new_values(SHAPES, torch.float32)
    save_file(state, tmp_path / "m.safetensors")
    options = ["--naming", naming, "--format", fmt, "--weights", "up.*", "--shard-bytes", 20000]
    found = exported(capsys, "safetensors", tmp_path / "m.safetensors", tmp_path / "out", *options)
    assert found["quantized"] == {"up.weight": fmt} and len(found["files"]) > 2
    assert sum(found["files"].values()) == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    written: dict[str, Any] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        written |= load_file(path)
    weight = QuantizedWeight.empty(state["up.weight"].shape, fmt)
    zerocast.quantize.cast_whole(weight, state["up.weight"])
    wanted = weight.dequantize().float()
    found_values = decode(written, "up.weight", wanted.shape, LAYOUTS[naming][fmt])
    torch.testing.assert_close(found_values, wanted, rtol=2**-8, atol=0.0)
    assert torch.equal(written["norm"], state["norm"].bfloat16())


def test_a_run_is_exported_with_its_own_formats(capsys: Any, tmp_path: Path) -> None:
    """Dequantized bf16 is what the live weights dequantize to, delayed scales included."""
    trainer = Trainer(Run(tuple(spec for spec in MIXED if spec.dtype is torch.bfloat16)))
    trainer.train(range(3))
    optim.save(trainer.optimizer, tmp_path / "c")
    found = exported(capsys, "safetensors", tmp_path / "c", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    for name, parameter in trainer.probe.named_parameters():
        live = parameter.dequantize() if isinstance(parameter, QuantizedWeight) else parameter
        assert torch.equal(written[name], live), name
        assert (name in found["quantized"]) == isinstance(parameter, QuantizedWeight)
