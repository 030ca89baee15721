"""Output files of a command, which appear complete under their name or not at all."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


def check_folder(path: Path | None) -> None:
    """Raise FileNotFoundError if the folder of an output file is missing, before work is lost."""
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}")


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` when the body ends, and removed if it
    raises.
    """
    if path.exists() and not path.is_file():  # /dev/null, for example; a folder raises on writing
        yield path
        return
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
