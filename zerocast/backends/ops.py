"""The stages as torch.library ops: schemas, fakes, one implementation that hands over to a backend.

Ops take base tensors that are declared mutable, and the descriptor table. An op on bare addresses would pass opcheck and then be
compiled into wrong results, since nothing tells the compiler what it writes. Formats travel as text (`str(fmt)`); the backend is
chosen where a plan is built and named in the call.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from zerocast import backends
from zerocast.backends.descriptor import WIDTH, Column
from zerocast.formats import get_format, layout

LIBRARY = torch.library.Library("zerocast", "DEF")

_SCHEMAS = {
    "partial_amax": (
        "(str backend, str format, ScalarType nominal, Tensor[] masters, Tensor table, Tensor(a!) packed) -> ()"
    ),
    "compute_scales": (
        "(str backend, str format, Tensor packed, Tensor table, Tensor(a!)[] row_scales, Tensor(b!)[] column_scales, "
        "Tensor(c!)[] amaxes, Tensor? skip, Tensor[] scales) -> ()"
    ),
    "partial_cast": (
        "(str backend, str format, ScalarType nominal, Tensor[] masters, Tensor packed, Tensor[] amaxes, Tensor[] scales, "
        "Tensor table, Tensor(a!)[] row_data, Tensor(b!)[] column_data, Tensor? skip) -> ()"
    ),
    "roll_history": (
        "(str backend, str format, Tensor table, Tensor[] amaxes, Tensor(a!)[] scales, Tensor(b!)[] histories, Tensor? skip)"
        " -> ()"
    ),
    "transpose": (
        "(str backend, str format, Tensor table, Tensor[] row_data, Tensor[] row_scales, Tensor(a!)[] column_data, "
        "Tensor(b!)[] column_scales) -> ()"
    ),
    "transposed": (
        "(str backend, str format, Tensor row_data, Tensor? row_scale, int rows, int columns) -> (Tensor, Tensor)"
    ),
    "dequantize": (
        "(str backend, str format, Tensor data, Tensor? scale_inv, Tensor? amax, int rows, int columns, bool columnwise, "
        "ScalarType dtype) -> Tensor"
    ),
    "adam_step": (
        "(str backend, Tensor(a!) master, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor segments, "
        "Tensor scalars, Tensor clip, Tensor? skip) -> ()"
    ),
    "adam_amax": (
        "(str backend, str format, ScalarType nominal, Tensor(a!)[] masters, Tensor[] grads, Tensor(b!)[] exp_avgs, "
        "Tensor(c!)[] exp_avg_sqs, Tensor table, Tensor groups, Tensor scalars, Tensor clip, Tensor(d!) packed, "
        "Tensor? skip) -> ()"
    ),
}


def _stage(name: str):  # type: ignore[no-untyped-def]
    @functools.cache
    def stage(backend: str, format: str) -> Callable[..., None]:
        return functools.partial(getattr(backends.load(backend), name), get_format(format))

    def run(backend: str, format: str, *args: object) -> None:
        stage(backend, format)(*args)

    return run


def _transposed(
    backend: str, format: str, row_data: Tensor, row_scale: Tensor | None, rows: int, columns: int
) -> tuple[Tensor, Tensor]:
    """New columnwise data and scales of one weight; where a tensor has one scale, that is the rowwise one and none are made."""
    data, scale = _transposed_fake(backend, format, row_data, row_scale, rows, columns)
    flat = [row_data.view(-1)], [] if row_scale is None else [row_scale.view(-1)], [data.view(-1)], [scale.view(-1)]
    backends.load(backend).transpose(get_format(format), _whole_weight(rows, columns, row_data.device), *flat)
    return data, scale


def _transposed_fake(
    backend: str, format: str, row_data: Tensor, row_scale: Tensor | None, rows: int, columns: int
) -> tuple[Tensor, Tensor]:
    fmt = get_format(format)
    data, scale = layout.columnwise_data(fmt, rows, columns), layout.columnwise_scale_inv(fmt, rows, columns)
    assert data and scale
    scale_shape = scale.shape if fmt.block else (0,)
    return row_data.new_empty(data.shape), row_data.new_empty(scale_shape, dtype=scale.dtype)


@functools.lru_cache(maxsize=1024)
def _whole_weight(rows: int, columns: int, device: torch.device) -> Tensor:
    """The table of one weight that begins where each of its bases begins."""
    row = [0] * WIDTH
    row[Column.ROWS], row[Column.COLUMNS] = rows, columns
    return torch.tensor([row], dtype=torch.int64, device=device)


def _dequantize(
    backend: str,
    format: str,
    data: Tensor,
    scale_inv: Tensor | None,
    amax: Tensor | None,
    rows: int,
    columns: int,
    columnwise: bool,
    dtype: torch.dtype,
) -> Tensor:
    out = torch.empty(rows, columns, dtype=dtype, device=data.device)
    backends.load(backend).dequantize(get_format(format), data, scale_inv, amax, rows, columns, columnwise, out)
    return out


def _dequantize_fake(
    backend: str,
    format: str,
    data: Tensor,
    scale_inv: Tensor | None,
    amax: Tensor | None,
    rows: int,
    columns: int,
    columnwise: bool,
    dtype: torch.dtype,
) -> Tensor:
    return data.new_empty((rows, columns), dtype=dtype)


def _adam_step(backend: str, *args: object) -> None:
    backends.load(backend).adam_step(*args)


def _writes_only(*args: object) -> None:
    return None


_IMPLEMENTATIONS: dict[str, Callable[..., object]] = {
    "transposed": _transposed,
    "dequantize": _dequantize,
    "adam_step": _adam_step,
}
_FAKES: dict[str, Callable[..., object]] = {"transposed": _transposed_fake, "dequantize": _dequantize_fake}


def define(
    name: str, schema: str, run: Callable[..., object] | None = None, fake: Callable[..., object] | None = None
) -> torch._ops.OpOverload:
    """The op `zerocast::name`; without `run` its arguments say what it does, by `__torch_dispatch__`."""
    LIBRARY.define(name + schema)
    if run is not None:
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"zerocast::{name}", fake or _writes_only, lib=LIBRARY)
    op: torch._ops.OpOverload = getattr(torch.ops.zerocast, name).default
    return op


for _name, _schema in _SCHEMAS.items():
    define(_name, _schema, _IMPLEMENTATIONS.get(_name, _stage(_name)), _FAKES.get(_name))

partial_amax = torch.ops.zerocast.partial_amax.default
compute_scales = torch.ops.zerocast.compute_scales.default
partial_cast = torch.ops.zerocast.partial_cast.default
roll_history = torch.ops.zerocast.roll_history.default
transpose = torch.ops.zerocast.transpose.default
transposed = torch.ops.zerocast.transposed.default
dequantize = torch.ops.zerocast.dequantize.default
adam_step = torch.ops.zerocast.adam_step.default
adam_amax = torch.ops.zerocast.adam_amax.default
