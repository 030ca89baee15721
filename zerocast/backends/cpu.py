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
from zerocast.backends.extension import DTYPES, memory, nbytes
from zerocast.formats import FormatSpec

DEVICES = ("cpu",)
PREFERENCE = 1

_C = extension.load()
format_of = extension.format_maker(_C)

# How each kind of argument is passed to the extension: tensors and lists of tensors by their
# memory, the others by these functions. `clip` is read here: on a CPU it is no wait.
TENSORS = ("typed", "flat", "data", "optional", "messages", "table", "pieces", "groups", "scalars")
LISTS = ("bases", "typed_bases")
_PLAIN: dict[str, Callable[[Any], Any]] = {"format": format_of, "dtype": DTYPES.__getitem__}
_PLAIN |= {"clip": float, "int": int, "bool": bool}


def _stage(name: str) -> Callable[..., None]:
    """Wrap a stage of the extension to take tensors instead of addresses and sizes.

    The wrapper takes the arguments of its table entry by position. It does nothing if `skip`, the
    last argument of some stages, holds True.
    """
    arguments_of = ops.arguments_of(name)
    passed = [argument for argument in arguments_of if argument.kind != "skip"]
    takes_skip = len(passed) < len(arguments_of)
    entry = extension.stage(_C.cpu, name, (*(argument.name for argument in passed), "threads"))
    tensor_places = [place for place, argument in enumerate(passed) if argument.kind in TENSORS]
    list_places = [place for place, argument in enumerate(passed) if argument.kind in LISTS]
    list_names = [passed[place].name for place in list_places]
    table_place = next((place for place, argument in enumerate(passed) if argument.kind == "table"), None)
    converters = [(place, _PLAIN[argument.kind]) for place, argument in enumerate(passed) if argument.kind in _PLAIN]

    def run(*arguments: Any) -> None:
        if takes_skip and arguments[-1] is not None and bool(arguments[-1]):
            return
        # `skip`, which comes last, is dropped here.
        values: list[Any] = [*arguments[: len(passed)]]
        table = None if table_place is None else values[table_place]
        lists = extension.memory_of_lists(map(values.__getitem__, list_places), list_names, table)
        for place, described in zip(list_places, lists, strict=True):
            values[place] = described
        for place in tensor_places:
            tensor = values[place]
            if tensor is not None and tensor.is_contiguous():
                # As `memory` returns it, without a call.
                values[place] = tensor.data_ptr(), DTYPES[tensor.dtype], tensor.nbytes
            else:
                values[place] = memory(tensor)
        for place, convert in converters:
            values[place] = convert(values[place])
        entry(*values, torch.get_num_threads())

    return run


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
        row_memory, memory_of_scales = extension.memory_of_lists((row_scales if scales else (), scales))
        _C.cpu.transpose(plain, plain_table, row_codes, row_memory, codes, memory_of_scales, torch.get_num_threads())

    return run


dequantize = _stage("dequantize")
upcast = _stage("upcast")
_upcast_together = extension.stage(_C.cpu, "upcast_together", (*extension.UPCAST_TOGETHER, "threads"))


def upcast_together(fmt: FormatSpec, data: Sequence[Tensor], *rest: Any) -> None:
    """Run the stage `upcast` for several weights in one call (`ops.upcast_together`)."""
    scale_inv, amaxes, shapes, transposed, codes, group_scale_inv = rest
    sources = extension.memory_of_lists((data, scale_inv, amaxes))
    targets = extension.memory_of_lists((codes, group_scale_inv))
    _upcast_together(format_of(fmt), *sources, shapes, transposed, *targets, torch.get_num_threads())


adam_8bit = _stage("adam_8bit")
adam_8bit_cast = _stage("adam_8bit_cast")
adam_amax = _stage("adam_amax")
adam_cast = _stage("adam_cast")
quantize_gradient = _stage("quantize_gradient")
add_gradients = _stage("add_gradients")
