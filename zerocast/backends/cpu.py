"""The CPU backend: the stages in C++ (`csrc/cpu`), with OpenMP and SIMD chosen at run time.

This module converts tensors to addresses and values to plain data, as the table of stages
(`ops.py`) prescribes; it makes no decisions. It uses torch's number of threads. README.md describes
each stage.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerocast.backends import extension, ops
from zerocast.backends.extension import DTYPES, CompiledStage, Converter, Memories, memories, memory, nbytes

DEVICES = ("cpu",)
PREFERENCE = 1

_C = extension.load()
format_of = extension.format_maker(_C)


def _codes(tensors: Sequence[Tensor]) -> Memories:
    """Return the memory of checked tensors of codes, which may have an FP8 dtype."""
    return list(map(Tensor.data_ptr, tensors)), "uint8", list(map(nbytes, tensors))


# How each kind of argument is passed to the extension. `clip` is read here: on a CPU it is no wait.
TENSORS = ("typed", "flat", "data", "optional", "messages", "table", "pieces", "groups", "scalars")
LISTS = ("bases", "typed_bases")
CONVERTERS: dict[str, Converter] = {**dict.fromkeys(TENSORS, memory), **dict.fromkeys(LISTS, memories)}
CONVERTERS |= {"format": format_of, "dtype": DTYPES.__getitem__, "clip": float, "int": int, "bool": bool}
CONVERTERS |= {"codes": _codes}


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
dequantize = _stage("dequantize")
upcast = _stage("upcast")
upcast_together = extension.upcast_together(_C.cpu, format_of, _threads, "threads")
adam_8bit = _stage("adam_8bit")
adam_8bit_cast = _stage("adam_8bit_cast")
adam_amax = _stage("adam_amax")
adam_cast = _stage("adam_cast")
quantize_gradient = _stage("quantize_gradient")
add_gradients = _stage("add_gradients")
