"""Checks of the tensors that are handed to an op.

Backends are given addresses, so what a tensor lacks they would read or write in the memory of
others. An op on plain tensors is checked at each call. Rows of a descriptor table are compared with
their storages where it is built (`descriptor.check_rows`), and the table then knows its bases: a
step compares identities, and nothing else. The rows of any other table are read at each call, for
which the host waits.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast import backends
from zerocast.backends.descriptor import WIDTH, Column, check_rows
from zerocast.formats import AmaxPolicy, Block, Columnwise, FormatSpec, ScaleRule, get_format, layout
from zerocast.formats.memory import check_storage

FLOATS = torch.float32, torch.bfloat16, torch.float16

# the buffers that stages take, by the names of their arguments
BUFFER_ARGUMENTS = {
    "row_data": "rowwise_data",
    "row_scales": "rowwise_scale_inv",
    "column_data": "columnwise_data",
    "column_scales": "columnwise_scale_inv",
    "amaxes": "amax",
    "scales": "scale",
    "histories": "amax_history",
}
_LIKE_MASTERS = "masters", "grads", "exp_avgs", "exp_avg_sqs"
_SCALARS = 8  # a row of the scalars of Adam


def know(table: Tensor, bases: Mapping[str, Sequence[Tensor]]) -> None:
    """Let the ops take this table, whose rows were checked, with these bases as it is, by the names
    of their arguments.
    """
    held = {name: list(tensors) for name, tensors in bases.items()}
    ids = {name: list(map(id, tensors)) for name, tensors in held.items()}
    table._zerocast_bases = ids, held  # type: ignore[attr-defined]


def knows(table: Tensor, names: Iterable[str], bases: Iterable[Sequence[Tensor]]) -> bool:
    """True if the rows of a table were checked, when it was built, for these bases of these
    arguments.
    """
    known = getattr(table, "_zerocast_bases", None)
    return known is not None and [list(map(id, tensors)) for tensors in bases] == list(map(known[0].get, names))


def check_plain(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], numel: int, device: torch.device) -> None:
    """TypeError or ValueError unless a tensor is contiguous, of one of these dtypes, on `device`,
    and has memory for so many elements.
    """
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}, {' or '.join(map(str, dtypes))} is needed")
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: {tuple(tensor.shape)}")
    if tensor.numel() < numel:
        raise ValueError(f"{name} has {tensor.numel():,} elements, {numel:,} are needed")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the other tensors on {device}")
    check_storage(name, tensor)


def check_codes(backend: str, format: str, data: Tensor, rows: int, columns: int, columnwise: bool = False) -> None:
    """TypeError or ValueError unless these are the codes of one direction of a weight."""
    check_backend(backend, data.device)
    dtypes, numel, *_ = _direction(format, rows, columns, columnwise)
    check_plain("data", data, dtypes, numel, data.device)


def check_direction(
    backend: str, format: str, data: Tensor, scale_inv: Tensor | None, rows: int, columns: int, columnwise: bool = False
) -> None:
    """TypeError or ValueError unless these are the codes and scales of one direction of a weight,
    or rowwise ones of some of its rows.
    """
    check_codes(backend, format, data, rows, columns, columnwise)
    _, _, scale_dtype, width, height = _direction(format, rows, columns, columnwise)
    if scale_dtype is not None:
        if scale_inv is None:
            raise ValueError(f"a {format} weight of {rows}x{columns} needs scale_inv")
        check_plain("scale_inv", scale_inv, (scale_dtype,), width * height, data.device)
        if width > 1 and scale_inv.shape[-1] != width:
            raise ValueError(
                f"scale_inv has rows of {scale_inv.shape[-1]}, {format} weights of {rows}x{columns} of {width}"
            )


def check_amax(format: str, amax: Tensor | None, device: torch.device) -> None:
    """TypeError or ValueError where a format's codes cannot be read without a tensor amax."""
    if get_format(format).scale_rule is not ScaleRule.TWO_LEVEL:
        return
    if amax is None:
        raise ValueError(f"a {format} weight needs its amax")
    check_plain("amax", amax, (torch.float32,), 1, device)


