"""The CUDA backend: the stages in CUDA C++ (`csrc/cuda`), on the current stream.

This module converts tensors to addresses and values to plain data, as the table of stages
(`../ops.py`) prescribes; it makes no decisions and never reads device memory. ../README.md
describes each stage, csrc/README.md how its work is divided.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.backends import extension, ops
from zerocast.backends.cuda.launch import StandIns as StandIns
from zerocast.backends.cuda.launch import (
    addresses,
    few_or_many,
    format_of,
    kernels,
    partial_amaxes,
    piece_work,
    stream_of,
    work,
)
from zerocast.backends.extension import DTYPES, CompiledStage, Converter, memories, memory, why_no_kernels
from zerocast.formats import FormatSpec, ScaleRule

DEVICES = ("cuda",)
PREFERENCE = 2


def why_not(device: torch.device) -> str | None:
    """Return the reason why the kernels do not run on this GPU, or None if they do."""
    return why_no_kernels(kernels.targets(), device)


def _address(tensor: Tensor | None) -> int:
    return memory(tensor)[0]


def _typed_addresses(tensors: Sequence[Tensor]) -> tuple[int, str]:
    _, dtype, _ = memories(tensors)
    return addresses(tensors), dtype or "float32"


# How each kind of argument is passed to the extension.
_CONVERTERS: dict[str, Converter] = dict.fromkeys(("typed", "flat", "data", "optional", "messages"), memory)
_CONVERTERS |= dict.fromkeys(("groups", "scalars", "clip", "skip"), _address)
_CONVERTERS |= {"format": format_of, "dtype": DTYPES.__getitem__, "bases": addresses, "typed_bases": _typed_addresses}
_CONVERTERS |= {"pieces": piece_work, "int": int, "bool": bool}

# Dict from the name of an argument that the extension needs instead of a table to the function that
# makes it.
FromTable = dict[str, Callable[[FormatSpec, Tensor], Any]]


def _work(kind: str) -> Callable[[FormatSpec, Tensor], Any]:
    return functools.partial(work, kind)


def _partial(fmt: FormatSpec, table: Tensor) -> int:
    return partial_amaxes(table).data_ptr() if fmt.scale_rule is ScaleRule.TWO_LEVEL else 0


def _stage(name: str, from_table: FromTable | None = None, **other: Converter) -> CompiledStage:
    """Return a stage of the extension for tensors. It runs on the current stream of the device of
    its table, or, without a table, of its data or messages.

    `from_table` makes the extension's arguments that replace the table; `other` replaces how a kind
    of argument is passed.
    """
    kinds = {**_CONVERTERS, **other}
    makers = from_table or {}
    arguments = ops.arguments_of(name)
    converters = [(i, kinds[argument.kind]) for i, argument in enumerate(arguments) if argument.kind != "table"]
    names = [arguments[i].name for i, _ in converters]
    entry = extension.stage(kernels, name, (*names, *makers, "stream"))
    device_kinds = ("table", "data", "messages")
    device_place = next(i for i, argument in enumerate(arguments) if argument.kind in device_kinds)
    return CompiledStage(entry, converters, stream_of, device_place, [*makers.values()])


partial_amax = _stage("partial_amax", {"work": _work("amax")})
compute_scales = _stage("compute_scales", {"work": _work("scales"), "partial": _partial})
partial_cast = _stage("partial_cast", {"work": _work("cast")})
roll_history = _stage("roll_history", {"work": _work("weights")})
_transpose_work = {"data_work": _work("transpose"), "scale_work": _work("transpose_scales")}
transpose = _stage("transpose", _transpose_work, bases=few_or_many, codes=few_or_many)
dequantize = _stage("dequantize")
upcast = _stage("upcast")
upcast_together = extension.upcast_together(kernels, format_of, stream_of, "stream")
adam_8bit = _stage("adam_8bit", {"work": _work("amax")})
adam_8bit_cast = _stage("adam_8bit_cast", {"work": _work("adam_8bit_cast")}, pieces=_address)
adam_amax = _stage("adam_amax", {"work": _work("amax")})
adam_cast = _stage("adam_cast", {"work": _work("adam_cast")})
quantize_gradient = _stage("quantize_gradient")
add_gradients = _stage("add_gradients")


def lay_out(gradients: Sequence[Tensor], ranks: int, out: Tensor) -> None:
    """Write to row i of `out`, (ranks, elements for a rank), the concatenated parts of all
    gradients that rank i reduces. Gradients are bf16 or f32, `out` is f32 or of their dtype.
    """
    kernels.lay_out(memories(gradients), ranks, memory(out), stream_of(out))
