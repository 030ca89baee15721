"""The part of the keys of torch's caches of compiled graphs that tells which code made a graph.

torch keys a graph by what Dynamo traced and by its inputs. The functions of this package run below
that, while a graph is made, so a cache on disk would return graphs of code that has changed since.
"""

import functools
import hashlib
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
# What is traced into graphs, and what says the shapes that they rely on. The first has the version.
TRACED = ("__init__.py", "backends", "formats", "fsdp2", "gemm", "weight")


@functools.cache
def digest_of_sources(package: Path = PACKAGE) -> str:
    """The SHA-256 of the traced sources, which are read once in a process."""
    digest = hashlib.sha256()
    for entry in TRACED:
        path = package / entry
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return digest.hexdigest()
