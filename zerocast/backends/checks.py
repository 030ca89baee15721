"""Checks of the tensors that are passed to an op.

Backends work on addresses. If a tensor were too small, they would access memory of other tensors.
An op on plain tensors checks them at each call. The rows of a descriptor table are compared with
their storages once, when the table is built (`descriptor.check_rows`). `remember_checked` then
records the bases on the table, and an op only compares identities. For a table without a record, an
op reads the rows at each call, which makes the CPU wait for the device.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast import backends
from zerocast.backends.descriptor import WIDTH, Column, Piece, check_rows
from zerocast.formats import AmaxPolicy, Block, Columnwise, FormatSpec, ScaleRule, get_format, layout
from zerocast.formats.memory import check_storage

FLOATS = torch.float32, torch.bfloat16, torch.float16
# The dtypes of gradients and moments of Adam.
ADAM_FLOATS = torch.float32, torch.bfloat16

# Dict from the name of a stage's argument to the name of the buffer of a weight.
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
# The length of a row of Adam's scalars: decay, two factors for each beta, step size, the root of
# the second bias correction, and eps.
_SCALARS = 8


def remember_checked(table: Tensor, bases: Mapping[str, Sequence[Tensor]]) -> None:
    """Remember on a table that its rows were checked for these bases, given by argument name. Ops
    then take the table with the same bases without a further check.
    """
    # The tensors are kept alive together with their ids, since an id may be reused after a tensor
    # is freed.
    kept_bases = {name: list(tensors) for name, tensors in bases.items()}
    ids = {name: list(map(id, tensors)) for name, tensors in kept_bases.items()}
    table._zerocast_bases = ids, kept_bases  # type: ignore[attr-defined]


def was_checked(table: Tensor, names: Iterable[str], bases: Iterable[Sequence[Tensor]]) -> bool:
    """Return True if the rows of a table were checked, when it was built, for these bases of these
    arguments.
    """
    known = getattr(table, "_zerocast_bases", None)
    if known is None:
        return False
    known_ids, _ = known
    # A loop, since every stage of a step comes here.
    for name, tensors in zip(names, bases, strict=True):  # noqa: SIM110
        if list(map(id, tensors)) != known_ids.get(name):
            return False
    return True


def check_whole_blocks(fmt: FormatSpec, table: Tensor) -> None:
    """Check a table for `adam_cast` or `adam_8bit_cast`. Raises ValueError unless each owned span
    consists of full block rows and no scale depends on other elements. Reads the table, so the CPU
    waits for it, unless it was checked before.
    """
    if not fmt.casts_in_one_pass:
        raise ValueError(f"the scales of {fmt} depend on more than their own blocks: adam_amax, then partial_cast")
    checked = table.__dict__.setdefault("_zerocast_whole_blocks", set())
    if fmt in checked:
        return
    columns = table[:, [Column.ROWS, Column.COLUMNS, Column.START, Column.NUMEL]]
    for row, (rows, width, start, numel) in enumerate(columns.tolist()):
        span = layout.Span(start, start + numel)
        if numel and layout.whole_block_rows(fmt, (rows, width), span) != span:
            raise ValueError(f"row {row}: elements {start} to {start + numel} of {rows}x{width} cut a block of {fmt}")
    checked.add(fmt)


def check_plain(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], numel: int, device: torch.device) -> None:
    """Raise TypeError or ValueError unless a tensor is contiguous, has one of these dtypes, is on
    `device`, and has at least `numel` elements with memory behind them.
    """
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}, {' or '.join(map(str, dtypes))} is needed")
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: {tuple(tensor.shape)}")
    if tensor.numel() < numel:
        raise ValueError(f"{name} has {tensor.numel():,} elements, {numel:,} are needed")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, expected {device} as the other tensors")
    check_storage(name, tensor)


def check_codes(backend: str, format: str, data: Tensor, rows: int, columns: int, columnwise: bool = False) -> None:
    """Raise TypeError or ValueError unless these are the codes of one direction of a weight."""
    check_backend(backend, data.device)
    dtypes, numel, *_ = sizes_of_direction(format, rows, columns, columnwise)
    check_plain("data", data, dtypes, numel, data.device)


def check_direction(
    backend: str, format: str, data: Tensor, scale_inv: Tensor | None, rows: int, columns: int, columnwise: bool = False
) -> None:
    """Raise TypeError or ValueError unless these are the codes and scales of one direction of a
    weight. Rowwise codes and scales may also belong to only some of its rows.
    """
    check_codes(backend, format, data, rows, columns, columnwise)
    _, _, scale_dtype, width, height = sizes_of_direction(format, rows, columns, columnwise)
    if scale_dtype is not None:
        if scale_inv is None:
            raise ValueError(f"a {format} weight of {rows}x{columns} needs scale_inv")
        check_plain("scale_inv", scale_inv, (scale_dtype,), width * height, data.device)
        if width > 1 and scale_inv.shape[-1] != width:
            raise ValueError(
                f"scale_inv has rows of {scale_inv.shape[-1]}, {format} weights of {rows}x{columns} of {width}"
            )


def check_value_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError unless weights can be decoded to this dtype."""
    if dtype not in FLOATS:
        raise TypeError(f"values are {', '.join(map(str, FLOATS))}, got {dtype}")


