"""The CUDA backend: the stages in CUDA C++ (`csrc/cuda`), on the current stream.

This module converts tensors to addresses and values to plain data, as the table of stages
(`../ops.py`) prescribes; it makes no decisions and never reads device memory. ../README.md
describes each stage, csrc/README.md how its work is divided.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.backends import extension, ops
from zerocast.backends.cuda.launch import StandIns as StandIns
from zerocast.backends.cuda.launch import addresses, one_or_more, partial_amaxes, segment_work, stream_of, work
from zerocast.backends.extension import DTYPES, data, flat, format_of, typed, why_no_kernels
from zerocast.formats import FormatSpec, ScaleRule

DEVICES = ("cuda",)
PREFERENCE = 2

_C = extension.load()
if not hasattr(_C, "cuda"):
    raise ImportError(
        "zerocast.backends._C was built without CUDA: install where nvcc and a GPU are found, or with ZEROCAST_CUDA=1"
    )


def why_not(device: torch.device) -> str | None:
    """The reason why the kernels do not run on this GPU, or None if they do."""
    return why_no_kernels(_C.cuda.targets(), device)


def _address(tensor: Tensor | None) -> int:
    assert tensor is None or tensor.is_contiguous(), tensor.stride()
    return 0 if tensor is None else tensor.data_ptr()


def _scalars(scalars: Tensor) -> int:
    assert scalars.is_contiguous() and scalars.dtype == torch.float32 and scalars.shape[1] == 8, scalars
    return scalars.data_ptr()


def _typed_bases(tensors: Sequence[Tensor]) -> tuple[int, str]:
    dtypes = {tensor.dtype for tensor in tensors}
    assert len(dtypes) <= 1, f"the tensors of one role have one dtype, got {dtypes}"
    return addresses(tensors), DTYPES[dtypes.pop()] if dtypes else "float32"


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "format": format_of,
    "dtype": DTYPES.__getitem__,
    "bases": addresses,
    "typed_bases": _typed_bases,
    "typed": typed,
    "flat": flat,
    "data": data,
    "optional": _address,
    "messages": _address,
    "groups": _address,
    "scalars": _scalars,
    "clip": _address,
    "skip": _address,
    "segments": segment_work,
    "int": int,
    "bool": bool,
}


def _amax_work(fmt: FormatSpec, table: Tensor) -> dict[str, Any]:
    return {"work": work("amax", fmt, table)}


def _scale_work(fmt: FormatSpec, table: Tensor) -> dict[str, Any]:
    partial = partial_amaxes(table).data_ptr() if fmt.scale_rule is ScaleRule.TWO_LEVEL else 0
    return {"work": work("scales", fmt, table), "partial": partial}


def _cast_work(fmt: FormatSpec, table: Tensor) -> dict[str, Any]:
    return {"work": work("cast", fmt, table)}


def _roll_work(fmt: FormatSpec, table: Tensor) -> dict[str, Any]:
    return {"work": work("weights", fmt, table)}


def _transpose_work(fmt: FormatSpec, table: Tensor) -> dict[str, Any]:
    return {"data_work": work("transpose", fmt, table), "scale_work": work("transpose_scales", fmt, table)}


def _stage(name: str, tables: Callable[..., dict[str, Any]] | None = None, **other: Callable[[Any], Any]) -> Any:
    """The extension's stage, wrapped to take tensors instead of addresses.

    `tables` builds the work lists from the format and the table; `other` replaces how a kind of
    argument is passed.
    """
    kinds, arguments_of = {**_PLAIN, **other}, ops.arguments_of(name)
    names = [argument.name for argument in arguments_of]
    plain = {argument.name: kinds[argument.kind] for argument in arguments_of if argument.kind != "table"}
    on = next(argument.name for argument in arguments_of if argument.kind in ("table", "segments", "data", "messages"))
    entry = getattr(_C.cuda, name)

    def run(*arguments: Any, **given: Any) -> None:
        given.update(zip(names, arguments, strict=False))
        called = {argument: plain[argument](value) for argument, value in given.items() if argument in plain}
        if tables is not None:
            called |= tables(given["fmt"], given["table"])
        entry(**called, stream=stream_of(given[on]))

    return run


partial_amax = _stage("partial_amax", _amax_work)
compute_scales = _stage("compute_scales", _scale_work)
partial_cast = _stage("partial_cast", _cast_work)
roll_history = _stage("roll_history", _roll_work)
transpose = _stage("transpose", _transpose_work, bases=one_or_more)
dequantize = _stage("dequantize")
upcast = _stage("upcast")
adam_step = _stage("adam_step")
adam_amax = _stage("adam_amax", _amax_work)
quantize_gradient = _stage("quantize_gradient")
add_gradients = _stage("add_gradients")
