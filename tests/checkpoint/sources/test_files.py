"""Files of other programs: read piece by piece as what they hold, refused by name when they are damaged or carry code."""

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from tests.checkpoint.storage import SOURCES, MakesAFolder, new_values
from zerocast.checkpoint.sources import open_source
from zerocast.checkpoint.sources.dcp import _METADATA_CLASSES, SafeReader, first_uneven
from zerocast.checkpoint.sources.source import read_span
from zerocast.formats.layout import Span

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (7, 5), "experts": (3, 4, 6), "vector": (9,), "scalar": ()}
SPANS = [Span(0, 35), Span(3, 30), Span(6, 8), Span(10, 10)]


@pytest.mark.parametrize("kind", SOURCES)
def test_pieces(tmp_path: Path, kind: str) -> None:
    """Any span of any tensor, f32."""
    state = new_values(SHAPES, torch.bfloat16)
    source = open_source(SOURCES[kind](state, tmp_path))
    front = next(name for name in source.entries if name.endswith("matrix")).removesuffix("matrix")
    for name, tensor in state.items():
        assert source.entries[front + name].shape == tuple(tensor.shape)
        assert source.entries[front + name].dtype == "bfloat16"
        for span in SPANS:
            cut = span.intersect(Span(0, tensor.numel()))
            assert torch.equal(read_span(source, front + name, cut), tensor.float().reshape(-1)[cut.start : cut.stop])


@pytest.mark.parametrize("archive", [True, False])
def test_a_state_dict_that_carries_code(tmp_path: Path, archive: bool) -> None:
    path = tmp_path / "weights.pt"
    state = {"w": torch.zeros(3), "hook": MakesAFolder(tmp_path / "trap")}
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
    folder = SOURCES["safetensors_folder"](new_values(SHAPES, torch.float32), tmp_path)
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


# -- metadata of torch.distributed.checkpoint that does not hold together is refused before anything is read by it


Size = torch.Size


def chunk(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["w"]


def box(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(Size(offsets), Size(sizes))


DAMAGE: dict[str, tuple[Callable[[Any], object], str]] = {
    "a part is in no chunk": (
        lambda m: chunk(m).chunks.__setitem__(0, ChunkStorageMetadata(Size([0, 0]), Size([5, 4]))),
        "the chunks of w hold 20 elements of 24",
    ),
    "no chunk": (lambda m: chunk(m).chunks.clear(), "the chunks of w hold 0 elements of 24"),
    "a chunk twice": (lambda m: chunk(m).chunks.append(chunk(m).chunks[0]), "hold 48 elements of 24"),
    "a chunk elsewhere": (
        lambda m: chunk(m).chunks.__setitem__(slice(None), [box([0, 0], [4, 4]), box([2, 0], [2, 4])]),
        r"the chunks of w overlap at element \(2, 0\)",
    ),
    "chunks that leave the first row": (
        lambda m: chunk(m).chunks.__setitem__(slice(None), [box([1, 0], [3, 4]), box([3, 0], [3, 4])]),
        r"the chunks of w leave a gap at element \(0, 0\)",
    ),
    "a larger tensor": (lambda m: setattr(chunk(m), "size", Size([7, 4])), "hold 24 elements of 28"),
    "a smaller one": (lambda m: setattr(chunk(m), "size", Size([5, 4])), "a chunk of w is not inside of it"),
    "other dimensions": (lambda m: setattr(chunk(m), "size", Size([24])), "a chunk of w is not inside of it"),
    "in no file": (lambda m: m.storage_data.clear(), "a chunk of w is in no file"),
    "no dtype": (lambda m: setattr(chunk(m).properties, "dtype", 3), "w has size .* and dtype 3"),
    "no places": (
        lambda m: setattr(m, "storage_data", {"w": 3}),
        "object has no attribute 'offset'|is not a location in a file",
    ),
    "no tensors": (lambda m: setattr(m, "state_dict_metadata", 3), "TypeError"),
    "no chunks": (lambda m: setattr(chunk(m), "chunks", None), "TypeError"),
}


IN_A_FILE = ("a chunk elsewhere", "chunks that leave the first row")


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
    place = (
        next(iter((metadata.storage_data or {}).values()), None) if isinstance(metadata.storage_data, dict) else None
    )
    for one in (chunk(metadata).chunks or []) if case in IN_A_FILE else []:
        metadata.storage_data[MetadataIndex("w", one.offsets)] = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"\.metadata is damaged: .*(" + message + ")"):
        open_source(folder)


@given(st.data())
def test_partitions(data: st.DataObject) -> None:
    """Boxes with gaps and overlaps of any kind against a count by element."""
    size = tuple(data.draw(st.lists(st.integers(0, 4), min_size=0, max_size=3)))
    boxes = list(_cut(data.draw, (0,) * len(size), size, 3))
    for _ in range(data.draw(st.integers(0, 2)) if boxes else 0):
        index = data.draw(st.integers(0, len(boxes) - 1))
        starts = tuple(data.draw(st.integers(0, whole)) for whole in size)
        moved = tuple(data.draw(st.integers(0, whole - start)) for start, whole in zip(starts, size, strict=True))
        boxes[index] = (starts, moved)
    count = torch.zeros(size, dtype=torch.int64)
    for starts, sizes in boxes:
        count[tuple(slice(start, start + extent) for start, extent in zip(starts, sizes, strict=True))] += 1
    wrong = (count != 1).nonzero().tolist()
    said = first_uneven(boxes, size)
    if not wrong:
        assert said is None
    else:
        kind = "overlap" if count[tuple(wrong[0])] > 1 else "leave a gap"
        assert said == f"{kind} at element {tuple(wrong[0])}"


def _cut(draw: Any, starts: tuple[int, ...], sizes: tuple[int, ...], depth: int) -> Iterator[Any]:
    """A partition of a box."""
    axis = draw(st.integers(-1, len(sizes) - 1)) if depth else -1
    if axis < 0:
        yield starts, sizes
        return
    at = draw(st.integers(0, sizes[axis]))
    yield from _cut(draw, starts, (*sizes[:axis], at, *sizes[axis + 1 :]), depth - 1)
    rest = (*starts[:axis], starts[axis] + at, *starts[axis + 1 :])
    yield from _cut(draw, rest, (*sizes[:axis], sizes[axis] - at, *sizes[axis + 1 :]), depth - 1)


def test_hostile_partitions() -> None:
    """Many chunks take time in proportion, and many dimensions are refused."""
    boxes = [((row, column), (1, 1)) for row in range(100) for column in range(100)]
    assert first_uneven(boxes, (100, 100)) is None
    assert first_uneven([*boxes[:-1], boxes[0]], (100, 100)) == "overlap at element (0, 0)"
    deep = [((0,) * 40, (1,) * 40), ((1,) * 40, (1,) * 40)]
    assert first_uneven(deep, (2,) * 40) == "are split in 40 dimensions, but at most 8 are supported"


def test_a_memo_that_would_take_all_memory(folder: Path) -> None:
    """Found by the fuzzer: one flipped byte, and 22 GB before the first error."""
    (folder / ".metadata").write_bytes(b"\x80\x04Nr\xff\xff\xff\x7f.")
    with pytest.raises(ValueError, match="its memo would have 2,147,483,647 entries"):
        open_source(folder)


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
        open_source(tmp_path)