def check_amax(format: str, amax: Tensor | None, device: torch.device) -> None:
    """Raise TypeError or ValueError if the format decodes with a tensor amax and `amax` is
    not one.
    """
    if get_format(format).scale_rule is not ScaleRule.TWO_LEVEL:
        return
    if amax is None:
        raise ValueError(f"a {format} weight needs its amax")
    check_plain("amax", amax, (torch.float32,), 1, device)


@functools.lru_cache(maxsize=1024)
def sizes_of_direction(
    format: str, rows: int, columns: int, columnwise: bool
) -> tuple[tuple[torch.dtype, ...], int, torch.dtype | None, int, int]:
    """Return the sizes that a reader of one direction needs: (allowed dtypes of the data, its
    number of elements, dtype of the scales or None, columns of the scale buffer, its rows without
    padding).
    """
    fmt = get_format(format)
    if min(rows, columns) < 0:
        raise ValueError(f"a weight has no negative extents, got {rows}x{columns}")
    has_own = columnwise and fmt.columnwise is not Columnwise.NONE
    # A block of columnwise codes spans rows, so columnwise codes are only read for all rows of a
    # weight. Rowwise codes may be of some rows, whose number need not be a multiple.
    layout.check_shape(fmt, (rows if has_own else layout.round_up(rows, fmt.multiple[0]), columns))
    data = layout.columnwise_data(fmt, rows, columns) if has_own else None
    data = data or layout.rowwise_data(fmt, rows, columns, torch.float32)
    scales = (layout.columnwise_scale_inv if has_own else layout.rowwise_scale_inv)(fmt, rows, columns)
    dtypes: tuple[torch.dtype, ...] = torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2
    dtypes = FLOATS if fmt.element is None else dtypes
    numel = math.prod(data.shape)
    if scales is None:
        return dtypes, numel, None, 1, 1
    if len(scales.shape) == 1:
        return dtypes, numel, scales.dtype, 1, 1
    is_transposed = has_own and fmt.columnwise is Columnwise.TRANSPOSE
    if has_own and not is_transposed:
        height = layout.amax_grid(fmt.columnwise_block or fmt.block, rows, columns)[0]
    elif fmt.scale_dtype is not torch.uint8:
        height = scales.shape[0]
    else:
        # Byte scales are repeated over the rows of a block; the rest of their 128 rows is padding.
        height = columns if is_transposed else rows
    return dtypes, numel, scales.dtype, scales.shape[1], height


def check_backend(backend: str, device: torch.device) -> None:
    """Raise ValueError unless the backend can work on tensors of this device."""
    devices = backends.load(backend).DEVICES
    if devices is not None and device.type not in devices:
        raise ValueError(f"the backend {backend!r} needs tensors on {' or '.join(devices)}, got {device}")


