"""safetensors files that lie, through every reader of ours: an error that says so, or the bytes that the header names."""

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tests.fuzz.call_limits import LENGTHS, SAID, fuzz
from tests.optim.probe import Spec
from tests.optim.runs import Run, Trainer
from zerocast import optim
from zerocast.checkpoint.sources import open_source
from zerocast.inspection import Contents, choose
from zerocast.serve import Receiver, dequantized
from zerocast.serve.from_masters import cast_tensors, write_checkpoint
from zerocast.serve.write import SHARD_BYTES, write_safetensors

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1, "I64": 8, "F64": 8}
NAMES = ("matrix", "vector", "scalar", "matrix_scale", "matrix_packed", "matrix_global_scale", "matrix_scale_inv")
DTYPES = (*SIZES, *SIZES, "F8_E8M0", "F4", "BOOL", "C64", "float32", "", 4, None)
SHAPES: tuple[Any, ...] = (
    *([24, 16], [24, 16], [24, 8], [24, 1], [5], [], [1], [0], [0, 3], [24, 16, 1]),
    *([2**62, 4], [2**31, 2**31], [-24, -16], [24.0, 16], ["24"], None, 7),
)
PLACES = ("good",) * 6 + ("overlap", "gap", "behind", "negative", "backwards", "short", "long", "huge", "text", "one")


@dataclass(frozen=True)
class Item:
    """An item of a header; `place` says how its offsets are wrong."""

    name: str
    dtype: Any
    shape: Any
    place: str


@dataclass(frozen=True)
class Header:
    """A header, and what is wrong with all of it."""

    tensors: tuple[Item, ...]
    lie: str = ""

    def write(self, path: Path) -> None:
        items, end = [], 0
        for one in self.tensors:
            size = _size(one)
            items.append(
                (one.name, {"dtype": one.dtype, "shape": one.shape, "data_offsets": _place(one.place, end, size)})
            )
            end += size
        if self.lie == "twice" and items:
            items.append((items[0][0], {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}))
        if self.lie == "metadata":
            items.insert(0, ("__metadata__", {"format": 5, "nested": {"a": []}}))
        if self.lie == "metadata of a tensor":
            items.insert(0, ("__metadata__", {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}))
        text = "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(item)}" for name, item in items) + "}"
        text = {"no json": text[:-1], "a list": f"[{text}]", "deep": "[" * 20_000}.get(self.lie, text)
        length = {"long header": len(text) + 10**6, "huge header": 2**63, "short header": 3}.get(self.lie, len(text))
        path.write_bytes(struct.pack("<Q", length) + text.encode() + bytes(i % 251 for i in range(end)))


LIES = ("",) * 8 + (
    *("twice", "metadata", "metadata of a tensor", "no json", "a list", "deep"),
    *("long header", "huge header", "short header"),
)


def _size(one: Item) -> int:
    """Return the bytes that the item stands for as far as they are known, at most a few thousand."""
    if not isinstance(one.shape, list) or not all(isinstance(extent, int) and extent >= 0 for extent in one.shape):
        return 4
    numel = 1
    for extent in one.shape:
        numel *= extent
    return min(numel * SIZES.get(one.dtype, 1), 4096)


def _place(place: str, begin: int, size: int) -> Any:
    end = begin + size
    return {
        "overlap": [max(0, begin - 4), max(0, end - 4)],
        "gap": [begin + 8, end + 8],
        "behind": [begin + 10**6, end + 10**6],
        "negative": [-8, size - 8],
        "backwards": [end, begin],
        "short": [begin, max(begin, end - 1)],
        "long": [begin, end + 4],
        "huge": [2**64 - 4, 2**64],
        "text": [str(begin), str(end)],
        "one": [begin],
    }.get(place, [begin, end])


item_strategy = st.builds(
    Item, st.sampled_from(NAMES), st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.sampled_from(PLACES)
)
headers = st.builds(
    Header,
    st.lists(item_strategy, min_size=1, max_size=4, unique_by=lambda one: one.name).map(tuple),
    st.sampled_from(LIES),
)
GOOD = Item("matrix", "F32", [24, 16], "good")
# each with one thing wrong
WRONG: dict[str, Header] = {
    **{f"place {p}": Header((GOOD, Item("vector", "F32", [5], p))) for p in PLACES if p != "good"},
    **{f"shape {s}": Header((Item("matrix", "F32", s, "good"),)) for s in SHAPES[10:]},
    **{f"dtype {d!r}": Header((Item("matrix", d, [24, 16], "good"),)) for d in ("float32", "", 4, None)},
    **{lie: Header((GOOD,), lie) for lie in LIES if lie},
}


