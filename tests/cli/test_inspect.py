"""zerocast inspect: contents and statistics equal those of the whole tensors, for every format; damage has its own status."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import casts
from tests.checkpoint.storage import SOURCES
from tests.optim.probe import MIXED
from tests.optim.runs import Run, Trainer
from zerocast import QuantizedWeight, get_format, inspection, optim
from zerocast.checkpoint.sources import source
from zerocast.cli import main
from zerocast.integrations import zero_run
from zerocast.quantize import cast_whole

FORMATS = [fmt for fmt in casts.FORMATS if fmt != "identity"]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a weight is several."""
    monkeypatch.setattr(source, "PIECE", 128 * 64)


def master() -> Tensor:
    """Return numbers of very different size, zeros, and values that nothing but FP32 can hold."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(320, 96, generator=generator) * 10.0 ** torch.randint(-7, 3, (320, 1), generator=generator)
    x[5] = 0.0
    x[:, 7] *= 1e-30
    return x


def report(capsys: Any, *arguments: object) -> dict[str, Any]:
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_statistics(capsys: Any, tmp_path: Path, fmt: str, dtype: str) -> None:
    """Statistics agree with the library's own cast of the whole weight, dequantized."""
    x = master()
    save_file({"w": x, "norm": x[0].clone()}, tmp_path / "m.safetensors")
    found = report(capsys, tmp_path / "m.safetensors", "--format", fmt, "--dtype", dtype)
    one, norm = found["weights"][1], found["weights"][0]
    assert (one["name"], norm["name"], norm["saturated"]) == ("w", "norm", None)
    weight = QuantizedWeight.empty(x.shape, fmt, torch.float32)  # so that `dequantize` rounds nothing
    rounded = x.to(getattr(torch, dtype)).float()
    cast_whole(weight, rounded)
    if weight.scale is not None:
        cast_whole(weight, rounded)
    wanted = weight.dequantize()
    assert one["format"] == str(get_format(fmt))
    assert one["amax"] == float(x.abs().max())
    assert one["zeros"] == pytest.approx(float((x == 0).double().mean()))
    assert one["flushed"] == pytest.approx(float(((x != 0) & (wanted == 0)).double().mean()))
    assert one["flushed"] > 0
    error = (wanted.double() - x.double()).norm() / x.double().norm()
    assert one["error"] == pytest.approx(float(error), rel=1e-6)
    for counts, values in ((one["masters"], x), (one["casts"], wanted)):
        powers = values[values != 0].double().abs().log2().floor().int() - found["first_binade"]
        assert counts == torch.bincount(powers, minlength=len(counts)).tolist()


@pytest.mark.parametrize(
    ("fmt", "edge"), [("fp8_delayed:margin=-1", 464.0), ("fp8_delayed:element=e5m2,margin=-1", 61440.0)]
)
def test_saturated_is_what_would_round_beyond_the_largest_code(
    capsys: Any, tmp_path: Path, fmt: str, edge: float
) -> None:
    """The scale is twice what the amax allows, so that `edge` is half of it, computed by hand."""
    amax = edge / 2 * 4  # scaled by 2 * max / amax
    spec = get_format(fmt)
    assert spec.element
    scale = 2 * spec.element.max / amax
    below, above = edge / scale * (1 - 2**-6), edge / scale * (1 + 2**-6)
    x = torch.full((16, 16), below)
    x[0, 0], x[1, :5], x[2, :3] = amax, above, -above
    save_file({"w": x}, tmp_path / "m.safetensors")
    (one,) = report(capsys, tmp_path / "m.safetensors", "--format", fmt, "--dtype", "float32")["weights"]
    assert one["saturated"] == 9 / 256


