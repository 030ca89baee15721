"""The contents of a checkpoint and their casts, for `zerocast inspect` and `zerocast export`.

Contents are the masters and other tensors of a checkpoint or of any other source of masters, and
`choose` selects the formats of its weights. CastStatistics are the effect of a format on one
master, computed by the reference backend. The master is read in pieces of a million elements or 128
rows, whichever is more. A format with a tensor amax reads it twice.
"""

import fnmatch
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zerocast.backends.reference.codec import round_nominal, unpack
from zerocast.backends.reference.quantize import quantize
from zerocast.backends.reference.scales import block_amax
from zerocast.backends.reference.stages import dequantize, rolled
from zerocast.checkpoint.manifest import Manifest, Stored, check_files
from zerocast.checkpoint.sources import HIGH_PRECISION, Entry, TensorSource, open_source
from zerocast.checkpoint.sources.safetensors_files import SafetensorsSource
from zerocast.checkpoint.sources.source import pieces, read_span
from zerocast.checkpoint.store import AnyPath, Location, StorePath, as_location
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats import AmaxPolicy, FormatSpec, get_format
from zerocast.formats.layout import Span, fits, matrix_shape, stored_matrices
from zerocast.formats.shared_amax import SharedAmax
from zerocast.metrics import cast_meter
from zerocast.metrics.cast_meter import CastCounts

MODEL = "model."
EMBEDDING = re.compile(r"emb|wte|wpe", re.IGNORECASE)
# The subfolders with masters in the folder that a trainer saves: of ZeroAdamW, and of accelerate's
# FSDP2.
IN_A_TRAINERS_FOLDER = ("zerocast/*/*", "pytorch_model_fsdp_*")
Dtype = Literal["bfloat16", "float16", "float32"]
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}


@dataclass(frozen=True)
class Contents:
    """A source and the names of its masters.

    Attributes:
        location: the path of the source, which is inside of the given one if that is a trainer's
            folder.
        source: the opened source.
        masters: dict from parameter name to its key in the source, in the order of the model.
        other: (tensors, bytes) of all other tensors, by the first part of their names.
        manifest: the manifest; None if the source has none, in which case no file was checked.
    """

    location: Location
    source: TensorSource
    masters: Mapping[str, str]
    other: Mapping[str, tuple[int, int]]
    manifest: Manifest | None

    @staticmethod
    def read(path: AnyPath, whole_names: bool = False) -> "Contents":
        """Open a path or a URL, after comparing its files with their hashes if it has a manifest.

        For the folder of a trainer, reads the masters in it; for the folder of its run, the last
        masters. Parameter names are keys without the prefix "model." that a checkpoint has. With
        `whole_names` the keys of safetensors are not changed.

        Raises like `open_source`, and ValueError for a file that differs from its hash and for a
        folder with the masters of several optimizers.
        """
        location = _masters_at(as_location(path))
        manifest = Manifest.read(location)
        if manifest is not None:
            check_files(location, ONE_PROCESS)
        source = open_source(location)
        entries = source.entries
        has_prefix = [key.startswith(MODEL) for key in entries]
        if isinstance(source, SafetensorsSource):
            # The names of some of a model's own modules may begin with "model.".
            has_model_prefix = bool(entries) and all(has_prefix) and not whole_names
        else:
            has_model_prefix = any(has_prefix)
        prefix = MODEL if has_model_prefix else ""
        names = (key.removeprefix(prefix) for key in entries if key.startswith(prefix))
        masters = {name: f"{prefix}{name}" for name in sorted(names, key=_order_in_model)}
        other: dict[str, tuple[int, int]] = {}
        for key, entry in entries.items():
            if not key.startswith(prefix):
                kind = key.split(".")[0]
                tensors, nbytes = other.get(kind, (0, 0))
                other[kind] = tensors + 1, nbytes + nbytes_of(entry)
        return Contents(location, source, masters, other, manifest)

    @property
    def entries(self) -> dict[str, Entry]:
        """The masters, keyed by parameter name, without tensors of dtypes that FP32 cannot hold."""
        entries = {name: self.source.entries[key] for name, key in self.masters.items()}
        return {name: entry for name, entry in entries.items() if entry.dtype in HIGH_PRECISION}

    @property
    def stored(self) -> Mapping[str, Stored]:
        """The formats that the weights had when the checkpoint was saved."""
        return self.manifest.formats if self.manifest else {}

    def shared_amaxes(self, names: Iterable[str]) -> dict[str, SharedAmax]:
        """Return, for each of these weights that shared its tensor amax in training, the weights
        that shared it.
        """
        stored = {name: self.stored[name] for name in names if name in self.stored}
        return {name: SharedAmax(record.shares) for name, record in stored.items() if record.shares}

    @property
    def step(self) -> int | None:
        """The number of optimizer steps taken, or None if the source has no such record."""
        steps = (key for key in self.source.entries if key.startswith("optim.state.") and key.endswith(".step"))
        key = next(steps, None)
        return None if key is None else int(self.source.read(key, (), ()))

    def cast_scale(self, name: str) -> Tensor | None:
        """Return f32[1], the scale of the last cast of a weight with delayed scaling; None if the
        source does not have it.
        """
        key = f"zerocast.{name}.cast_scale"
        return self.source.read(key, (0,), (1,)) if key in self.source.entries else None


