"""The CUDA backend: the stages in CUDA C++ (`csrc/cuda`), on the current stream, without a look at the device's memory.

This module turns tensors into addresses and values into plain data, and decides nothing. See ../README.md for what each stage does,
and csrc/README.md for how the work of a stage is cut.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast.backends import extension
from zerocast.backends.cuda.launch import addresses, one_or_more, partial_amaxes, segment_work, stream_of, work
from zerocast.backends.cuda.targets import why_no_kernels
from zerocast.backends.extension import DTYPES
from zerocast.backends.extension import format_of as _format
from zerocast.backends.extension import typed as _typed
from zerocast.formats import FormatSpec, ScaleRule

DEVICES = ("cuda",)
PREFERENCE = 2

_C = extension.load()
if not hasattr(_C, "cuda"):
    raise ImportError(
        "zerocast.backends._C was built without CUDA: install where nvcc and a GPU are found, or with ZEROCAST_CUDA=1"
    )


def why_not(device: torch.device) -> str | None:
    """None when the kernels were built for this GPU."""
    return why_no_kernels(_C.cuda.targets(), device)


def partial_amax(fmt: FormatSpec, nominal: torch.dtype, masters: list[Tensor], table: Tensor, packed: Tensor) -> None:
    """See ../README.md."""
    stream = stream_of(packed)
    _C.cuda.partial_amax(
        _format(fmt),
        DTYPES[nominal],
        _master_dtype(masters),
        addresses(masters),
        work("amax", fmt, table),
        _typed(packed),
        stream,
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
    """See ../README.md."""
    partial = partial_amaxes(table).data_ptr() if fmt.scale_rule is ScaleRule.TWO_LEVEL else 0
    bases = addresses(row_scales), addresses(column_scales), addresses(amaxes), addresses(scales)
    stream = stream_of(table)
    tables = work("scales", fmt, table)
    _C.cuda.compute_scales(_format(fmt), _typed(packed), tables, *bases, partial, _flag(skip), stream)


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
    """See ../README.md."""
    stream = stream_of(table)
    _C.cuda.partial_cast(
        _format(fmt),
        DTYPES[nominal],
        _master_dtype(masters),
        addresses(masters),
        _typed(packed),
        addresses(amaxes),
        addresses(scales),
        work("cast", fmt, table),
        addresses(row_data),
        addresses(column_data),
        _flag(skip),
        stream,
    )


def roll_history(
    fmt: FormatSpec,
    table: Tensor,
    amaxes: list[Tensor],
    scales: list[Tensor],
    histories: list[Tensor],
    skip: Tensor | None,
) -> None:
    """See ../README.md."""
    bases = addresses(amaxes), addresses(scales), addresses(histories)
    stream = stream_of(table)
    _C.cuda.roll_history(_format(fmt), work("weights", fmt, table), *bases, _flag(skip), stream)


def transpose(
    fmt: FormatSpec,
    table: Tensor,
    row_data: list[Tensor],
    row_scales: list[Tensor],
    column_data: list[Tensor],
    column_scales: list[Tensor],
) -> None:
    """See ../README.md."""
    bases = [one_or_more(tensors) for tensors in (row_data, row_scales, column_data, column_scales)]
    stream = stream_of(table)
    tables = work("transpose", fmt, table), work("transpose_scales", fmt, table)
    _C.cuda.transpose(_format(fmt), *tables, *bases, stream)


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
    """See ../README.md."""
    assert data.is_contiguous() and out.is_contiguous() and (scale_inv is None or scale_inv.is_contiguous())
    source = data.data_ptr(), DTYPES.get(data.dtype, "float32")
    scalars = (0 if scale_inv is None else scale_inv.data_ptr()), (0 if amax is None else amax.data_ptr())
    stream = stream_of(out)
    _C.cuda.dequantize(_format(fmt), source, *scalars, rows, columns, columnwise, _typed(out), stream)


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
    """See ../README.md."""
    state = master.data_ptr(), _typed(grad), _typed(exp_avg), _typed(exp_avg_sq)
    step = _scalars(scalars), clip.data_ptr(), _flag(skip)
    stream = stream_of(master)
    _C.cuda.adam_step(state, segments.data_ptr(), *segment_work(segments), step, stream)


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
    """See ../README.md."""
    state = addresses(masters), *(_typed_bases(tensors) for tensors in (grads, exp_avgs, exp_avg_sqs))
    step = _scalars(scalars), clip.data_ptr(), _flag(skip)
    stream = stream_of(table)
    tables = work("amax", fmt, table), groups.data_ptr()
    _C.cuda.adam_amax(_format(fmt), DTYPES[nominal], state, *tables, step, _typed(packed), stream)


def _flag(skip: Tensor | None) -> int:
    return 0 if skip is None else skip.data_ptr()


def _scalars(scalars: Tensor) -> int:
    assert scalars.is_contiguous() and scalars.dtype == torch.float32 and scalars.shape[1] == 8, scalars
    return scalars.data_ptr()


def _one_dtype(tensors: Sequence[Tensor]) -> str:
    dtypes = {tensor.dtype for tensor in tensors}
    assert len(dtypes) == 1, f"the tensors of one role have one dtype, got {dtypes}"
    return DTYPES[dtypes.pop()]


def _master_dtype(masters: Sequence[Tensor]) -> str:
    return _one_dtype(masters) if masters else "float32"


def _typed_bases(tensors: Sequence[Tensor]) -> tuple[int, str]:
    return addresses(tensors), _one_dtype(tensors)
