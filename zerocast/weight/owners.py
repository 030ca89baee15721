"""Owners of weights: the record of which optimizer or plan trains which weights.

An owner takes a `Claim` on the weights that it writes. Claims on the same elements exclude each
other.

A quantized weight that gets a gradient needs an owner. Without one it never changes, and this goes
unnoticed, since the loss still falls as the other parameters learn. A weight that is read, requires
a gradient and has no owner is therefore remembered until the next step of any torch optimizer. If
it has a gradient by then, that is an error. An owned weight costs one lookup per read, and nothing
per step.

The step raises that error, unless ranks share masters: only one rank may have read such a weight,
and the others would wait for it in their next cast. So that cast raises it, on all ranks.

An optimizer is given parameters only. From the record of models with quantized weights it learns
the parameters and buffers of its model that it was not given.
"""

import functools
import gc
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from zerocast.formats.layout import Span
from zerocast.weight import unsupported
from zerocast.weight.validity import any_shared

logger = logging.getLogger(__name__)

# Pairs of the `WeightState` of a weight and the spans of its elements that an owner writes.
Held = Sequence[tuple[Any, Sequence[Span]]]

# Weak, so that a claim ends when its owner is deleted without a call of `end`.
_claims: "weakref.WeakSet[Claim]" = weakref.WeakSet()
_numbers = itertools.count()
# id of a parameter -> number of the owner that trains it. A set of ids would not do: Python reuses
# ids, so the finalizer of an old owner could remove the parameter of a new one.
_trained: dict[int, int] = {}
# id -> weights without an owner that were read since the last optimizer step.
_read: dict[int, "weakref.ref[Any]"] = {}
# The error of a step that the next cast raises on all ranks, or nothing.
_deferred_errors: list[RuntimeError] = []
# The texts of such errors that were logged, since no cast had raised them by the next step.
_logged: set[str] = set()
# The models that hold quantized weights, in the order in which they were quantized. Ranks quantize
# in the same order, so a walk over this dict visits models in the same order on all ranks.
_models: "weakref.WeakKeyDictionary[nn.Module, None]" = weakref.WeakKeyDictionary()
# The hook of torch's optimizers that raises for weights that have a gradient and no owner. Empty
# until the first weight without an owner is read.
_hooks: list[RemovableHandle] = []
# The hook of torch's optimizers that raises if they would step a QuantizedWeight itself and not its
# master. Empty until the first QuantizedWeight is made.
_refusals: list[RemovableHandle] = []


class Claim:
    """One owner's claim on weights. It lasts until `end`, or until this object is deleted.

    Args:
        who: the owner's name, for messages.
        held: the weights' states, with the spans of elements that the owner writes.
        parameters: the parameters that the owner trains through hooks on these very objects. Other
            tensors over the same storage are not trained.
        by: the object that takes the claim, such as a plan that is attached to two optimizers.
            Claims by the same object may overlap. Not kept alive.
    """

    def __init__(self, who: str, held: Held, parameters: Iterable[Tensor] = (), by: object = None) -> None:
        self.who = who
        self.ended = False
        self._by: Callable[[], object] = (lambda: None) if by is None else weakref.ref(by)
        # The values keep states and parameters alive, so that their ids are not reused.
        self._held = {id(state): (state, spans) for state, spans in held}
        parameters = list(parameters)
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._forget = train(self, parameters)
        _claims.add(self)

    def end(self) -> None:
        """Give the weights up to another owner."""
        self.ended = True
        self._forget()
        _claims.discard(self)

    def overlaps(self, held: Held, parameters: Iterable[Tensor] = ()) -> bool:
        """Return True if any of these elements or parameters are in this claim."""
        if any(id(parameter) in self._parameters for parameter in parameters):
            return True
        return any(
            ours.intersect(theirs).numel > 0
            for state, spans in held
            for ours in self._held.get(id(state), (None, ()))[1]
            for theirs in spans
        )

    def is_by(self, owner: object) -> bool:
        """Return True if this owner has taken the claim."""
        return self._by() is owner


def train(owner: object, parameters: Iterable[Tensor]) -> "weakref.finalize[Any, Any]":
    """Remember that `owner` trains these parameter objects, until the owner is deleted or the
    returned finalizer is called.
    """
    number = next(_numbers)
    # The finalizer must not keep the parameters alive, so it is given their ids.
    ids = [id(parameter) for parameter in parameters]
    _trained.update(dict.fromkeys(ids, number))
    forget = weakref.finalize(owner, _forget, ids, number)
    # At exit there is nothing left to protect, and this module may be torn down already.
    forget.atexit = False
    return forget


def overlapping(held: Held, parameters: Sequence[Tensor] = ()) -> list[Claim]:
    """Return the claims that have any of these elements or parameters."""
    return [claim for claim in list(_claims) if claim.overlaps(held, parameters)]


def find_conflict(
    held: Held, is_overridable: Callable[[Claim], bool], parameters: Sequence[Tensor] = ()
) -> Claim | None:
    """Return a claim on any of these elements or parameters that is not overridable, or None."""

    def conflicts() -> list[Claim]:
        return [claim for claim in overlapping(held, parameters) if not is_overridable(claim)]

    if conflicts():
        # An optimizer and its hooks refer to each other, so one that the user deleted may still
        # wait for the cycle collector. It is not a conflict.
        gc.collect()
    return next(iter(conflicts()), None)


