"""Metadata may name what is listed of a module, and nothing else of it."""

import pickle
from pathlib import Path

import pytest

from zerocast.checkpoint.sources.dcp import _METADATA_CLASSES, SafeReader

# an attribute that each listed module has, and that is not listed
OTHERS = {
    "torch.distributed.checkpoint.metadata": "os",
    "torch.distributed.checkpoint.filesystem": "FileSystemReader",
    "torch": "load",
    "torch.serialization": "load",
    "collections": "Counter",
    "pathlib": "Path",
}


@pytest.mark.parametrize("module", _METADATA_CLASSES)
def test_other_attributes_of_a_listed_module_are_refused(module: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{OTHERS[module]}\n.".encode())
    with pytest.raises(pickle.UnpicklingError, match=f"may not contain {module}.{OTHERS[module]}"):
        SafeReader(tmp_path).read_metadata()
