"""A FIFO, a device without end, a folder or a file of 4 TB in the place of each file that zerocast reads is an error, at once."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.storage import FEW, SOURCES, new_values, save_few
from tests.optim.runs import Trainer
from zerocast import optim
from zerocast.bench.report import stored_ratios
from zerocast.checkpoint.manifest import NAME, digest
from zerocast.checkpoint.sources import open_source
from zerocast.footprint.model_files import read_model
from zerocast.optim import Checkpoints

SECONDS = 20


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def huge(path: Path) -> None:
    """Sparse: it takes no room."""
    with path.open("wb") as stream:
        stream.truncate(2**42)


HOSTILE = [fifo, endless, *(pytest.param(one, marks=pytest.mark.slow) for one in (folder, huge))]


def checkpoint(tmp_path: Path) -> Path:
    save_few(str(tmp_path), range(1, 2))
    return tmp_path / "step_00000001"


def load(path: Path) -> None:
    Checkpoints(path.parent).load(Trainer(FEW).optimizer, step=1)


def load_without_manifest(path: Path) -> None:
    (path / NAME).unlink()
    optim.load(Trainer(FEW).optimizer, path)


def forged(path: Path) -> None:
    """The manifest says that the file is empty, as it seems from outside."""
    content = json.loads((path / NAME).read_text())
    content["files"]["__0_0.distcp"]["bytes"] = 0
    del content["sha256"]
    (path / NAME).write_text(json.dumps({**content, "sha256": digest(content)}))
    load(path)


def state_dict_file(tmp_path: Path) -> Path:
    return SOURCES["file"](new_values({"matrix": (4, 4)}, torch.float32), tmp_path)


def safetensors_folder(tmp_path: Path) -> Path:
    return SOURCES["safetensors_folder"](new_values({"matrix": (4, 4), "vector": (3,)}, torch.float32), tmp_path)


def json_file(tmp_path: Path) -> Path:
    return tmp_path / "some.json"


READS: dict[str, tuple[Callable[[Path], Path], str, Callable[[Any], object]]] = {
    "the manifest": (checkpoint, NAME, load),
    "metadata": (checkpoint, ".metadata", load),
    "metadata without a manifest": (checkpoint, ".metadata", load_without_manifest),
    "a file of tensors": (checkpoint, "__0_0.distcp", load),
    "a file of tensors, with a forged manifest": (checkpoint, "__0_0.distcp", forged),
    "a file of tensors without a manifest": (checkpoint, "__0_0.distcp", load_without_manifest),
    "an index": (safetensors_folder, "model.safetensors.index.json", open_source),
    "a file of an index": (safetensors_folder, "model-00001-of-00002.safetensors", open_source),
    "a safetensors file": (lambda path: path / "w.safetensors", "", open_source),
    "a file of torch.save": (state_dict_file, "", open_source),
    "a config": (json_file, "", lambda path: read_model(str(path))),
    "a report of the benchmark": (json_file, "", stored_ratios),
}


@pytest.fixture
def in_time() -> Iterator[None]:
    """SIGALRM ends what waits for a FIFO."""

    def late(*_: object) -> None:
        raise TimeoutError("it waits, or reads on and on")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("name", READS)
def test_what_is_no_file(tmp_path: Path, name: str, hostile: Callable[[Path], None], in_time: None) -> None:
    make, file, read = READS[name]
    path = make(tmp_path)
    target = path / file if file else path
    target.unlink(missing_ok=True)
    hostile(target)
    if hostile is folder and not file and read is open_source:
        return  # a folder is a source
    with pytest.raises((ValueError, RuntimeError, FileNotFoundError)) as caught:
        read(path)
    assert target.name in str(caught.value) or path.name in str(caught.value), caught.value
