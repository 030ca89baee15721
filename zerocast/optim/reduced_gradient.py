"""ReducedGradient: the tensor that `parameter.grad` is after a backward pass. It represents the
gradient that is reduced over all ranks.

It has the shape and the dtype of the gradient, but no elements. This rank's elements are in the
optimizer's flat shard. Norms are computed over the full gradient and are the same on every rank, so
that `torch.nn.utils.clip_grad_norm_` and similar functions are right. Operators that change a
gradient in place change this rank's shard, which the step then uses (`gradient_ops.py`). Every
other operator raises, so that no gradient is gathered silently and no shard is mistaken for the
full gradient.

If it is still on a parameter at the next backward pass, autograd adds the gradient of this rank to
it. That does not change the reduced gradient: the sum is kept separately (`GradientPart.local`)
until it is reduced as well.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerocast.formats.layout import Span

if TYPE_CHECKING:
    from zerocast.optim.gradient_shard import GradientShard

GONE = "the optimizer that this gradient belonged to is gone: set p.grad to None, or call model.zero_grad()"

_HANDLERS: dict[Any, Callable[..., Any]] = {}


@dataclass(eq=False)
class GradientPart:
    """The gradient of one parameter, and the part of it that this rank owns.

    A backward pass leaves a gradient of this rank in `local`. Which gradient that is depends on
    what is on the parameter after autograd has accumulated it there:

        p.grad is                      since                           `local` becomes
        a plain tensor or None         no round has reduced one yet    that tensor or None
        the reduced gradient           autograd adds to it in place    `local` plus the gradient
        a plain tensor                 autograd adds out of place      that tensor, the sum of both
        a plain tensor or None         the user has removed p.grad     that tensor or None

    In the last row the next reduction replaces what earlier rounds have reduced. Otherwise it adds
    to that, or reduces the total again (`GradientReducer`).

    It has no reference to the parameter. A strong one would be a cycle, since the parameter refers
    to its gradient, which refers to this part. A weak one would make torch.utils.swap_tensors
    raise.

    Attributes:
        name: the name of the parameter. Fixed, as are the next five.
        offset: the offset of the parameter in its bucket.
        numel: the number of elements of the full gradient.
        span: the elements that this rank owns.
        start: the offset of these elements in the flat shard.
        shard: a weak reference to the owner of the flat shard.
        local: the gradient of this rank that is still to be reduced. With stage 1 it includes what
            earlier rounds have reduced, since a round reduces the total again. None if there is
            none.
        replaces_sum: True if the user has removed p.grad after it was reduced. The next reduction
            then replaces the sum of earlier ones.
        summed_out_of_place: True from `sum` until `collect`, which then takes a plain tensor as the
            third row does.
    """

    name: str
    offset: int
    numel: int
    span: Span
    start: int
    shard: "weakref.ref[GradientShard]"
    local: Tensor | None = None
    replaces_sum: bool = False
    summed_out_of_place: bool = False

    def owner(self) -> "GradientShard":
        """Return the owner of the shard. Raises RuntimeError if it no longer exists."""
        owner = self.shard()
        if owner is None:
            raise RuntimeError(GONE)
        return owner

    def collect(self, parameter: Tensor, placed: "ReducedGradient", was_reduced: bool) -> None:
        """Move the gradient from `parameter.grad` to `local`, and put the reduced gradient `placed`
        there instead. `was_reduced` is True if an earlier round has put it there.
        """
        gradient = parameter.grad
        if gradient is placed:
            return
        if isinstance(gradient, ReducedGradient):
            if gradient.part is not self:
                raise RuntimeError(
                    f"p.grad of {self.name} is the reduced gradient of {gradient.part.name}: use p.grad.copy_(...)"
                )
        else:
            if was_reduced and not self.summed_out_of_place:
                self.replaces_sum = True
            self.local = gradient
            self.summed_out_of_place = False
        try:
            parameter.grad = placed
        except (RuntimeError, TypeError) as error:
            now, then = (f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in (parameter, placed))
            raise RuntimeError(
                f"{self.name} was {then} when its optimizer was built and is {now} now: move, convert and resize the model first"
            ) from error

    def accumulate(self, gradient: Tensor) -> None:
        """Add a gradient of this rank, as autograd does."""
        owner = self.owner()
        if self.local is not None:
            self.local.add_(gradient)
        else:
            self.local = gradient.clone() if owner.keeps_local else gradient

    def sum(self, gradient: Tensor) -> Tensor:
        """Return the sum of `local` and a gradient of this rank, which autograd puts on the
        parameter if the backward pass itself is differentiated.
        """
        self.owner()
        self.summed_out_of_place = True
        return gradient.clone() if self.local is None else self.local + gradient

    def drop(self) -> None:
        """Drop the gradient of this rank."""
        self.local = None
        self.replaces_sum = self.summed_out_of_place = False


class ReducedGradient(Tensor):
    """The gradient of a parameter, averaged over all ranks.

    Supported are norms, `clip_grad_norm_` and the other functions of `torch.nn.utils`,
    torch.amp.GradScaler, `mul_` and other changes in place with numbers or with plain tensors of
    the full gradient's shape, and `full_tensor()`. All ranks must make the same calls.
    """

    part: GradientPart

    @staticmethod
    def of(part: GradientPart, parameter: Tensor) -> "ReducedGradient":
        """Return the tensor to put on a parameter as its gradient, in the dtype of its
        gradients.
        """
        return ReducedGradient(part, parameter, getattr(parameter, "grad_dtype", None) or parameter.dtype)

    @staticmethod
    def __new__(cls, part: GradientPart, like: Tensor, dtype: torch.dtype) -> "ReducedGradient":
        """Make the tensor that represents a part, with the shape, strides and device of `like`."""
        gradient: ReducedGradient = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device
        )
        gradient.part = part
        return gradient

    def full_tensor(self) -> Tensor:
        """Return the full gradient as a plain tensor, in FP32 as it was reduced. Collective."""
        return self.part.owner().gathered(self.part).view(self.shape)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Return the name, shape, dtype and span, without the elements."""
        name, span = self.part.name, self.part.span
        return (
            f"ReducedGradient({name}, shape={tuple(self.shape)}, dtype={self.dtype}, here=[{span.start}, {span.stop}))"
        )

    def __format__(self, spec: str) -> str:
        """Return the text that `repr` gives."""
        return format(repr(self), spec)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass queries such as shape and dtype, and functions that call operators, on to the
        dispatcher. Raises RuntimeError for functions that read memory.
        """
        name = getattr(func, "__name__", "")
        if func == _SET_DATA and _is_itself(*args):
            # Module.to sets the data of gradients, even if the model is on that device already.
            return None
        if func in _HIDDEN or not (name in _ASKED or name == "__get__" or _has_operator(func, name)):
            raise undefined(name or func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run the handler that `define` has registered. Raises RuntimeError for any other
        operator.
        """
        handler = _HANDLERS.get(func)
        if handler is None:
            raise undefined(func, args, kwargs)
        return handler(*args, **(kwargs or {}))