def test_a_checkpoint_with_its_formats(capsys: Any, tmp_path: Path) -> None:
    """A checkpoint is cast by the run's recipe and delayed scales, so that errors are those of the live casts."""
    trainer = Trainer(Run(MIXED))
    trainer.train(range(3))
    optim.save(trainer.optimizer, tmp_path / "c", extra={"mine": torch.zeros(4)})
    picture = tmp_path / "histogram.png"
    found = report(capsys, tmp_path / "c", "--png", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert found["step"] == 3 and found["torch"] == torch.__version__ and found["checked_files"] == 2
    assert found["other"]["extra"] == {"tensors": 1, "bytes": 16}
    assert found["masters"]["tensors"] == len(MIXED)
    by_name = {one["name"]: one for one in found["weights"]}
    masters = trainer.optimizer.state_dict()["model"]
    for name, parameter in trainer.probe.named_parameters():
        if not isinstance(parameter, QuantizedWeight):
            assert by_name[name]["format"] == "float32"
            continue
        assert by_name[name]["format"] == str(parameter.format)
        x = masters[name].double()
        error = float((parameter.dequantize().double() - x).norm() / x.norm())
        assert by_name[name]["error"] == pytest.approx(error, rel=2**-7)  # `dequantize` rounds to the nominal dtype
    assert main(["inspect", str(tmp_path / "c")]) == 0
    text = capsys.readouterr().out
    assert "2 files as their hashes say" in text and "after 3 steps" in text


def test_the_folder_of_a_trainer(capsys: Any, tmp_path: Path) -> None:
    """The masters of a run's last checkpoint are read, and not the rounded weights beside them."""
    trainer = Trainer(Run(MIXED))
    for step in (2, 10):
        trainer.train(range(1))
        folder = tmp_path / f"checkpoint-{step}"
        zero_run.save(folder / "zerocast", [trainer.optimizer], [trainer.probe])
        save_file({"w": torch.ones(2, 2)}, folder / "model.safetensors")
    for path in (folder, tmp_path):
        found = report(capsys, path)
        assert Path(found["checkpoint"]).parent == folder / "zerocast/0"
        assert found["step"] == 2
        assert found["masters"]["tensors"] == len(MIXED)
    zero_run.save(folder / "zerocast", [trainer.optimizer, Trainer(Run(MIXED[:2])).optimizer], [trainer.probe])
    assert main(["inspect", str(folder)]) == 1
    assert "holds the masters of 2 optimizers, name one" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["file", "safetensors_folder", "dcp"])
def test_any_kind(capsys: Any, tmp_path: Path, kind: str) -> None:
    path = SOURCES[kind]({"w": master(), "odd": torch.ones(5, 7), "ids": torch.arange(3)}, tmp_path)
    found = report(capsys, path, "--format", "nvfp4")
    assert {one["name"]: one["format"] for one in found["weights"]} == {"w": "nvfp4", "odd": "float32"} | (
        {"unlisted": "float32"} if "unlisted" in str(found["weights"]) else {}
    )
    assert found["kept"] == ["odd"]
    assert found["no_masters"] == {"ids": "int64 (3,)"}


def test_memory_does_not_grow_with_the_weight(tmp_path: Path) -> None:
    """Pieces are read one after the other: no read is larger than a piece."""
    from zerocast.checkpoint.sources import open_source

    save_file({"w": torch.randn(4096, 64)}, tmp_path / "m.safetensors")
    opened, sizes = open_source(tmp_path / "m.safetensors"), []
    read = opened.read
    opened.read = lambda name, o, s: sizes.append(torch.Size(s).numel()) or read(name, o, s)  # type: ignore[method-assign, func-returns-value]
    inspection.measure(opened, "w", get_format("nvfp4"))
    assert max(sizes) <= 128 * 64 and len(sizes) == 2 * 32


def test_what_is_not_finite_or_damaged(capsys: Any, tmp_path: Path) -> None:
    x = master()
    x[0, 0], x[1, 1] = float("nan"), float("inf")
    save_file({"w": x}, tmp_path / "m.safetensors")
    assert main(["inspect", str(tmp_path / "m.safetensors"), "--format", "fp8_block"]) == 1
    assert "2 not finite" in capsys.readouterr().out
    (tmp_path / "m.safetensors").write_bytes((tmp_path / "m.safetensors").read_bytes()[:-1])
    assert main(["inspect", str(tmp_path / "m.safetensors")]) == 1
    assert "m.safetensors cannot be read as safetensors" in capsys.readouterr().err
    optim.save(Trainer(Run(MIXED[:2])).optimizer, tmp_path / "c")
    next((tmp_path / "c").glob("*.distcp")).write_bytes(b"")
    assert main(["inspect", str(tmp_path / "c")]) == 1
    assert "has 0 bytes, and had" in capsys.readouterr().err


def test_a_folder_of_checkpoints_offers_its_steps(capsys: Any, tmp_path: Path) -> None:
    optimizer = Trainer(Run(MIXED[:2])).optimizer
    for step in (9, 10):
        optim.save(optimizer, tmp_path / f"checkpoints/step_{step:08}")
    assert main(["inspect", str(tmp_path / "checkpoints")]) == 1
    said = capsys.readouterr().err
    assert "it holds checkpoints, of which step_00000010 is the last: step_00000009, step_00000010" in said
    assert main(["inspect", str(tmp_path)]) == 1  # the folder of the run
    assert "of which checkpoints/step_00000010 is the last" in capsys.readouterr().err
