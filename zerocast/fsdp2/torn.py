"""What a step or a load has left half written: models, optimizers and casts, each of which says so until a state is loaded.

A step of FusedAdamW and a load write masters and moments one after another. What raises in the middle of that (out of memory, a
file that breaks off) leaves them of different steps, on this rank perhaps alone. So the next gather happens as ever, and its
headers tell all ranks (`gather_status.py`).
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from zerocast.weight.write_guard import Wholeness

RELOAD = (
    "masters, moments and weights may be of different steps; load a checkpoint (zerocast.optim.load, Checkpoints.load or "
    "load_state_dict) through zerocast.fsdp2.TrainingState, or end the run if ranks have died"
)
_of: "weakref.WeakKeyDictionary[Any, Wholeness]" = weakref.WeakKeyDictionary()


def wholeness(owner: Any) -> Wholeness:
    """That of a model, an optimizer of any class, or the casts of a model."""
    if owner not in _of:
        _of[owner] = Wholeness()
    return _of[owner]


def check_whole(owners: Iterable[Any]) -> None:
    """RuntimeError while any of them is torn."""
    for owner in owners:
        if owner in _of:
            _of[owner].check_whole()


@contextlib.contextmanager
def writing(what: str, owners: Iterable[Any]) -> Iterator[None]:
    """Within, `what` writes what belongs to all of these."""
    with contextlib.ExitStack() as stack:
        for owner in owners:
            stack.enter_context(wholeness(owner).writing(what, RELOAD))
        yield


@contextlib.contextmanager
def overlooked(owners: Iterable[Any]) -> Iterator[None]:
    """Within, they are shown all the same, to a reader that will overwrite them."""
    with contextlib.ExitStack() as stack:
        for owner in owners:
            stack.enter_context(wholeness(owner).overlooked())
        yield
