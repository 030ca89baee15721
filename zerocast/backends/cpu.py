"""The CPU backend: the stages in C++ (`csrc/cpu`), with OpenMP and SIMD chosen at run time.

This module converts tensors to addresses and values to plain data, as the table of stages
(`ops.py`) prescribes; it makes no decisions. It uses torch's number of threads. README.md describes
each stage.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.backends import extension, ops
from zerocast.backends.extension import DTYPES, CompiledStage, Converter, memories, memory, nbytes
from zerocast.formats import FormatSpec

DEVICES = ("cpu",)
PREFERENCE = 1

_C = extension.load()
format_of = extension.format_maker(_C)

# How each kind of argument is passed to the extension. `clip` is read here: on a CPU it is no wait.
TENSORS = ("typed", "flat", "data", "optional", "messages", "table", "pieces", "groups", "scalars")
LISTS = ("bases", "typed_bases")
CONVERTERS: dict[str, Converter] = {**dict.fromkeys(TENSORS, memory), **dict.fromkeys(LISTS, memories)}
CONVERTERS |= {"format": format_of, "dtype": DTYPES.__getitem__, "clip": float, "int": int, "bool": bool}


def _threads(_: Tensor) -> int:
    return torch.get_num_threads()


def _stage(name: str) -> CompiledStage:
    """Return a stage of the extension for tensors. It does nothing if `skip`, the last argument of
    some stages, holds True.
    """
    arguments = ops.arguments_of(name)
    passed = [argument for argument in arguments if argument.kind != "skip"]
    entry = extension.stage(_C.cpu, name, (*(argument.name for argument in passed), "threads"))
    converters = [(place, CONVERTERS[argument.kind]) for place, argument in enumerate(passed)]
    skip_place = len(passed) if len(passed) < len(arguments) else None
    return CompiledStage(entry, converters, _threads, skip_place=skip_place)


partial_amax = _stage("partial_amax")
compute_scales = _stage("compute_scales")
partial_cast = _stage("partial_cast")
roll_history = _stage("roll_history")
transpose = _stage("transpose")


def bind_transpose(fmt: FormatSpec, table: Tensor) -> ops.Transposer:
    """Bind the stage `transpose` for the weights of a table, with few calls on the CPU."""
    plain, plain_table = format_of(fmt), memory(table)

    def run(
        row_data: Sequence[Tensor], row_scales: Sequence[Tensor], data: Sequence[Tensor], scales: Sequence[Tensor]
    ) -> None:
        # The extension reads the table by its address. This line keeps it for as long as `run`.
        assert table.is_cpu
        # Codes may have an FP8 dtype. Their contiguity was checked.
        row_codes = list(map(Tensor.data_ptr, row_data)), "uint8", list(map(nbytes, row_data))
        codes = list(map(Tensor.data_ptr, data)), "uint8", list(map(nbytes, data))
        row_memory = memories(row_scales if scales else ())
        _C.cpu.transpose(plain, plain_table, row_codes, row_memory, codes, memories(scales), torch.get_num_threads())

    return run


dequantize = _stage("dequantize")
upcast = _stage("upcast")
_upcast_together = extension.stage(_C.cpu, "upcast_together", (*extension.UPCAST_TOGETHER, "threads"))


def upcast_together(fmt: FormatSpec, data: Sequence[Tensor], *rest: Any) -> None:
    """Run the stage `upcast` for several weights in one call (`ops.upcast_together`)."""
    scale_inv, amaxes, shapes, transposed, codes, group_scale_inv = rest
    sources = map(memories, (data, scale_inv, amaxes))
    targets = map(memories, (codes, group_scale_inv))
    _upcast_together(format_of(fmt), *sources, shapes, transposed, *targets, torch.get_num_threads())


adam_8bit = _stage("adam_8bit")
adam_8bit_cast = _stage("adam_8bit_cast")
adam_amax = _stage("adam_amax")
adam_cast = _stage("adam_cast")
quantize_gradient = _stage("quantize_gradient")
add_gradients = _stage("add_gradients")
