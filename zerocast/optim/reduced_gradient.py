"""ReducedGradient: what `parameter.grad` is after a backward pass, this rank's part of a gradient
that is reduced over all ranks.

It has the shape and the dtype of the gradient and no elements of its own: they are a slice of the
optimizer's flat FP32 shard. Norms are those of the whole gradient, the same on every rank, so that
`torch.nn.utils.clip_grad_norm_` and its siblings are right. What changes a gradient in place
changes this rank's slice, which the step then uses (`gradient_ops.py`). Every other operator
raises: nothing gathers silently, and nothing takes a slice for the whole.

When the next backward pass finds it on a parameter, autograd adds the gradient of this rank to it.
That is no change of what was reduced: the sum is kept beside it (`GradientPart.local`) until it is
reduced too.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zerocast.formats.layout import Span

GONE = "the optimizer that this gradient belonged to is gone: set p.grad to None, or call model.zero_grad()"

_HANDLERS: dict[Any, Callable[..., Any]] = {}


class OwnsGradients(Protocol):
    """The shard, as a gradient sees it. All of it raises RuntimeError while there is no reduced
    gradient to read.
    """

    def view(self, part: "GradientPart") -> Tensor:
        """The elements that are on this rank, f32; reduces first what is not reduced yet."""

    def changed(self, part: "GradientPart") -> None:
        """Somebody has written to `view`."""

    def norm(self, part: "GradientPart", norm_type: float) -> Tensor:
        """The norm of the whole gradient, f32[]."""

    def gathered(self, part: "GradientPart") -> Tensor:
        """The whole gradient, f32, flat."""

    def forget(self, part: "GradientPart") -> None:
        """The gradient is zero, reduced or not; no collective."""

    def finite_everywhere(self, found_inf: Tensor) -> None:
        """Make a flag that is set on any rank set on all."""

    @property
    def keeps_local(self) -> bool:
        """True if gradients of this rank outlive the arrival at their parameter."""


@dataclass(eq=False)
class GradientPart:
    """One parameter's gradient: the elements `span` of it that this rank owns start at `start` of
    the flat shard.

    `local` is the gradient of this rank alone: what no round has reduced yet; with stage 1 also
    what one has. `forgotten`: p.grad was taken off the parameter after it was reduced. `summed`:
    autograd has put the sum of `local` and a gradient on the parameter.

    The parameter holds its gradient and the gradient this part, so nothing here holds the
    parameter; not weakly either, which torch.utils.swap_tensors would refuse.
    """

    name: str
    offset: int  # in its bucket
    numel: int
    span: Span
    start: int
    shard: "weakref.ref[Any]"
    local: Tensor | None = None
    forgotten: bool = False
    summed: bool = False

    def owner(self) -> OwnsGradients:
        """The shard; RuntimeError once it is gone."""
        owner: OwnsGradients | None = self.shard()
        if owner is None:
            raise RuntimeError(GONE)
        return owner

    def collect(self, parameter: Tensor, placed: "ReducedGradient", reduced: bool) -> None:
        """Take the gradient that lies on the parameter, and put `placed` in its place; `reduced`
        says that it was there before.
        """
        found = parameter.grad
        if found is placed:
            return
        if isinstance(found, ReducedGradient):
            if found.part is not self:
                raise RuntimeError(
                    f"p.grad of {self.name} is the reduced gradient of {found.part.name}: use p.grad.copy_(...)"
                )
        else:
            self.forgotten |= reduced and not self.summed
            self.local, self.summed = found, False
        try:
            parameter.grad = placed
        except (RuntimeError, TypeError) as error:
            now, then = (f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in (parameter, placed))
            raise RuntimeError(
                f"{self.name} was {then} when its optimizer was built and is {now} now: move and convert the model first"
            ) from error

    def accumulate(self, gradient: Tensor) -> None:
        """Autograd adds what a backward pass gives on this rank."""
        owner = self.owner()
        if self.local is not None:
            self.local.add_(gradient)
        else:
            self.local = gradient.clone() if owner.keeps_local else gradient


class ReducedGradient(Tensor):
    """The gradient of a parameter, averaged over all ranks.

    There are: norms, `clip_grad_norm_` and the other functions of `torch.nn.utils`,
    torch.amp.GradScaler, `mul_` and other changes in place with numbers or with plain tensors of
    the whole gradient's shape, and `full_tensor()`. All ranks make the same calls.
    """

    part: GradientPart

    @staticmethod
    def of(part: GradientPart, parameter: Tensor) -> "ReducedGradient":
        """The gradient to put on a parameter, in the dtype that its gradients have."""
        return ReducedGradient(part, parameter, getattr(parameter, "grad_dtype", None) or parameter.dtype)

    @staticmethod
    def __new__(cls, part: GradientPart, like: Tensor, dtype: torch.dtype) -> "ReducedGradient":
        """Stand for a part, with shape, strides and device of `like`; nothing is copied."""
        gradient: ReducedGradient = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device
        )
        gradient.part = part
        return gradient

    def full_tensor(self) -> Tensor:
        """The whole gradient as a plain tensor, in FP32 as it was reduced. A collective call."""
        return self.part.owner().gathered(self.part).view(self.shape)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Name, shape, dtype and span, without the elements."""
        name, span = self.part.name, self.part.span
        return (
            f"ReducedGradient({name}, shape={tuple(self.shape)}, dtype={self.dtype}, here=[{span.start}, {span.stop}))"
        )

    def __format__(self, spec: str) -> str:
        """The text that `repr` gives."""
        return format(repr(self), spec)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let queries of shape, dtype and the like, and functions that end in operators, go on to
        the dispatcher; functions that read memory raise.
        """
        name = getattr(func, "__name__", "")
        if func == _SET_DATA and _is_itself(*args):
            return None  # Module.to of the device where the model is
        if func in _HIDDEN or not (name in _ASKED or name == "__get__" or _has_operator(func, name)):
            raise undefined(name or func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run the handler of the table below; an operator without one raises."""
        handler = _HANDLERS.get(func)
        if handler is None:
            raise undefined(func, args, kwargs)
        return handler(*args, **(kwargs or {}))