RUN = Run((Spec("matrix", (24, 16), "fp8_block"), Spec("vector", (5,))))
Reader = Callable[[Path], object]


def read_all(path: Path) -> dict[str, Tensor]:
    """Read each tensor from the sources, and check it against the file's bytes at its offsets."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    source, found = open_source(path), {}
    places = {
        name: item["data_offsets"] for name, item in json.loads(content[8:start]).items() if name != "__metadata__"
    }
    for name, entry in source.entries.items():
        found[name] = source.read(name, [0] * len(entry.shape), entry.shape)
        assert tuple(found[name].shape) == entry.shape
        first, last = places[name]
        bytes_ = found[name].contiguous().view(-1).view(torch.uint8) if found[name].numel() else torch.empty(0)
        assert bytes(bytes_.tolist()) == content[start + first : start + last], name
    return found


def load_masters(path: Path) -> None:
    optim.load_masters(Trainer(RUN).optimizer, path)


def convert(path: Path) -> None:
    contents = Contents.read(path)
    names = list(contents.entries)
    chosen = choose(contents.entries, {}, "fp8_block", ["*"], torch.bfloat16)
    write_checkpoint(contents, names, chosen, path.parent / "checkpoint")
    source = cast_tensors(contents, names, chosen, torch.bfloat16)
    write_safetensors(source, path.parent / "exported", "bf16", SHARD_BYTES)


def decode(path: Path) -> None:
    """Decode the stored codes of a file to values of their shape, or to an error that names the weight."""
    for name, value in dequantized(stored(path)):
        assert value.dim() != 2 or math.prod(value.shape) == value.numel(), name
        value.sum()


def receive(path: Path) -> None:
    Receiver(stored(path))


def stored(path: Path) -> dict[str, Tensor]:
    """Load the tensors of a file as a user does. What safetensors refuses never comes to us."""
    open_source(path)
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"safetensors refuses {path.name}: {error}") from error
    return tensors


READERS: dict[str, Reader] = {
    "sources": read_all,
    "load_masters": load_masters,
    "convert": convert,
    "dequantized": decode,
    "Receiver": receive,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", READERS)
def test_a_lie_is_an_error(tmp_path: Path, reader: str) -> None:
    Header((GOOD,)).write(tmp_path / "good.safetensors")
    read_all(tmp_path / "good.safetensors")
    for name, header in WRONG.items():
        file = tmp_path / "file.safetensors"
        header.write(file)
        try:
            READERS[reader](file)
        except SAID as error:
            assert len(str(error)) > 10, name
        else:
            pytest.fail(f"{name} was read")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seconds", LENGTHS)
def test_any_header(tmp_path: Path, seconds: float) -> None:
    def check(header: Header) -> None:
        file = tmp_path / "file.safetensors"
        header.write(file)
        for reader in (read_all, decode, receive):
            try:
                reader(file)
            except SAID as error:
                assert str(error).strip()

    fuzz(seconds, headers, check)


CODES = torch.zeros(32, 32, dtype=torch.uint8)
E4M3 = torch.float8_e4m3fn
STORED: dict[str, dict[str, Any]] = {
    "flat codes": {"w": CODES.view(-1), "w_scale": torch.zeros(32, 1, dtype=torch.uint8)},
    "no scales": {"w": CODES},
    "few scales": {"w_packed": CODES, "w_scale": torch.zeros(1, 1, dtype=torch.uint8)},
    "many scales": {"w_packed": CODES, "w_scale": torch.zeros(64, 2, dtype=torch.uint8)},
    "no global scale": {"w_packed": CODES, "w_scale": torch.zeros(32, 4).to(E4M3)},
    "two global scales": {
        "w_packed": CODES,
        "w_scale": torch.zeros(32, 4).to(E4M3),
        "w_global_scale": torch.ones(2),
    },
    "no scale": {"w": CODES.view(E4M3), "w_scale": torch.ones(0)},
    "few blocks": {"w": CODES.view(E4M3).repeat(8, 8), "w_scale_inv": torch.ones(1, 2)},
    "half a row": {"w_packed": CODES[:, :7].contiguous(), "w_scale": torch.zeros(32, 1, dtype=torch.uint8)},
}


@pytest.mark.parametrize("name", STORED)
def test_parts_that_store_no_weight(name: str) -> None:
    with pytest.raises(ValueError, match=r"w|\d"):
        list(dequantized(STORED[name]))
