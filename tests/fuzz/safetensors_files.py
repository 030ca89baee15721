"""safetensors files whose headers say what is not so, written byte by byte."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1, "I64": 8, "F64": 8}
NAMES = ("matrix", "vector", "scalar", "matrix_scale", "matrix_packed", "matrix_global_scale", "matrix_scale_inv")
DTYPES = (*SIZES, *SIZES, "F8_E8M0", "F4", "BOOL", "C64", "float32", "", 4, None)
SHAPES: tuple[Any, ...] = (
    *([24, 16], [24, 16], [24, 8], [24, 1], [5], [], [1], [0], [0, 3], [24, 16, 1]),
    *([2**62, 4], [2**31, 2**31], [-24, -16], [24.0, 16], ["24"], None, 7),
)
PLACES = ("good",) * 6 + ("overlap", "gap", "behind", "negative", "backwards", "short", "long", "huge", "text", "one")


@dataclass(frozen=True)
class Tensor:
    """An item of a header; `place` says how its offsets are wrong."""

    name: str
    dtype: Any
    shape: Any
    place: str


@dataclass(frozen=True)
class Header:
    """A header, and what is wrong with all of it."""

    tensors: tuple[Tensor, ...]
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


def _size(one: Tensor) -> int:
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


tensors = st.builds(
    Tensor, st.sampled_from(NAMES), st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.sampled_from(PLACES)
)
headers = st.builds(
    Header,
    st.lists(tensors, min_size=1, max_size=4, unique_by=lambda one: one.name).map(tuple),
    st.sampled_from(LIES),
)
GOOD = Tensor("matrix", "F32", [24, 16], "good")
# each with one thing wrong
WRONG: dict[str, Header] = {
    **{f"place {p}": Header((GOOD, Tensor("vector", "F32", [5], p))) for p in PLACES if p != "good"},
    **{f"shape {s}": Header((Tensor("matrix", "F32", s, "good"),)) for s in SHAPES[10:]},
    **{f"dtype {d!r}": Header((Tensor("matrix", d, [24, 16], "good"),)) for d in ("float32", "", 4, None)},
    **{lie: Header((GOOD,), lie) for lie in LIES if lie},
}