def check_messages(backend: str, messages: Tensor, flat: Tensor, parts: int, numel: int) -> None:
    """Raise TypeError or ValueError unless `messages` has exactly the bytes of `parts` messages of
    `numel` gradient elements each.
    """
    check_backend(backend, flat.device)
    check_plain("the gradient", flat, FLOATS, 0, flat.device)
    needed = parts * layout.GradientMessage(numel).nbytes
    check_plain("messages", messages, (torch.uint8,), needed, flat.device)
    if messages.numel() != needed:
        raise ValueError(f"{parts} messages of {numel:,} elements have {needed:,} bytes, got {messages.numel():,}")


def check_parts(backend: str, gradients: Tensor, out: Tensor, parts: int) -> None:
    """Raise TypeError or ValueError unless `gradients` has `parts` times the elements of `out`."""
    check_backend(backend, out.device)
    check_plain("the sum", out, (torch.float32,), 0, out.device)
    check_plain("gradients", gradients, FLOATS, 0, out.device)
    if gradients.numel() != parts * out.numel():
        raise ValueError(
            f"{parts} gradients of {out.numel():,} elements are needed, got {gradients.numel():,} elements"
        )


# The dtypes of the lists of the stages of Adam with moments in 8 bits.
_LISTS_OF_PIECES = {
    "masters": (torch.float32,),
    "grads": ADAM_FLOATS,
    "exp_avgs": (torch.int8,),
    "exp_avg_sqs": (torch.uint8,),
    "moment_scales": (torch.float32,),
}


def check_pieces(arguments: dict[str, Any]) -> None:
    """Raise TypeError or ValueError unless all pieces are inside of the flat tensors, scales and
    `cut_largest`, and each has the elements of its row of the table, which was checked. Reads
    pieces and table, so the CPU waits for the device.
    """
    table, pieces, scalars = arguments["table"], arguments["pieces"], arguments["scalars"]
    device = table.device
    lists: dict[str, Sequence[Tensor]] = {name: arguments[name] for name in _LISTS_OF_PIECES}
    for name, tensors in lists.items():
        if len(tensors) != len(lists["masters"]):
            raise ValueError(f"{name} are one for each master, got {len(tensors)} of {len(lists['masters'])}")
        if len(dtypes := {tensor.dtype for tensor in tensors}) > 1:
            raise ValueError(f"{name} are of one dtype, got {dtypes}")
        for tensor in tensors:
            check_plain(name.removesuffix("s"), tensor, _LISTS_OF_PIECES[name], 0, device)
    cuts = 0
    if "cut_largest" in arguments:
        cut_largest = arguments["cut_largest"]
        check_plain("cut_largest", cut_largest, (torch.float32,), 0, device)
        if cut_largest.dim() != 2 or len(cut_largest) != 2:
            raise ValueError(f"cut_largest has a row for each moment, got {tuple(cut_largest.shape)}")
        cuts = cut_largest.shape[1]
    check_scalars(scalars, arguments["clip"], 0, device)
    check_plain("steps", arguments["steps"], (torch.int64,), scalars.shape[0], device)
    _check_table("pieces", pieces, len(Piece), device)
    _check_rows_of_pieces(table, pieces)
    for row, piece in enumerate(pieces.tolist()):
        _check_piece(row, piece, lists, cuts, scalars.shape[0])


def _check_piece(
    row: int, piece: list[int], lists: Mapping[str, Sequence[Tensor]], cuts: int, rows_of_scalars: int
) -> None:
    """Raise ValueError unless a piece, whose base was checked, is inside of the tensors of its
    base.
    """
    offset, numel = piece[Piece.OFFSET], piece[Piece.NUMEL]
    *flats, scales = (tensors[piece[Piece.BASE]] for tensors in lists.values())
    end = min(tensor.numel() for tensor in flats)
    if not 0 <= offset < offset + numel <= end:
        raise ValueError(f"piece {row} has elements {offset:,} to {offset + numel:,}, the shortest tensor has {end:,}")
    count = layout.moment_groups(piece[Piece.START], numel, piece[Piece.COLUMNS])
    for place in (piece[Piece.SCALE], piece[Piece.SECOND_SCALE]):
        if not 0 <= place <= scales.numel() - count:
            raise ValueError(f"piece {row} needs {count:,} scales from index {place:,}, got {scales.numel():,} scales")
    if max(piece[Piece.CUT_FIRST], piece[Piece.CUT_LAST]) >= cuts:
        raise ValueError(f"piece {row} has a cut group outside of the {cuts} groups")
    if not 0 <= piece[Piece.SCALARS] < rows_of_scalars:
        raise ValueError(
            f"piece {row} uses row {piece[Piece.SCALARS]} of the scalars, which have {rows_of_scalars} rows"
        )