@functools.lru_cache(maxsize=1024)
def _direction(
    format: str, rows: int, columns: int, columnwise: bool
) -> tuple[tuple[torch.dtype, ...], int, torch.dtype | None, int, int]:
    """(dtypes of data, its elements, dtype of scales or None, their columns, the rows of them that
    are no padding).
    """
    fmt = get_format(format)
    if min(rows, columns) < 0:
        raise ValueError(f"a weight has no negative extents, got {rows}x{columns}")
    has_own = columnwise and fmt.columnwise is not Columnwise.NONE
    # a block of columnwise codes spans rows, so only those of a whole weight can be read
    layout.check_shape(fmt, (rows if has_own else layout.round_up(rows, fmt.multiple[0]), columns))
    data = layout.columnwise_data(fmt, rows, columns) if has_own else None
    data = data or layout.rowwise_data(fmt, rows, columns, torch.float32)
    scales = (layout.columnwise_scale_inv if has_own else layout.rowwise_scale_inv)(fmt, rows, columns)
    dtypes: tuple[torch.dtype, ...] = torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2
    dtypes = FLOATS if fmt.element is None else dtypes
    numel = math.prod(data.shape)
    if scales is None or len(scales.shape) == 1:
        return dtypes, numel, None if scales is None else scales.dtype, 1, 1
    turned = has_own and fmt.columnwise is Columnwise.TRANSPOSE
    if has_own and not turned:
        height = layout.amax_grid(fmt.columnwise_block or fmt.block, rows, columns)[0]
    else:
        height = scales.shape[0] if fmt.scale_rule is ScaleRule.FP32 else columns if turned else rows
    return dtypes, numel, scales.dtype, scales.shape[1], height


def check_backend(backend: str, device: torch.device) -> None:
    """ValueError for tensors where a backend cannot reach them."""
    devices = backends.load(backend).DEVICES
    if devices is not None and device.type not in devices:
        raise ValueError(f"the backend {backend!r} takes tensors on {' or '.join(devices)}, got some on {device}")


def check_messages(backend: str, messages: Tensor, flat: Tensor, parts: int, numel: int) -> None:
    """TypeError or ValueError unless `messages` has room for so many messages of `numel` elements
    each.
    """
    check_backend(backend, flat.device)
    check_plain("the gradient", flat, FLOATS, 0, flat.device)
    needed = parts * layout.GradientMessage(numel).nbytes
    check_plain("messages", messages, (torch.uint8,), needed, flat.device)
    if messages.numel() != needed:
        raise ValueError(f"{parts} messages of {numel:,} elements have {needed:,} bytes, got {messages.numel():,}")


def check_segments(backend: str, flats: dict[str, Tensor], segments: Tensor, scalars: Tensor, clip: Tensor) -> None:
    """TypeError or ValueError unless all segments are inside of the master, its gradient and its
    moments. Reads them.
    """
    device = flats["master"].device
    check_backend(backend, device)
    for name, tensor in flats.items():
        check_plain(name, tensor, (torch.float32,) if name == "master" else FLOATS, 0, device)
    check_moments(flats["exp_avg"], flats["exp_avg_sq"])
    check_scalars(scalars, clip, 0, device)
    _check_table("segments", segments, 3, device)
    end = min(tensor.numel() for tensor in flats.values())
    for row, (offset, numel, group) in enumerate(segments.tolist()):
        if not 0 <= offset <= offset + numel <= end:
            raise ValueError(
                f"segment {row} has elements {offset:,} to {offset + numel:,}, the shortest tensor has {end:,}"
            )
        if not 0 <= group < scalars.shape[0]:
            raise ValueError(f"segment {row} takes row {group} of the scalars, which have {scalars.shape[0]}")


def check_stage(stage: str, backend: str, fmt: FormatSpec, arguments: dict[str, Any]) -> None:
    """TypeError or ValueError unless all that a stage reaches by the rows of a table is inside of
    the tensors that it is given. Reads the table.
    """
    table = arguments["table"]
    check_serves(stage, fmt)
    _check_table("table", table, WIDTH, table.device)
    check_backend(backend, table.device)
    rows = table.tolist()
    nominal = arguments.get("nominal", torch.float32)
    lists = {name: arguments[name] for name in _LIKE_MASTERS if name in arguments}
    for name, tensors in lists.items():
        one_dtype = {tensor.dtype for tensor in tensors}
        if len(one_dtype) > 1 or len(tensors) != len(lists["masters"]):
            raise ValueError(f"{name} are of one dtype, one for each master, got {len(tensors)} of {one_dtype}")
        for tensor in tensors:
            check_plain(
                name, tensor, (torch.float32,) if len(lists) > 1 and name == "masters" else FLOATS, 0, table.device
            )
    held = {BUFFER_ARGUMENTS[name]: arguments[name] for name in BUFFER_ARGUMENTS if name in arguments}
    byte_scales = fmt.scale_rule is not ScaleRule.FP32
    for name, tensors in held.items():
        is_bytes = name.endswith("_data") or (byte_scales and name.endswith("scale_inv"))
        for tensor in tensors:
            check_plain(name, tensor, (torch.uint8 if is_bytes else torch.float32,), 0, table.device)
    check_rows(fmt, nominal, rows, lists, held, stage == "transpose", _reached(stage, fmt))
    if "packed" in arguments:
        _check_packed(fmt, rows, arguments["packed"], table.device)
    if "scalars" in arguments:
        groups, scalars = arguments["groups"], arguments["scalars"]
        if lists["masters"]:
            check_moments(lists["exp_avgs"][0], lists["exp_avg_sqs"][0])
        check_scalars(scalars, arguments["clip"], 0, table.device)
        check_plain("groups", groups, (torch.int64,), len(rows), table.device)
        if rows and not 0 <= int(groups.min()) <= int(groups.max()) < scalars.shape[0]:
            raise ValueError(f"groups are {groups.tolist()}, the scalars have {scalars.shape[0]} rows")


