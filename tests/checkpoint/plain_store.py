"""A store over a local folder, for fsspec: it has no rename and no folders of their own, and may go away after so many changes.

It promises less than object stores do: where it goes away, half of a file may stay.
"""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec import AbstractFileSystem


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


def register(root: Path | str) -> None:
    """Have plain:// URLs opened under `root` in this process."""
    fsspec.register_implementation("plain", PlainStore, clobber=True)
    PlainStore.root, PlainStore.left, PlainStore.changes = Path(root), None, []


@contextlib.contextmanager
def going_away(after: int | None, leaves_half: bool) -> Iterator[None]:
    """The store goes away after so many changes, and is there again afterwards."""
    PlainStore.left, PlainStore.leaves_half, PlainStore.changes = after, leaves_half, []
    try:
        yield
    finally:
        PlainStore.left = None