def _masters_at(location: Location) -> Location:
    """Return the masters in a folder that a trainer saved, or in the last of a run; else the path
    itself. Raises ValueError if the folder has the masters of several optimizers.
    """
    if isinstance(location, StorePath) or not location.is_dir():
        return location
    for folders in (
        [location],
        sorted(location.iterdir(), key=lambda folder: _order_in_model(folder.name), reverse=True),
    ):
        for folder in folders:
            found = [file.parent for glob in IN_A_TRAINERS_FOLDER for file in sorted(folder.glob(f"{glob}/.metadata"))]
            if len(found) > 1:
                names = ", ".join(str(path) for path in found)
                raise ValueError(f"{folder} holds the masters of {len(found)} optimizers, name one: {names}")
            if found:
                return found[0]
    return location


def _order_in_model(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """Return a key that sorts parameters in the order of a model: embeddings, then blocks by
    number, then the modules after the blocks. Files are sorted alphabetically, which differs.
    """
    parts = [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
    is_numbered = len(parts) > 1
    return (not is_numbered and EMBEDDING.search(name) is None), parts if is_numbered else [(-1, ""), *parts]


def nbytes_of(entry: Entry) -> int:
    """Return the size of a tensor in bytes; 0 for a dtype that torch lacks."""
    dtype = getattr(torch, entry.dtype, None)
    return entry.numel * dtype.itemsize if isinstance(dtype, torch.dtype) else 0


@dataclass(frozen=True)
class Chosen:
    """The formats that were chosen for weights.

    Attributes:
        formats: dict from weight name to (format, nominal dtype).
        kept: names of selected weights that stay in high precision, since the format cannot take
            their shape.
    """

    formats: Mapping[str, tuple[FormatSpec, torch.dtype]]
    kept: tuple[str, ...] = ()


def choose(
    masters: Mapping[str, Entry],
    stored: Mapping[str, Stored],
    fmt: str | None,
    weights: Sequence[str],
    nominal: torch.dtype,
) -> Chosen:
    """Choose the format `fmt` and the dtype `nominal` for the matrices that match a glob of
    `weights`. Without `fmt`, choose the formats stored with the checkpoint.

    Raises ValueError for an unknown format and for a glob that matches no weight.
    """
    if fmt is None:
        formats = {
            name: (get_format(record.format), getattr(torch, record.dtype))
            for name, record in stored.items()
            if name in masters
        }
        return Chosen(formats)
    spec = get_format(fmt)
    matrices = {name: entry for name, entry in masters.items() if len(entry.shape) >= 2}
    for glob in weights:
        if not fnmatch.filter(matrices, glob):
            raise ValueError(f"{glob!r} matches no weight; there are: {', '.join(list(matrices)[:8])} ...")
    selected = {name: entry for name, entry in matrices.items() if any(fnmatch.fnmatchcase(name, g) for g in weights)}
    kept = tuple(name for name, entry in selected.items() if not fits(spec, entry.shape))
    return Chosen({name: (spec, nominal) for name in selected if name not in kept}, kept)


# The rows of a piece are a multiple of this, which is a multiple of the rows of every block.
ROWS = 128
# floor(log2) of the smallest f32.
LOWEST = -149
BINADES = 127 - LOWEST + 1


@dataclass(frozen=True)
class CastStatistics:
    """Statistics of one tensor and, if it has a format, of its cast.

    Attributes:
        zeros: share of the elements that are zero.
        nonfinite: number of elements that are NaN or Inf.
        saturated: share that would round beyond the largest code of its block.
        flushed: share that is not zero and decodes to zero.
        error: Frobenius norm of (cast - master) divided by the norm of the master, finite elements
            only.
        masters: nonzero finite elements of the master by power of two, from 2**LOWEST on.
        casts: the same for the decoded cast.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    amax: float
    zeros: float
    nonfinite: int
    saturated: float | None
    flushed: float | None
    error: float | None
    masters: tuple[int, ...]
    casts: tuple[int, ...] | None


@torch.no_grad()
def measure(
    source: TensorSource,
    key: str,
    fmt: FormatSpec | None = None,
    nominal: torch.dtype = torch.bfloat16,
    scale: Tensor | None = None,
    name: str = "",
) -> CastStatistics:
    """Return the statistics of the tensor `key`, and of its cast to `fmt` through the nominal
    dtype.

    `scale`, f32[1], is the scale of the last cast of a delayed format. Without it the scale is
    computed from the amax of the tensor. The format must take the shape of the tensor.
    """
    entry = source.entries[key]
    count, shape = (1, matrix_shape(entry.shape or (1,))) if fmt is None else stored_matrices(fmt, entry.shape or (1,))
    amax = None
    if fmt is not None and fmt.has_tensor_amax:
        amaxes = [block_amax(round_nominal(x, nominal), None).view(()) for x in _read(source, key, count, shape)]
        amax = torch.stack(amaxes).amax().view(1)
        if fmt.amax_policy is AmaxPolicy.DELAYED and scale is None:
            # The scale after a history that has only this amax.
            _, scale = rolled(fmt, amax, torch.ones(1), torch.zeros(fmt.amax_history_len))
    counts: list[CastCounts] = []
    zeros = 0
    masters, casts = (torch.zeros(BINADES, dtype=torch.int64) for _ in range(2))
    for x in _read(source, key, count, shape):
        finite = x[x.isfinite()]
        zeros += int((finite == 0).sum())
        masters += binades(finite)
        if fmt is None or fmt.element is None:
            square_sum = float(finite.double().square().sum())
            uncast = CastCounts(
                nonfinite=x.numel() - finite.numel(), square_sum=square_sum, amax=float(block_amax(x, None))
            )
            counts.append(uncast)
            continue
        codes, value = _cast(fmt, x, nominal, amax, scale)
        row = cast_meter.count(fmt.element, x, value, codes, torch.zeros(()))
        counts.append(CastCounts.of_row(row.tolist()))
        casts += binades(value[value.isfinite()])
    together = CastCounts.together(counts)
    numel = max(1, entry.numel)
    quantized = fmt is not None
    return CastStatistics(
        name=name or key,
        shape=entry.shape,
        format=str(fmt) if fmt else entry.dtype,
        amax=together.amax,
        zeros=zeros / numel,
        nonfinite=together.nonfinite,
        saturated=together.saturated / numel if quantized else None,
        flushed=together.flushed / numel if quantized else None,
        error=together.cast_error if quantized and together.square_sum else None,
        masters=tuple(masters.tolist()),
        casts=tuple(casts.tolist()) if quantized else None,
    )


def binades(values: Tensor) -> Tensor:
    """Return int64[BINADES]: the number of finite values in each binade (power of two). Zeros are
    not counted.
    """
    exponents = torch.frexp(values[values != 0].double()).exponent - 1
    return torch.bincount(exponents - LOWEST, minlength=BINADES)[:BINADES]


def _read(source: TensorSource, key: str, count: int, shape: tuple[int, int]) -> Iterator[Tensor]:
    """Read `count` matrices of a shape, one at a time, in pieces of rows."""
    for begin in range(0, count * math.prod(shape), math.prod(shape)):
        for span in pieces(*shape, ROWS):
            yield read_span(source, key, Span(begin + span.start, begin + span.stop)).view(-1, shape[1])


def _cast(
    fmt: FormatSpec, x: Tensor, nominal: torch.dtype, amax: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Cast rows of an f32 matrix; returns (codes, one per byte, decoded values f32), of its
    shape.
    """
    cast = quantize(fmt, x, nominal, scale, amax)
    value = torch.empty_like(x)
    rows, columns = x.shape
    dequantize(fmt, cast.rowwise_data, cast.rowwise_scale_inv, cast.amax, rows, columns, False, value)
    codes = unpack(cast.rowwise_data) if fmt.elements_per_byte == 2 else cast.rowwise_data
    return codes.view(x.shape), value
