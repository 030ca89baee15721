"""Metadata of torch.distributed.checkpoint that does not hold together is refused before anything is read by it."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from zerocast.sources import open_source
from zerocast.sources.safe_reader import SafeReader

Size = torch.Size


def chunk(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["w"]


DAMAGE: dict[str, tuple[Callable[[Any], object], str]] = {
    "a part is in no chunk": (
        lambda m: chunk(m).chunks.__setitem__(0, ChunkStorageMetadata(Size([0, 0]), Size([5, 4]))),
        "the chunks of w hold 20 elements of 24",
    ),
    "no chunk": (lambda m: chunk(m).chunks.clear(), "the chunks of w hold 0 elements of 24"),
    "a chunk twice": (lambda m: chunk(m).chunks.append(chunk(m).chunks[0]), "hold 48 elements of 24"),
    "a larger tensor": (lambda m: setattr(chunk(m), "size", Size([7, 4])), "hold 24 elements of 28"),
    "a smaller one": (lambda m: setattr(chunk(m), "size", Size([5, 4])), "a chunk of w is not inside of it"),
    "other dimensions": (lambda m: setattr(chunk(m), "size", Size([24])), "a chunk of w is not inside of it"),
    "in no file": (lambda m: m.storage_data.clear(), "a chunk of w is in no file"),
    "no dtype": (lambda m: setattr(chunk(m).properties, "dtype", 3), "w has size .* and dtype 3"),
    "no places": (
        lambda m: setattr(m, "storage_data", {"w": 3}),
        "object has no attribute 'offset'|is no place in a file",
    ),
    "no tensors": (lambda m: setattr(m, "state_dict_metadata", 3), "TypeError"),
    "no chunks": (lambda m: setattr(chunk(m), "chunks", None), "TypeError"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save({"w": torch.arange(24.0).view(6, 4)}, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", DAMAGE)
def test_what_does_not_hold_together(folder: Path, case: str) -> None:
    spoil, message = DAMAGE[case]
    metadata = SafeReader(folder).read_metadata()
    spoil(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"\.metadata is damaged: .*(" + message + ")"):
        open_source(folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("length", [0, 1, 10, 100, -1, -2])
def test_metadata_that_breaks_off(folder: Path, length: int) -> None:
    content = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(content[:length])
    with pytest.raises((ValueError, pickle.UnpicklingError)):
        open_source(folder)
