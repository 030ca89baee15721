"""The CPU backend: the stages in C++ (`csrc/cpu`), with OpenMP and SIMD chosen at run time.

This module converts tensors to addresses and values to plain data, as the table of stages
(`ops.py`) prescribes; it makes no decisions. It uses torch's number of threads. README.md describes
each stage.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.backends import extension, ops
from zerocast.backends.extension import DTYPES, data, flat, format_of, typed

DEVICES = ("cpu",)
PREFERENCE = 1

_C = extension.load()


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _all_typed(tensors: Sequence[Tensor]) -> list[tuple[int, str]]:
    return [(tensor.data_ptr(), DTYPES[tensor.dtype]) for tensor in tensors]


def _table(table: Tensor) -> tuple[int, int]:
    assert table.dtype == torch.int64 and table.is_contiguous(), table
    return table.data_ptr(), table.shape[0]


def _int64(values: Tensor) -> int:
    assert values.dtype == torch.int64 and values.is_contiguous(), values
    return values.data_ptr()


def _scalars(scalars: Tensor) -> int:
    assert scalars.is_contiguous() and scalars.dtype == torch.float32 and scalars.shape[1] == 8, scalars
    return scalars.data_ptr()


def _optional(tensor: Tensor | None) -> int:
    assert tensor is None or tensor.is_contiguous(), tensor.stride()
    return 0 if tensor is None else tensor.data_ptr()


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "format": format_of,
    "dtype": DTYPES.__getitem__,
    "bases": _addresses,
    "typed_bases": _all_typed,
    "typed": typed,
    "flat": flat,
    "data": data,
    "optional": _optional,
    "messages": _optional,
    "table": _table,
    "segments": _table,
    "groups": _int64,
    "scalars": _scalars,
    "clip": float,
    "int": int,
    "bool": bool,
}


def _stage(name: str) -> Callable[..., None]:
    """The extension's stage, wrapped to take tensors instead of addresses.

    It takes the arguments of its table entry by position. With a `skip` that holds True it does
    nothing.
    """
    arguments_of = ops.arguments_of(name)
    plain = {argument.name: _PLAIN[argument.kind] for argument in arguments_of if argument.kind != "skip"}
    entry = extension.stage(_C.cpu, name, (*plain, "threads"))
    converters, takes_skip = list(plain.values()), len(plain) < len(arguments_of)

    def run(*arguments: Any) -> None:
        if takes_skip and arguments[-1] is not None and bool(arguments[-1]):
            return
        values = [convert(value) for convert, value in zip(converters, arguments, strict=False)]
        entry(*values, torch.get_num_threads())

    return run


partial_amax = _stage("partial_amax")
compute_scales = _stage("compute_scales")
partial_cast = _stage("partial_cast")
roll_history = _stage("roll_history")
transpose = _stage("transpose")
dequantize = _stage("dequantize")
upcast = _stage("upcast")
adam_step = _stage("adam_step")
adam_amax = _stage("adam_amax")
adam_cast = _stage("adam_cast")
quantize_gradient = _stage("quantize_gradient")
add_gradients = _stage("add_gradients")