def _check_rows_of_pieces(table: Tensor, pieces: Tensor) -> None:
    if len(pieces) != len(table):
        raise ValueError(f"each piece has a row of the table, got {len(pieces)} pieces and {len(table)} rows")
    for index, (piece, row) in enumerate(zip(pieces.tolist(), table.tolist(), strict=True)):
        columns = piece[Piece.COLUMNS]
        if columns < 1 or piece[Piece.START] < 0:
            raise ValueError(
                f"piece {index} begins at element {piece[Piece.START]:,} of a weight of {columns:,} columns"
            )
        of_piece = [piece[Piece.BASE], piece[Piece.OFFSET], piece[Piece.NUMEL], columns]
        of_row = [row[Column.MASTER_BASE], row[Column.MASTER_OFFSET], row[Column.NUMEL], row[Column.COLUMNS]]
        above = piece[Piece.START] - row[Column.START]
        if of_piece != of_row or above < 0 or above % columns:
            raise ValueError(f"piece {index} does not have the elements of its row of the table")


def check_stage(stage: str, backend: str, fmt: FormatSpec, arguments: dict[str, Any]) -> None:
    """Raise TypeError or ValueError unless every element that a stage reaches by the rows of a
    table is inside of the tensors of its `arguments`. Reads the table, so the CPU waits for the
    device.
    """
    table = arguments["table"]
    check_serves(stage, fmt)
    _check_table("table", table, WIDTH, table.device)
    check_backend(backend, table.device)
    rows = table.tolist()
    nominal = arguments.get("nominal", torch.float32)
    lists = {name: arguments[name] for name in _LIKE_MASTERS if name in arguments}
    for name, tensors in lists.items():
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1 or len(tensors) != len(lists["masters"]):
            raise ValueError(f"{name} are of one dtype, one for each master, got {len(tensors)} of {dtypes}")
        for tensor in tensors:
            check_plain(name, tensor, _dtypes_like_masters(name, stage.startswith("adam")), 0, table.device)
    buffers = {BUFFER_ARGUMENTS[name]: arguments[name] for name in BUFFER_ARGUMENTS if name in arguments}
    for name, tensors in buffers.items():
        dtype = fmt.scale_dtype if name.endswith("scale_inv") else torch.float32
        for tensor in tensors:
            check_plain(name, tensor, (torch.uint8 if name.endswith("_data") else dtype,), 0, table.device)
    check_rows(fmt, nominal, rows, lists, buffers, stage == "transpose", _reached(stage, fmt))
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


def _dtypes_like_masters(name: str, of_adam: bool) -> tuple[torch.dtype, ...]:
    """Return the dtypes that masters, or tensors parallel to them, may have. A cast reads masters
    of any float dtype, a stage of Adam writes FP32 ones.
    """
    if not of_adam:
        return FLOATS
    return (torch.float32,) if name == "masters" else ADAM_FLOATS