def check_serves(stage: str, fmt: FormatSpec) -> None:
    """ValueError for a format whose weights a stage has nothing to do for."""
    has_scales, has_amaxes = fmt.scale_rule is not ScaleRule.NONE, fmt.amax_policy is not AmaxPolicy.NONE
    serves = {
        "partial_amax": has_amaxes,
        "adam_amax": has_amaxes,
        "compute_scales": has_scales,
        "roll_history": fmt.amax_policy is AmaxPolicy.DELAYED,
        "transpose": fmt.columnwise is Columnwise.TRANSPOSE,
        "adam_cast": fmt.casts_in_one_pass,
    }
    if not serves.get(stage, True):
        raise ValueError(f"the stage {stage} is not for {fmt} weights: zerocast/backends/README.md says what it reads")


def _reached(stage: str, fmt: FormatSpec) -> frozenset[str]:
    """The buffers that a stage reaches by every row that owns elements, or by every row."""
    if stage == "transpose":
        names = ("data", "scale_inv") if fmt.block else ("data",)
        return frozenset(f"{direction}_{name}" for direction in ("rowwise", "columnwise") for name in names)
    if stage == "roll_history":
        return frozenset({"amax", "scale", "amax_history"})
    both = fmt.columnwise in (Columnwise.OWN_GRID, Columnwise.SHARED)
    reached = {"scale"} if fmt.amax_policy is AmaxPolicy.DELAYED else set()
    if stage == "compute_scales":
        reached |= {"rowwise_scale_inv"} | ({"columnwise_scale_inv"} if both else set())
        return frozenset(reached | ({"amax"} if fmt.has_tensor_amax else set()))
    if stage == "partial_cast":
        reached |= {"rowwise_data"} | ({"columnwise_data"} if fmt.columnwise is Columnwise.OWN_GRID else set())
        return frozenset(reached | ({"amax"} if fmt.scale_rule is ScaleRule.TWO_LEVEL else set()))
    return frozenset({"rowwise_data"} if stage == "adam_cast" else ())


def _check_packed(fmt: FormatSpec, rows: Sequence[Sequence[int]], packed: Tensor, device: torch.device) -> None:
    check_plain("packed", packed, FLOATS, 0, device)
    for row in rows:
        matrix: Block = (row[Column.ROWS], row[Column.COLUMNS])
        first, second = layout.amax_counts(fmt, *matrix)
        places = [(row[Column.ROW_AMAX], first), (row[Column.COLUMN_AMAX], second), (row[Column.NOT_FINITE], 1)]
        if fmt.scale_rule is ScaleRule.TWO_LEVEL:
            places.append((row[Column.SHARED_AMAX], 1))
        for number, (at, count) in enumerate(places):
            is_absent = at < 0 and (number > 1 or not count)
            if not is_absent and count and not 0 <= at <= at + count <= packed.numel():
                raise ValueError(f"packed needs elements {at:,} to {at + count:,}, it has {packed.numel():,}")


def _check_table(name: str, table: Tensor, width: int, device: torch.device) -> None:
    if table.dim() != 2 or table.shape[1] != width:
        raise ValueError(f"{name} is a table of {width} columns, got {tuple(table.shape)}")
    check_plain(name, table, (torch.int64,), 0, device)


def check_scalars(scalars: Tensor, clip: Tensor, groups: int, device: torch.device) -> None:
    """TypeError or ValueError unless these are the scalars of Adam of so many parameter groups, and
    what gradients are multiplied by.
    """
    if scalars.dim() != 2 or scalars.shape[1] != _SCALARS:
        raise ValueError(f"scalars have {_SCALARS} columns, got {tuple(scalars.shape)}")
    check_plain("scalars", scalars, (torch.float32,), groups * _SCALARS, device)
    check_plain("clip", clip, (torch.float32,), 1, device)


def check_moments(exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """TypeError for moments of two dtypes."""
    if exp_avg.dtype != exp_avg_sq.dtype:
        raise TypeError(f"both moments are of one dtype, got {exp_avg.dtype} and {exp_avg_sq.dtype}")