def remove_reduced_gradient(parameter: Tensor) -> None:
    """Replace a reduced gradient on the parameter by this rank's own gradient, or None. That is
    what autograd alone would have left there.
    """
    if isinstance(parameter.grad, ReducedGradient):
        parameter.grad = parameter.grad.part.local


# Methods of a tensor that run no operator, or none that reads elements.
_ASKED = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "storage_offset",
    "element_size",
    "get_device",
    "has_names",
}
_ASKED |= {
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_contiguous",
    "is_inference",
    "is_same_size",
    "__len__",
    "__hash__",
}
# A compiler calls these. The storage has no memory.
_ASKED |= {"_is_view", "untyped_storage"}
_ASKED |= {"requires_grad_", "retain_grad", "register_hook", "__imul__", "__iadd__", "__isub__", "__itruediv__"}
_HIDDEN = {Tensor.__cuda_array_interface__.__get__}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def _is_itself(gradient: Any, data: Any) -> bool:
    """Return True if `data` represents the same gradient, as the results of `to` and `detach`
    do.
    """
    return isinstance(data, ReducedGradient) and data.part is gradient.part and data.dtype is gradient.dtype


def _has_operator(func: Any, name: str) -> bool:
    """Return True if the function calls the dispatcher, which can raise on it."""
    written_with_operators = getattr(func, "__module__", "") in ("torch.functional", "torch.nn.functional")
    # Modes of the dispatcher call overloads.
    is_operator = isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    return is_operator or written_with_operators or (not name.startswith("__") and hasattr(torch.ops.aten, name))


def undefined(what: Any, args: Any, kwargs: Any) -> RuntimeError:
    """Return the error for an operation that a reduced gradient does not support. It names calls
    to use instead.
    """
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    of = next((f" of {leaf.part.name}" for leaf in leaves if isinstance(leaf, ReducedGradient)), "")
    return RuntimeError(
        f"{what} is not defined on the reduced gradient{of}, of which each rank holds a part: clip with optimizer.clip_grad_norm_ "
        "or torch.nn.utils.clip_grad_norm_, which return the norm; p.grad.full_tensor() on all ranks returns the values. No other "
        "optimizer than the one that has reduced it can step with it"
    )


def define(op: Any, handler: Callable[..., Any]) -> None:
    """Register the handler of an operator for arguments that include a ReducedGradient."""
    _HANDLERS[op] = handler
