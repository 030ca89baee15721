"""Checkpoints from strangers: reading one runs nothing that it carries, on one rank or several, and changes nothing."""

import hashlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from tests import casts
from tests.checkpoint.storage import FEW, MakesAFolder
from tests.optim.runs import Trainer, snapshot
from tests.workers import error_of
from zerocast import optim
from zerocast.checkpoint import manifest


def saved(path: Path) -> None:
    trainer = Trainer(FEW)
    trainer.train(range(1))
    optim.save(trainer.optimizer, path)


def plant_beside_metadata(path: Path, trap: Path, planted: Any = None) -> None:
    """Write good metadata with an object in it."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    metadata.planner_data = planted or MakesAFolder(trap)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


class Reads:
    """An object whose unpickling reaches for attributes of the classes that metadata may contain."""

    def __reduce__(self) -> Any:
        return getattr, (Metadata, "__init__")


def plant_an_attribute(path: Path, trap: Path) -> None:
    """Write good metadata that reads an attribute of one of its classes."""
    plant_beside_metadata(path, trap, Reads())


def plant_in_tensors(path: Path, trap: Path) -> None:
    """Write code in place of a tensor's bytes."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    index, place = next((i, p) for i, p in metadata.storage_data.items() if i.fqn == "model.nv")
    code = pickle.dumps(MakesAFolder(trap))
    file = path / place.relative_path
    content = bytearray(file.read_bytes())
    content[place.offset : place.offset + place.length] = code.ljust(place.length, b"\0")
    file.write_bytes(content)
    assert index.fqn == "model.nv"


def plant_an_object(path: Path, trap: Path) -> None:
    """Save a pickled object under the name of a tensor."""
    names = list(Trainer(FEW).optimizer.state_dict()["model"])
    state = {f"model.{name}": MakesAFolder(trap) for name in names}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, overwrite=True), no_dist=True)


def plant_a_path(path: Path, trap: Path) -> None:
    """Write good metadata that takes a tensor from a file elsewhere."""
    elsewhere = next(path.glob("*.distcp")).rename(path.parent / "elsewhere")
    metadata = dcp.FileSystemReader(path).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = f"../{elsewhere.name}"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


PLANTS = [plant_beside_metadata, plant_an_attribute, plant_in_tensors, plant_an_object, plant_a_path]


def forge(path: Path) -> None:
    """Write a manifest that agrees with what was planted."""
    files = {file.name: file.read_bytes() for file in path.iterdir() if file.name != manifest.NAME}
    sums = {name: manifest.FileSum(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    manifest.Manifest(sums).write(path)


def refused(path: str) -> str:
    """Return the error of loading. Unless a part was read, the optimizer is as before."""
    trainer = Trainer(FEW)
    before = snapshot(trainer)
    text = error_of(lambda: optim.load(trainer.optimizer, path))
    if Path(path).name != plant_in_tensors.__name__:  # of which a part was read
        casts.assert_same_bytes(snapshot(trainer), before)
    return text


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("plant", PLANTS)
def test_nothing_runs(ranks, tmp_path, plant):
    path, trap = tmp_path / plant.__name__, tmp_path / "trap"
    saved(path)
    plant(path, trap)
    forge(path)
    errors = [refused(str(path)), *ranks(2)(refused, str(path))]
    assert not trap.exists()
    assert all(error.startswith(("UnpicklingError", "ValueError", "RuntimeError")) for error in errors), errors


class AsPython311(pickle.Pickler):
    """A pickler of members of an enumeration as in Python 3.11.0 to 3.11.3."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, _MEM_FORMAT_ENCODING) else NotImplemented


def test_metadata_of_another_python(tmp_path):
    path = tmp_path / "checkpoint"
    saved(path)
    metadata = dcp.FileSystemReader(path).read_metadata()
    with (path / ".metadata").open("wb") as stream:
        AsPython311(stream).dump(metadata)
    forge(path)
    assert b"getattr" in (path / ".metadata").read_bytes()
    before = snapshot(Trainer(FEW))
    trainer = Trainer(FEW)
    optim.load(trainer.optimizer, path)
    assert any((before[name] != value).any() for name, value in snapshot(trainer).items())
