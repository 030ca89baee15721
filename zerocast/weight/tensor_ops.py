"""Handlers of the torch operators that take a full QuantizedWeight: views of the same shape,
copies, moves to another device, and products below autograd.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.weight import linear, owners, unsupported
from zerocast.weight.experts import ExpertOf
from zerocast.weight.gathered_operands import forget_operands
from zerocast.weight.validity import Use
from zerocast.weight.weight import QuantizedWeight, define, define_function

INSTEAD = (
    "give a QuantizedWeight of the same shape and format, or load the high-precision values before quantize_, or into the "
    "optimizer's masters"
)


def _is_like(source: Any, target: QuantizedWeight) -> bool:
    """Return True if the source is a QuantizedWeight of the target's shape, format and nominal
    dtype.
    """
    expected = target.shape, target.format, target.dtype
    return isinstance(source, QuantizedWeight) and (source.shape, source.format, source.dtype) == expected


def _described(source: Tensor) -> str:
    return (
        repr(source)
        if isinstance(source, QuantizedWeight)
        else f"a {source.dtype} tensor of shape {tuple(source.shape)}"
    )


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> QuantizedWeight:
    if not isinstance(target, QuantizedWeight):
        raise RuntimeError(f"cannot copy {source!r} into a plain tensor: call dequantize() where that is meant")
    if not _is_like(source, target):
        raise RuntimeError(f"cannot copy {_described(source)} into {target!r}: {INSTEAD}")
    assert isinstance(source, QuantizedWeight)
    # A gather in flight would write over the new bytes of the target, or fill the source too late.
    target.wait()
    source.check(Use.COPY)
    source.wait()
    owners.forget_read(target)
    target.state.copy_from(source.state)
    forget_operands(target.state.rowwise_data)
    return target


def _set_data(target: Tensor, source: Tensor) -> None:
    """Run `target.data = source`: the target shares the storage of the source afterwards.

    So code that swaps two weights through `.data` works. An owner that casts into the target
    detects at its next step that the weight's storage is not the one that its plan knows.
    """
    if not isinstance(target, QuantizedWeight):
        raise RuntimeError(
            f"cannot set the data of a plain tensor to {source!r}: call dequantize() where that is meant"
        )
    if not _is_like(source, target) or source.device != target.device or target.transposed_of is not None:
        raise RuntimeError(
            f"cannot set the data of {target!r} to {_described(source)}: {INSTEAD}; a host that moves parameters into buffers of "
            "its own needs its integration around that, as zerocast.integrations.megatron.quantized_params()"
        )
    assert isinstance(source, QuantizedWeight)
    target.restate(source.state)


def _to_copy(weight: QuantizedWeight, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> QuantizedWeight:
    if dtype not in (None, weight.dtype):
        raise RuntimeError(
            f"the nominal dtype of a QuantizedWeight is fixed: {weight.dtype}, cannot become {dtype}; {unsupported.CONVERT}"
        )
    # Module.to() calls swap_tensors on the original after this copy, which raises on weak
    # references.
    owners.forget_read(weight)
    return weight.copied(lambda t: t.to(device or t.device, copy=True))


def _same_shape(weight: QuantizedWeight, shape: Sequence[int], **kwargs: Any) -> QuantizedWeight:
    if tuple(shape) != tuple(weight.shape):
        instead = unsupported.FLAT if len(shape) == 1 else unsupported.VIEW
        raise RuntimeError(f"cannot view {weight!r} as {tuple(shape)}, its codes have one layout: {instead}")
    return weight.share()


def _same_strides(
    weight: QuantizedWeight, size: Sequence[int], stride: Sequence[int], storage_offset: int = 0
) -> QuantizedWeight:
    if tuple(stride) != weight.stride() or storage_offset:
        raise RuntimeError(
            f"cannot view {weight!r} with strides {tuple(stride)}, its codes have one layout: {unsupported.VIEW}"
        )
    return _same_shape(weight, size)


def _detach(weight: QuantizedWeight) -> QuantizedWeight:
    """Share the storage, and leave the weight that gradients of a reading would go to."""
    other = weight.share()
    if weight.transposed_of is not None:
        other.transposed_of = _detach(weight.transposed_of)
    if weight.expert_of is not None:
        other.expert_of = ExpertOf(_detach(weight.expert_of.weight), weight.expert_of.number)
    return other


def _transpose(weight: QuantizedWeight) -> QuantizedWeight:
    """Run the `t` operator below autograd. The result is always a new tensor object, since autograd
    would mark the weight itself as the output of the operator.
    """
    return weight.transposed() if weight.transposed_of is None else weight.transposed_of.share()


def _convert(function: Callable[..., Tensor], weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run a conversion of `Module.to` and its like, which then exchange the weight and the result
    by `swap_tensors`. A conversion that changes nothing returns the weight and calls no operator.
    """
    if not torch.compiler.is_compiling():
        owners.forget_read(weight)
    return function(weight, *args, **kwargs)


define_function(torch.Tensor.data.__set__, _set_data)  # type: ignore[attr-defined]
for _function in (Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type):
    define_function(_function, functools.partial(_convert, _function))
_aten = torch.ops.aten
define(_aten.detach.default, _detach)
define(_aten.alias.default, QuantizedWeight.share)
define(_aten.view.default, _same_shape)
define(_aten.as_strided.default, _same_strides)
define(_aten.t.default, _transpose)
define(_aten.mm.default, linear.product_below_autograd)
define(_aten.addmm.default, lambda bias, x, weight: linear.product_below_autograd(x, weight, bias))
# Hosts such as Megatron reach a parameter's gradient accumulator by `param.expand_as(param)`.
define(_aten.expand.default, _same_shape)
define(_aten.clone.default, lambda weight, **kwargs: _to_copy(weight))
define(_aten.copy_.default, _copy)
define(_aten._to_copy.default, _to_copy)
