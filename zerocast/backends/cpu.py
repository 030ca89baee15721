"""The CPU backend: the stages in C++ (`csrc/cpu`), with OpenMP over torch's thread count and SIMD chosen at run time.

This module turns tensors into addresses and values into plain data, and decides nothing. See README.md for what each stage does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast.backends import extension
from zerocast.backends.extension import DTYPES as _DTYPES
from zerocast.backends.extension import format_of as _format
from zerocast.backends.extension import typed as _typed
from zerocast.formats import FormatSpec

DEVICES = ("cpu",)
PREFERENCE = 1

_C = extension.load()


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _dtypes(tensors: Sequence[Tensor]) -> list[str]:
    return [_DTYPES[tensor.dtype] for tensor in tensors]


def _all_typed(tensors: Sequence[Tensor]) -> list[tuple[int, str]]:
    return [_typed(tensor) for tensor in tensors]


def _rows(table: Tensor) -> tuple[int, int]:
    assert table.dtype == torch.int64 and table.is_contiguous(), table
    return table.data_ptr(), table.shape[0]


def _skipped(skip: Tensor | None) -> bool:
    return skip is not None and bool(skip)


def partial_amax(fmt: FormatSpec, nominal: torch.dtype, masters: list[Tensor], table: Tensor, packed: Tensor) -> None:
    """See README.md."""
    _C.cpu.partial_amax(
        _format(fmt),
        _DTYPES[nominal],
        _addresses(masters),
        _dtypes(masters),
        _rows(table),
        _typed(packed),
        torch.get_num_threads(),
    )


def compute_scales(
    fmt: FormatSpec,
    packed: Tensor,
    table: Tensor,
    row_scales: list[Tensor],
    column_scales: list[Tensor],
    amaxes: list[Tensor],
    skip: Tensor | None,
    scales: list[Tensor],
) -> None:
    """See README.md."""
    if _skipped(skip):
        return
    _C.cpu.compute_scales(
        _format(fmt),
        _typed(packed),
        _rows(table),
        _addresses(row_scales),
        _addresses(column_scales),
        _addresses(amaxes),
        _addresses(scales),
        torch.get_num_threads(),
    )


def partial_cast(
    fmt: FormatSpec,
    nominal: torch.dtype,
    masters: list[Tensor],
    packed: Tensor,
    amaxes: list[Tensor],
    scales: list[Tensor],
    table: Tensor,
    row_data: list[Tensor],
    column_data: list[Tensor],
    skip: Tensor | None,
) -> None:
    """See README.md."""
    if _skipped(skip):
        return
    _C.cpu.partial_cast(
        _format(fmt),
        _DTYPES[nominal],
        _addresses(masters),
        _dtypes(masters),
        _typed(packed),
        _addresses(amaxes),
        _addresses(scales),
        _rows(table),
        _addresses(row_data),
        _addresses(column_data),
        torch.get_num_threads(),
    )


def roll_history(
    fmt: FormatSpec,
    table: Tensor,
    amaxes: list[Tensor],
    scales: list[Tensor],
    histories: list[Tensor],
    skip: Tensor | None,
) -> None:
    """See README.md."""
    if _skipped(skip):
        return
    _C.cpu.roll_history(_format(fmt), _rows(table), _addresses(amaxes), _addresses(scales), _addresses(histories))


def transpose(
    fmt: FormatSpec,
    table: Tensor,
    row_data: list[Tensor],
    row_scales: list[Tensor],
    column_data: list[Tensor],
    column_scales: list[Tensor],
) -> None:
    """See README.md."""
    _C.cpu.transpose(
        _format(fmt),
        _rows(table),
        _addresses(row_data),
        _addresses(row_scales),
        _addresses(column_data),
        _addresses(column_scales),
        torch.get_num_threads(),
    )


def dequantize(
    fmt: FormatSpec,
    data: Tensor,
    scale_inv: Tensor | None,
    amax: Tensor | None,
    rows: int,
    columns: int,
    columnwise: bool,
    out: Tensor,
) -> None:
    """See README.md."""
    assert data.is_contiguous() and out.is_contiguous() and (scale_inv is None or scale_inv.is_contiguous())
    _C.cpu.dequantize(
        _format(fmt),
        (data.data_ptr(), _DTYPES.get(data.dtype, "float32")),
        scale_inv.data_ptr() if scale_inv is not None else 0,
        amax.data_ptr() if amax is not None else 0,
        rows,
        columns,
        columnwise,
        _typed(out),
        torch.get_num_threads(),
    )


def adam_step(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    segments: Tensor,
    scalars: Tensor,
    clip: Tensor,
    skip: Tensor | None,
) -> None:
    """See README.md."""
    if _skipped(skip):
        return
    _C.cpu.adam_step(
        master.data_ptr(),
        _typed(grad),
        _typed(exp_avg),
        _typed(exp_avg_sq),
        _rows(segments),
        _scalars(scalars),
        float(clip),
        torch.get_num_threads(),
    )


def adam_amax(
    fmt: FormatSpec,
    nominal: torch.dtype,
    masters: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    table: Tensor,
    groups: Tensor,
    scalars: Tensor,
    clip: Tensor,
    packed: Tensor,
    skip: Tensor | None,
) -> None:
    """See README.md."""
    if _skipped(skip):
        return
    assert groups.dtype == torch.int64 and groups.is_contiguous() and groups.numel() == table.shape[0], groups
    _C.cpu.adam_amax(
        _format(fmt),
        _DTYPES[nominal],
        _addresses(masters),
        _all_typed(grads),
        _all_typed(exp_avgs),
        _all_typed(exp_avg_sqs),
        _rows(table),
        groups.data_ptr(),
        _scalars(scalars),
        float(clip),
        _typed(packed),
        torch.get_num_threads(),
    )


def _scalars(scalars: Tensor) -> int:
    assert scalars.is_contiguous() and scalars.dtype == torch.float32 and scalars.shape[1] == 8, scalars
    return scalars.data_ptr()
