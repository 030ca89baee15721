"""Where tests of checkpoints write, and what they find: the same tensors in every kind of source, folders of checkpoints, and a
store over a local folder, for fsspec: it has no rename and no folders of their own, and may go away after so many changes.

The store promises less than object stores do: where it goes away, half of a file may stay.
"""

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from fsspec import AbstractFileSystem
from safetensors.torch import save_file
from torch import Tensor

from tests.optim.probe import MIXED
from tests.optim.runs import Run, Trainer
from zerocast.checkpoint.writer import LEASE
from zerocast.optim import Checkpoints

State = Mapping[str, Tensor]


class MakesAFolder:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def as_mapping(state: State, folder: Path) -> Any:
    return dict(state)


def as_file(state: State, folder: Path) -> Any:
    torch.save(dict(state), folder / "weights.pt")
    return folder / "weights.pt"


def as_old_file(state: State, folder: Path) -> Any:
    """In the format before zip archives, which cannot be mapped; with things beside the tensors."""
    content = {"state_dict": dict(state), "epoch": 3, "name": "run"}
    torch.save(content, folder / "weights.pth", _use_new_zipfile_serialization=False)
    return folder / "weights.pth"


def as_safetensors(state: State, folder: Path) -> Any:
    save_file({f"model.{name}": tensor.contiguous() for name, tensor in state.items()}, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def as_safetensors_folder(state: State, folder: Path) -> Any:
    """Two files and an index, which leaves out what else a file holds."""
    halves = [dict(list(state.items())[::2]), dict(list(state.items())[1::2])]
    places = {}
    for number, half in enumerate(halves, 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({**{n: t.contiguous() for n, t in half.items()}, "unlisted": torch.zeros(3)}, folder / file)
        places |= dict.fromkeys(half, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def as_dcp(state: State, folder: Path) -> Any:
    dcp.save({"model": dict(state), "steps": 3}, checkpoint_id=folder, no_dist=True)
    return folder


SOURCES: Mapping[str, Callable[[State, Path], Any]] = {
    write.__name__[3:]: write
    for write in (as_mapping, as_file, as_old_file, as_safetensors, as_safetensors_folder, as_dcp)
}


def new_values(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Fresh values that are none of a model's initial ones."""
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


# Formats with delayed scales, with blocks and without any.
FEW = Run(tuple(spec for spec in MIXED if spec.name in ("norm", "delayed", "nv", "bias")))


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, without the lease of its writer."""
    return sorted(path.name for path in folder.iterdir() if path.name != LEASE)


def save_few(folder: str, steps: range = range(1, 3)) -> None:
    """Save checkpoints of these steps of `FEW`."""
    trainer, checkpoints = Trainer(FEW), Checkpoints(folder)
    for step in steps:
        trainer.step(step)
        checkpoints.save(trainer.optimizer, step)


class Gone(OSError):
    """The store went away."""


class PlainStore(AbstractFileSystem):
    """plain://a/b is the file a/b under `root`."""

    protocol = "plain"
    cachable = False
    root: ClassVar[Path]
    # The number of changes until the store goes away; None for one that stays.
    left: ClassVar[int | None] = None
    # True if half of the file that is written then stays.
    leaves_half: ClassVar[bool] = False
    changes: ClassVar[list[str]] = []

    @classmethod
    def _change(cls, what: str) -> bool:
        """Count a change. True if the store goes away in the middle of it, Gone if it has gone."""
        if cls.left is not None:
            cls.left -= 1
            if cls.left < 0 and not (cls.left == -1 and cls.leaves_half):
                raise Gone("the store is gone")
        cls.changes.append(what)
        return cls.left == -1

    def _file(self, path: str) -> Path:
        return self.root / self._strip_protocol(path).strip("/")

    def _open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> Any:
        file = self._file(path)
        if mode == "rb":
            if not file.is_file():
                raise FileNotFoundError(path)
            return file.open("rb")
        assert mode == "wb"
        breaks = self._change(f"write {file.name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        return (_Breaking if breaks else _Upload)(file, "wb")

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = self._strip_protocol(path).strip("/")
        file = self.root / name
        if not file.is_file() and not any(other.is_file() for other in file.rglob("*")):
            raise FileNotFoundError(path)
        kind = "file" if file.is_file() else "directory"
        return {"name": name, "size": file.stat().st_size if kind == "file" else None, "type": kind}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        info = self.info(path)
        if info["type"] == "file":
            return [info] if detail else [info["name"]]
        found = []
        for file in sorted((self.root / info["name"]).iterdir()):
            with contextlib.suppress(FileNotFoundError):
                found.append(self.info(str(file.relative_to(self.root))))
        return found if detail else [entry["name"] for entry in found]

    def rm_file(self, path: str) -> None:
        if self._file(path).is_dir():
            return
        if not self._file(path).exists():
            raise FileNotFoundError(path)
        if self._change(f"delete {self._file(path).name}"):
            raise Gone("the store is gone")
        self._file(path).unlink()

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        with self.open(path1, "rb") as source, self.open(path2, "wb") as target:
            target.write(source.read())


class _Upload(io.FileIO):
    """A file that is written."""

    def commit(self) -> None:
        """Called at the end of a transaction of fsspec; the file is there already."""


class _Breaking(_Upload):
    """A file of which the first write is done by half, then the store is gone."""

    def write(self, content: Any) -> int:
        super().write(bytes(content)[: len(bytes(content)) // 2])
        raise Gone("the store is gone")


def register_plain_store(root: Path | str) -> None:
    """Have plain:// URLs opened under `root` in this process."""
    fsspec.register_implementation("plain", PlainStore, clobber=True)
    PlainStore.root, PlainStore.left, PlainStore.changes = Path(root), None, []


@contextlib.contextmanager
def store_going_away(after: int | None, leaves_half: bool) -> Iterator[None]:
    """The store goes away after so many changes, and is there again afterwards."""
    PlainStore.left, PlainStore.leaves_half, PlainStore.changes = after, leaves_half, []
    try:
        yield
    finally:
        PlainStore.left = None
