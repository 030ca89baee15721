"""Files of other programs: read piece by piece as what they hold, refused by name when they are damaged or carry code."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoint.sources.source_files import KINDS, values
from zerocast.checkpoint.sources import open_source
from zerocast.checkpoint.sources.source import read_span
from zerocast.formats.layout import Span

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (7, 5), "experts": (3, 4, 6), "vector": (9,), "scalar": ()}
SPANS = [Span(0, 35), Span(3, 30), Span(6, 8), Span(10, 10)]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces(tmp_path: Path, kind: str) -> None:
    """Any span of any tensor, f32."""
    state = values(SHAPES, torch.bfloat16)
    source = open_source(KINDS[kind](state, tmp_path))
    front = next(name for name in source.entries if name.endswith("matrix")).removesuffix("matrix")
    for name, tensor in state.items():
        assert source.entries[front + name].shape == tuple(tensor.shape)
        assert source.entries[front + name].dtype == "bfloat16"
        for span in SPANS:
            cut = span.intersect(Span(0, tensor.numel()))
            assert torch.equal(read_span(source, front + name, cut), tensor.float().reshape(-1)[cut.start : cut.stop])


class Runs:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("archive", [True, False])
def test_a_state_dict_that_carries_code(tmp_path: Path, archive: bool) -> None:
    path = tmp_path / "weights.pt"
    state = {"w": torch.zeros(3), "hook": Runs(tmp_path / "trap")}
    torch.save(state, path, _use_new_zipfile_serialization=archive)
    with pytest.raises(ValueError, match=r"weights\.pt is not a file of plain tensors: UnpicklingError"):
        open_source(path)
    assert not (tmp_path / "trap").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "trap").exists()  # it would have worked


def index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


INDICES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file that is missing": (
        lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
        "00002.safetensors is missing",
    ),
    "a tensor that is missing": (
        lambda f: index(f, lambda c: c["weight_map"].update(other="model-00001-of-00002.safetensors")),
        "other is not in .*00001-of-00002.safetensors",
    ),
    "a file elsewhere": (
        lambda f: index(f, lambda c: c["weight_map"].update(other="../secret.safetensors")),
        r"points out of its folder: '\.\./secret\.safetensors'",
    ),
    "no index": (lambda f: (f / "model.safetensors.index.json").write_text("[" * 10_000), "is not an index"),
    "another index": (lambda f: (f / "a.safetensors.index.json").write_text("{}"), "holds 2 indices"),
    "without one, the same name twice": (
        lambda f: (f / "model.safetensors.index.json").unlink(),
        "unlisted is in two files",
    ),
}


@pytest.mark.parametrize("case", INDICES)
def test_indices_that_are_wrong(tmp_path: Path, case: str) -> None:
    change, message = INDICES[case]
    folder = KINDS["safetensors_folder"](values(SHAPES, torch.float32), tmp_path)
    change(folder)
    with pytest.raises(ValueError, match=message):
        open_source(folder)


def test_what_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds neither safetensors files nor a checkpoint"):
        open_source(tmp_path)
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds a list, expected a state dict"):
        open_source(tmp_path / "list.pt")
    deep: Any = torch.zeros(2)
    for _ in range(20):
        deep = {"x": deep}
    with pytest.raises(ValueError, match="nested more than 16 deep"):
        open_source(deep)


def test_codes_are_named(tmp_path: Path) -> None:
    state: dict[str, Tensor] = {"w": torch.zeros(4, 4).to(torch.float8_e4m3fn), "n": torch.arange(3)}
    save_file(state, tmp_path / "codes.safetensors")
    found = open_source(tmp_path / "codes.safetensors").entries
    assert {name: str(entry) for name, entry in found.items()} == {"w": "float8_e4m3fn (4, 4)", "n": "int64 (3,)"}
