"""Files that a command writes: whole under their name, or not there."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """Where to write what will be `path`; it has that name when the body ends, and is removed if the body raises."""
    if path.exists() and not path.is_file():  # such as /dev/null, or a folder, which raises
        yield path
        return
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