def check_serves(stage: str, fmt: FormatSpec) -> None:
    """Raise ValueError if a stage has nothing to do for weights of this format."""
    has_scales, has_amaxes = fmt.scale_rule is not ScaleRule.NONE, fmt.amax_policy is not AmaxPolicy.NONE
    serves = {
        "partial_amax": has_amaxes,
        "adam_amax": has_amaxes,
        "adam_8bit": has_amaxes,
        "adam_8bit_cast": fmt.casts_in_one_pass,
        "compute_scales": has_scales,
        "roll_history": fmt.amax_policy is AmaxPolicy.DELAYED,
        "transpose": fmt.columnwise is Columnwise.TRANSPOSE,
        "adam_cast": fmt.casts_in_one_pass,
    }
    if not serves.get(stage, True):
        raise ValueError(f"the stage {stage} is not for {fmt} weights: see zerocast/backends/README.md")


def _reached(stage: str, fmt: FormatSpec) -> frozenset[str]:
    """Return the names of the buffers that a stage needs for every row of the table (those that
    write codes of owned elements: for every row that owns some).
    """
    has_own_grid = fmt.columnwise is Columnwise.OWN_GRID
    is_blocked = fmt.block is not None
    is_delayed = fmt.amax_policy is AmaxPolicy.DELAYED
    needed = {
        "transpose": {
            "rowwise_data": True,
            "columnwise_data": True,
            "rowwise_scale_inv": is_blocked,
            "columnwise_scale_inv": is_blocked,
        },
        "roll_history": {"amax": True, "scale": True, "amax_history": True},
        "compute_scales": {
            "rowwise_scale_inv": True,
            "columnwise_scale_inv": has_own_grid or fmt.columnwise is Columnwise.SHARED,
            "amax": fmt.has_tensor_amax,
            "scale": is_delayed,
        },
        "partial_cast": {
            "rowwise_data": True,
            "columnwise_data": has_own_grid,
            "amax": fmt.scale_rule is ScaleRule.TWO_LEVEL,
            "scale": is_delayed,
        },
        "adam_cast": {"rowwise_data": True},
        "adam_8bit_cast": {"rowwise_data": True},
    }
    return frozenset(name for name, is_needed in needed.get(stage, {}).items() if is_needed)


def _check_packed(fmt: FormatSpec, rows: Sequence[Sequence[int]], packed: Tensor, device: torch.device) -> None:
    check_plain("packed", packed, FLOATS, 0, device)
    for row in rows:
        matrix: Block = (row[Column.ROWS], row[Column.COLUMNS])
        row_count, column_count = layout.amax_counts(fmt, *matrix)
        ranges = [(row[Column.ROW_AMAX], row_count), (row[Column.COLUMN_AMAX], column_count)]
        # A table may lack the number that reports NaN, and a shared tensor amax.
        optional = [row[Column.NOT_FINITE]]
        if fmt.scale_rule is ScaleRule.TWO_LEVEL:
            optional.append(row[Column.SHARED_AMAX])
        ranges += [(offset, 1) for offset in optional if offset >= 0]
        for offset, count in ranges:
            if count and not 0 <= offset <= offset + count <= packed.numel():
                raise ValueError(f"packed needs elements {offset:,} to {offset + count:,}, it has {packed.numel():,}")


def _check_table(name: str, table: Tensor, width: int, device: torch.device) -> None:
    if table.dim() != 2 or table.shape[1] != width:
        raise ValueError(f"{name} is a table of {width} columns, got {tuple(table.shape)}")
    check_plain(name, table, (torch.int64,), 0, device)


def check_scalars(scalars: Tensor, clip: Tensor, groups: int, device: torch.device) -> None:
    """Raise TypeError or ValueError unless `scalars` has a row of Adam's scalars for each of
    `groups` parameter groups, and `clip` is the f32[1] factor that gradients are multiplied by.
    """
    if scalars.dim() != 2 or scalars.shape[1] != _SCALARS:
        raise ValueError(f"scalars have {_SCALARS} columns, got {tuple(scalars.shape)}")
    check_plain("scalars", scalars, (torch.float32,), groups * _SCALARS, device)
    check_plain("clip", clip, (torch.float32,), 1, device)


def check_moments(exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """Raise TypeError unless both moments have the same dtype."""
    if exp_avg.dtype != exp_avg_sq.dtype:
        raise TypeError(f"both moments are of one dtype, got {exp_avg.dtype} and {exp_avg_sq.dtype}")
