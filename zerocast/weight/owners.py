"""Owners: who trains which weights.

An owner takes a `Claim` on the weights that it writes; claims on the same elements exclude each
other. A quantized weight that gets a gradient must be trained by somebody, or it never changes
while the loss still falls through what is beside it. A weight that is read, requires a gradient and
has no owner is therefore remembered until the next step of any torch optimizer. If it has got a
gradient by then, that step raises. Owned weights cost one lookup a read, and nothing a step.
"""

import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from zerocast.formats.layout import Span

# the states of weights, with the elements that are written
Held = Sequence[tuple[Any, Sequence[Span]]]

_claims: "weakref.WeakSet[Claim]" = weakref.WeakSet()
_numbers = itertools.count()
# the id of each parameter that an owner trains, and the number of that owner
_trained: dict[int, int] = {}
# weights without an owner that were read since the last step, by id
_read: dict[int, "weakref.ref[Any]"] = {}
_hooks: list[RemovableHandle] = []  # registered when the first such weight is read


class Claim:
    """One owner's hold on weights. It lasts until `end`, or until nobody keeps this object.

    Args:
        who: the owner, in messages.
        held: the weights' states, with the elements of each.
        parameters: what the owner trains through hooks: these objects, not others over the same
            storage.
        by: the object behind the claim, such as a plan attached to two optimizers; claims by one
            object may overlap.
    """

    def __init__(self, who: str, held: Held, parameters: Iterable[Tensor] = (), by: object = None) -> None:
        self.who, self.ended = who, False
        self._by: Callable[[], object] = (lambda: None) if by is None else weakref.ref(by)
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
        """True if any of these elements or parameters are in this claim."""
        if any(id(parameter) in self._parameters for parameter in parameters):
            return True
        return any(
            ours.intersect(theirs).numel > 0
            for state, spans in held
            for ours in self._held.get(id(state), (None, ()))[1]
            for theirs in spans
        )

    def is_by(self, owner: object) -> bool:
        """True if this owner has taken the claim."""
        return self._by() is owner


def train(owner: object, parameters: Iterable[Tensor]) -> "weakref.finalize[Any, Any]":
    """Remember that `owner` trains these objects, whatever storage they have, until it is gone
    or the result is called.
    """
    number, places = next(_numbers), [id(parameter) for parameter in parameters]
    _trained.update(dict.fromkeys(places, number))
    forget = weakref.finalize(owner, _forget, places, number)
    forget.atexit = False
    return forget


def overlapping(held: Held, parameters: Sequence[Tensor] = ()) -> list[Claim]:
    """The claims on any of this."""
    return [claim for claim in list(_claims) if claim.overlaps(held, parameters)]


def find_conflict(held: Held, gives_way: Callable[[Claim], bool], parameters: Sequence[Tensor] = ()) -> Claim | None:
    """A claim on any of this that does not give way; an owner that nobody keeps is collected
    first.
    """

    def found() -> list[Claim]:
        return [claim for claim in overlapping(held, parameters) if not gives_way(claim)]

    if found():
        gc.collect()
    return next(iter(found()), None)


def check_unclaimed(held: Held, gives_way: Callable[[Claim], bool]) -> None:
    """ValueError, on this rank alone, while an owner that does not give way writes any of this."""
    other = find_conflict(held, gives_way)
    if other is not None:
        raise ValueError(
            f"{other.who} writes weights of this CastPlan: a weight has one owner, so remove() the handle of that, or del it"
        )


def note_read(weight: Any) -> None:
    """Remember a weight that is read and has no owner, if it requires a gradient; not what a
    compiler traces with.
    """
    if not _is_owned(weight) and weight.requires_grad and type(weight.state.rowwise_data) is Tensor:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(lambda *_: check_gradients()))
        _read[id(weight)] = weakref.ref(weight)


def forget_all() -> None:
    """Remember no weight that was read so far."""
    _read.clear()


def forget_read(weight: Any) -> None:
    """Keep no reference to a weight that is about to be moved: `torch.utils.swap_tensors`
    refuses those that have any.
    """
    _read.pop(id(weight), None)


def check_gradients() -> None:
    """RuntimeError if a quantized weight without an owner has got a gradient since the last step.

    Looks at weights without an owner that were read since then, and at nothing of any other.
    """
    if torch.compiler.is_compiling() or not _read:
        return
    alive = [weight for weight in (reference() for reference in list(_read.values())) if weight is not None]
    _read.clear()  # also if this raises: a model that was given up may live on in the traceback
    # its attributes cost microseconds each without this
    with torch._C.DisableTorchFunctionSubclass():
        orphans = [weight for weight in alive if _got_gradient(weight) and not _is_owned(weight)]
    if orphans:
        first = orphans[0]
        raise RuntimeError(
            f"{len(orphans)} quantized weights got gradients and no optimizer trains them, the first is {first!r}: build the "
            "optimizer after quantize_, and anew after load_state_dict(assign=True) or where a parameter was replaced "
            "(ZeroAdamW, or a CastPlan over masters of your own); call requires_grad_(False) on weights that are not trained"
        )


def is_trained(parameter: Tensor) -> bool:
    """True if an owner trains this object."""
    return id(parameter) in _trained


def _is_owned(weight: Any) -> bool:
    return is_trained(weight) or weight.state.validity.has_masters


def _got_gradient(weight: Any) -> bool:
    return weight.requires_grad and weight.is_leaf and weight.grad is not None


def _forget(parameters: Sequence[int], number: int) -> None:
    for parameter in parameters:
        if _trained.get(parameter) == number:
            del _trained[parameter]