def check_unclaimed(held: Held, is_overridable: Callable[[Claim], bool]) -> None:
    """Raise ValueError, on this rank only, if an owner that is not overridable writes any of these
    elements.
    """
    other = find_conflict(held, is_overridable)
    if other is not None:
        raise ValueError(
            f"{other.who} writes weights of this CastPlan, and a weight has one owner: call remove() of its handle, or delete it"
        )


def refuse_steps(kind: type[Tensor]) -> None:
    """Make torch's optimizers raise on parameters of this class.

    The hook is global to the process and is registered once, when the first weight is made. A
    process without weights has no hook.
    """
    if not _refusals:
        _refusals.append(register_optimizer_step_pre_hook(functools.partial(_check_parameters, kind)))


def _check_parameters(kind: type[Any], optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or not type(optimizer).step.__module__.startswith("torch.optim"):
        return
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            # Optimizers of torch skip parameters without a gradient, so these do no harm. But where
            # ranks share masters another rank may have a gradient, and the next cast waits for it.
            if isinstance(parameter, kind) and (
                parameter.grad is not None or (_lacks_owner(parameter) and any_shared())
            ):
                raise RuntimeError(
                    f"{type(optimizer).__name__} cannot step parameter {index} of group {number}, a {parameter.format} "
                    f"QuantizedWeight of shape {tuple(parameter.shape)}: {unsupported.OPTIMIZER}"
                )


def note_read(weight: Any) -> None:
    """Remember a weight that is read, requires a gradient and has no owner."""
    # Every product asks, so the most frequent answers come first.
    if weight.state.validity.has_masters or id(weight) in _trained:
        return
    # While a compiler traces, the buffers are fake tensors, and the weight is gone before any step.
    if _lacks_owner(weight) and type(weight.state.rowwise_data) is Tensor:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _read[id(weight)] = weakref.ref(weight)


def forget_all() -> None:
    """Drop the record of all weights that were read so far. For tests, which share a process."""
    _read.clear()
    _deferred_errors.clear()
    _logged.clear()


def forget_read(weight: Any) -> None:
    """Drop the weak reference to a weight that is about to be moved. `torch.utils.swap_tensors`
    raises on a tensor that has weak references.
    """
    _read.pop(id(weight), None)


def check_gradients() -> None:
    """Raise RuntimeError if a quantized weight without an owner has received a gradient since the
    last step. If ranks share masters, store the error instead, and their next cast raises it on all
    ranks. Called before a step.
    """
    if torch.compiler.is_compiling() or not _read:
        return
    orphans = _orphans()
    if orphans is not None and not any_shared():
        raise orphans
    if orphans is not None:
        _deferred_errors[:] = [orphans]


def _before_step(*_: Any) -> None:
    """Call `check_gradients`, and log errors that an earlier step stored and that no cast has
    raised.
    """
    for text in map(str, _deferred_errors):
        if text not in _logged:
            logger.warning("found before an earlier step, and not yet raised on other ranks by a cast: %s", text)
        _logged.add(text)
    check_gradients()


def pop_deferred_error() -> RuntimeError | None:
    """Return the error that a step has stored for the next cast, which raises it on all ranks."""
    return _deferred_errors.pop() if _deferred_errors else None


def _orphans() -> RuntimeError | None:
    """Return the error of weights without an owner that have received gradients, among those that
    `note_read` has recorded since the last call.
    """
    references = list(_read.values())
    alive = [weight for weight in (reference() for reference in references) if weight is not None]
    # Cleared also after an error. A traceback can keep a discarded model alive, and then every
    # later step of the process would raise for it.
    _read.clear()
    # Without this each attribute of a weight takes microseconds, through `__torch_function__`.
    with torch._C.DisableTorchFunctionSubclass():
        orphans = [w for w in alive if w.is_leaf and w.grad is not None and _lacks_owner(w)]
    if not orphans:
        return None
    return RuntimeError(
        f"{len(orphans)} quantized weights got gradients and no optimizer trains them, the first is {orphans[0]!r}: build the "
        "optimizer after quantize_, and again after load_state_dict(assign=True) or where a parameter was replaced "
        "(ZeroAdamW, or a CastPlan over masters of your own); call requires_grad_(False) on weights that are not trained"
    )


def _lacks_owner(weight: Any) -> bool:
    """Return True if a quantized weight requires a gradient and nothing trains it."""
    return bool(weight.requires_grad) and not is_trained(weight) and not weight.state.validity.has_masters


def is_trained(parameter: Tensor) -> bool:
    """Return True if an owner trains this object."""
    return id(parameter) in _trained


def remember_model(model: nn.Module) -> None:
    """Remember a model with quantized weights as long as it exists."""
    _models[model] = None


def models_of(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """Return the remembered models that have any of these parameters."""
    ids = set(map(id, parameters))
    return [model for model in list(_models) if any(id(parameter) in ids for parameter in model.parameters())]


def _forget(ids: Sequence[int], number: int) -> None:
    for parameter_id in ids:
        # A newer owner may have taken over this parameter, or another object this id.
        if _trained.get(parameter_id) == number:
            del _trained[parameter_id]