def take_off(parameter: Tensor) -> None:
    """Leave on the parameter what autograd alone would have left there: a gradient of this rank,
    or none.
    """
    if isinstance(parameter.grad, ReducedGradient):
        parameter.grad = parameter.grad.part.local


# methods of a tensor that have no operator, or none that reads elements
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
_ASKED |= {"_is_view", "untyped_storage"}  # of a compiler; the storage has no memory
_ASKED |= {"requires_grad_", "retain_grad", "register_hook", "__imul__", "__iadd__", "__isub__", "__itruediv__"}
_HIDDEN = {Tensor.__cuda_array_interface__.__get__}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def _is_itself(gradient: Any, data: Any) -> bool:
    """True for the same part of the same gradient, as `to` and `detach` return it."""
    return isinstance(data, ReducedGradient) and data.part is gradient.part and data.dtype is gradient.dtype


def _has_operator(func: Any, name: str) -> bool:
    """True if the dispatcher will be asked, and can refuse."""
    written_with_operators = getattr(func, "__module__", "") in ("torch.functional", "torch.nn.functional")
    # modes of the dispatcher call overloads
    is_operator = isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    return is_operator or written_with_operators or (not name.startswith("__") and hasattr(torch.ops.aten, name))


def undefined(what: Any, args: Any, kwargs: Any) -> RuntimeError:
    """The error for what a reduced gradient cannot do; it names the calls that can."""
    found = torch.utils._pytree.tree_leaves((args, kwargs))
    of = next((f" of {leaf.part.name}" for leaf in found if isinstance(leaf, ReducedGradient)), "")
    return RuntimeError(
        f"{what} is not defined on the reduced gradient{of}, of which each rank holds a part: clip with optimizer.clip_grad_norm_ "
        "or torch.nn.utils.clip_grad_norm_, which give the norm; p.grad.full_tensor() on all ranks gives the values"
    )


def define(op: Any, handler: Callable[..., Any]) -> None:
    """Register what an operator does when a ReducedGradient is among its arguments."""
    _HANDLERS[op] = handler


def defined() -> frozenset[Any]:
    """The operators that do not raise."""
    return frozenset(_HANDLERS)
