"""The operators that are defined on reduced gradients: norms of the full gradient, in-place changes
of this rank's shard, and operators that autograd and GradScaler call.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from zerocast.optim.reduced_gradient import ReducedGradient, define, undefined

PLAIN = (Tensor, torch.nn.Parameter)
IN_PLACE = (
    "mul_",
    "div_",
    "add_",
    "sub_",
    "neg_",
    "sign_",
    "fill_",
    "copy_",
    "clamp_",
    "clamp_min_",
    "clamp_max_",
    "nan_to_num_",
)
EACH_IN_PLACE = ("mul_", "div_", "add_", "sub_", "neg_", "sign_", "copy_", "clamp_min_", "clamp_max_")


def _operand(value: Any, gradient: ReducedGradient) -> Any:
    """Return the operand of an operator on this rank's shard: a number, or the elements of a tensor
    that correspond to the shard of `gradient`.
    """
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, ReducedGradient):
        if value.part is not gradient.part:
            raise RuntimeError(
                f"the reduced gradients of {gradient.part.name} and {value.part.name} are sharded differently: "
                "use full_tensor() of one of them"
            )
        return value.part.owner().view(value.part)
    if type(value) not in PLAIN:
        raise RuntimeError(
            f"a reduced gradient can only be combined with plain tensors and numbers, got {type(value).__name__}"
        )
    if value.shape == gradient.shape:
        return value.detach().reshape(-1)[gradient.part.span.start : gradient.part.span.stop]
    if value.numel() == 1:
        return value.detach().reshape(())
    raise RuntimeError(
        f"a reduced gradient of shape {tuple(gradient.shape)} can only be combined with numbers and tensors of its shape, got "
        f"{tuple(value.shape)}"
    )


def _in_place(op: Any) -> Callable[..., Any]:
    def run(gradient: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(gradient, ReducedGradient):
            raise undefined(op, (gradient, *args), kwargs)
        part = gradient.part
        view = part.owner().view(part)
        values = [_operand(arg, gradient) for arg in args]
        op(view, *values, **{name: _operand(value, gradient) for name, value in kwargs.items()})
        part.owner().mark_changed(part)
        return gradient

    return run


def _accumulating(change: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `add_`, which accumulates a gradient if autograd calls it, and otherwise changes the
    reduced gradient.
    """

    def run(gradient: Any, *args: Any, **kwargs: Any) -> Any:
        if not (isinstance(gradient, ReducedGradient) and _accumulates(gradient)):
            return change(gradient, *args, **kwargs)
        gradient.part.accumulate(args[0])
        return gradient

    return run


def _sum(gradient: Any, new: Any, **kwargs: Any) -> Tensor:
    """Return the out-of-place `add`, with which autograd accumulates gradients if the backward pass
    itself is differentiated.
    """
    if not (isinstance(gradient, ReducedGradient) and _accumulates(gradient)):
        raise undefined(torch.ops.aten.add.Tensor, (gradient, new), kwargs)
    return gradient.part.sum(new)


def _accumulates(gradient: ReducedGradient) -> bool:
    node: Any = torch._C._current_autograd_node()
    return getattr(getattr(node, "variable", None), "grad", None) is gradient


def _each(op: Any) -> Callable[..., Any]:
    """Wrap an operator that changes the tensors of its first list in place."""

    def run(gradients: Any, *args: Any, **kwargs: Any) -> None:
        targets = [g.part.owner().view(g.part) if isinstance(g, ReducedGradient) else g for g in gradients]
        op(targets, *[_operands_for(arg, gradients) for arg in args], **kwargs)
        _mark_changed(gradients)

    return run


def _operands_for(values: Any, gradients: Iterable[Any]) -> Any:
    if not isinstance(values, list | tuple):
        return values
    pairs = zip(values, gradients, strict=True)
    return [_operand(value, gradient) if isinstance(gradient, ReducedGradient) else value for value, gradient in pairs]


def _mark_changed(gradients: Iterable[Any]) -> None:
    for gradient in gradients:
        if isinstance(gradient, ReducedGradient):
            gradient.part.owner().mark_changed(gradient.part)


def _norm(gradient: ReducedGradient, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    covers_all = not dim or sorted(d % gradient.dim() for d in dim) == list(range(gradient.dim()))
    if keepdim or not covers_all:
        raise undefined("a norm along some dimensions", (gradient,), {})
    norm = gradient.part.owner().norm(gradient.part, float(ord))
    return norm if dtype is None else norm.to(dtype)


def _norms(gradients: Any, ord: Any = 2, dtype: Any = None) -> list[Tensor]:
    return [
        _norm(g, ord, dtype=dtype) if isinstance(g, ReducedGradient) else torch.linalg.vector_norm(g, ord, dtype=dtype)
        for g in gradients
    ]


def _unscale(gradients: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale gradients for torch.amp.GradScaler. If a rank has values that are not finite, the
    flag `found_inf` is set on all ranks.
    """
    reduced = [g for g in gradients if isinstance(g, ReducedGradient)]
    views = [g.part.owner().view(g.part) for g in reduced]
    views = [view for view in views if view.numel()]
    plain = [g for g in gradients if type(g) in PLAIN]
    for tensors in (views, plain):
        if tensors:
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inv_scale)
    _mark_changed(reduced)
    owners = {id(owner): owner for owner in (g.part.owner() for g in reduced)}
    for owner in owners.values():
        owner.finite_everywhere(found_inf)


def _zero(gradient: ReducedGradient) -> ReducedGradient:
    gradient.part.owner().zero(gradient.part)
    return gradient


def _zero_each(gradients: Any) -> None:
    for gradient in gradients:
        gradient.zero_()


def _same_part(gradient: ReducedGradient) -> ReducedGradient:
    return ReducedGradient(gradient.part, gradient, gradient.dtype)


_aten = torch.ops.aten


def _define_overloads(names: Iterable[str], handler: Callable[[Any], Any]) -> None:
    """Define all overloads of the operators of these names that this version of torch has."""
    for packet in (getattr(_aten, name) for name in names if hasattr(_aten, name)):
        for overload in packet.overloads():
            op = getattr(packet, overload)
            define(op, handler(op))


_define_overloads(IN_PLACE, _in_place)
_define_overloads([f"_foreach_{name}" for name in EACH_IN_PLACE], _each)
define(_aten.add_.Tensor, _accumulating(_in_place(_aten.add_.Tensor)))
define(_aten.add.Tensor, _sum)
define(_aten.linalg_vector_norm.default, _norm)
define(_aten._foreach_norm.Scalar, _norms)
define(_aten._amp_foreach_non_finite_check_and_unscale_.default, _unscale)
define(_aten.zero_.default, _zero)
define(_aten._foreach_zero_.default, _zero_each)
define(_aten.detach.default, _same_part)
define(_aten.alias.default, _same_part)
