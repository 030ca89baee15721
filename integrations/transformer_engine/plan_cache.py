"""CachedPlan: the plan of a list of weights, from one call to the next.

TransformerEngine's interface is a function without state, and building a plan is collective. So
plans are cached here. A Fingerprint has the objects and addresses that a call has read, for the
next call to compare: comparing identities is cheaper than inspecting every tensor of a model at
every step.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zerocast.cast.host import CastDriver, Host
from zerocast.cast.partition import ShardData
from zerocast.distributed.group import Group
from zerocast.verification.master_views import MasterViews
from zerocast.weight.buffers import into_flat_buffer
from zerocast.weight.validity import Validity

from .entry import Entry
from .weight_view import WeightView


@functools.cache
def _reader(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads these attributes of an object and returns a tuple.

    `operator.attrgetter` returns a tuple for two names or more.
    """
    assert len(names) > 1, names
    return operator.attrgetter(*names)


class Fingerprint:
    """The tensors of a list and the values of some of their attributes.

    It has strong references to the values, so that their ids stay unique, and weak ones to the
    tensors of the list.

    Args:
        tensors: the list.
        watched: for each tensor, the names of its attributes; dotted ones are attributes of
            attributes. A tensor without names need only be the same object.
    """

    def __init__(self, tensors: Sequence[Any], watched: Sequence[tuple[str, ...]]) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._readers = [(index, _reader(names)) for index, names in enumerate(watched) if names]
        self._values = self._read(tensors)
        self._buffers = [value for value in self._values if isinstance(value, Tensor)]
        self._addresses = self._current_addresses()

    def matches(self, tensors: Sequence[Any]) -> bool:
        """Return True if these are the same tensors and objects, with all buffers at the same
        addresses.
        """
        if len(tensors) != len(self._tensors):
            return False
        if not all(map(operator.is_, tensors, [reference() for reference in self._tensors])):
            return False
        try:
            values = self._read(tensors)
        except AttributeError:
            # An attribute with a dotted name below it is None now, such as a quantizer.
            return False
        return all(map(operator.is_, values, self._values)) and self._current_addresses() == self._addresses

    def _read(self, tensors: Sequence[Any]) -> list[Any]:
        return [value for index, read in self._readers for value in read(tensors[index])]

    def _current_addresses(self) -> list[int]:
        return [buffer.data_ptr() for buffer in self._buffers]


class CachedPlan:
    """The casts of a list of weights, through their views: each call passes the masters, and the
    caller gathers. Building it is collective; every later cast is one all-reduce.

    `remember` stores the objects and addresses of a call, and `matches` compares them with the next
    call. If nothing has changed, `cast_again` casts without inspecting the tensors.
    """

    def __init__(self, entries: Sequence[Entry], group: Group) -> None:
        self._views: list[WeightView] = [entry.view for entry in entries]
        # None until a call has completed that the next one may repeat.
        self._fingerprint: Fingerprint | None = None
        self._group = group
        # The (start, numel) that this rank owns of each entry. The plan is valid for these only.
        self._owned = _owned(entries)
        # One buffer for all amaxes, so that resetting them is one launch.
        into_flat_buffer([view.weight for view in self._views if view.owns_amax], "amax")
        masters, shards = _lists(entries)
        self._driver = CastDriver(
            Host(
                owner=None,  # a later call, possibly in a different group, takes the weights over
                group=group,
                weights=[view.weight for view in self._views],
                masters=masters,
                starts=[entry.start for entry in entries],
                shard_data=shards,
                validity=Validity(advice="call quantize_master_weights after the masters change"),
                is_saved_by_autograd=False,
            )
        )
        self._addresses = _addresses(entries)

    def is_of(self, views: Sequence[WeightView], group: Group) -> bool:
        """Return True if this was built for these weights and this group."""
        is_same = len(views) == len(self._views) and group.handle is self._group.handle
        return is_same and all(given is own for given, own in zip(views, self._views, strict=True))

    def master_views(self) -> MasterViews:
        """Return the masters of the last call, with the weights that they were cast into."""
        (source,) = self._driver.master_views()
        return source

    def changed(self, entries: Sequence[Entry]) -> int | None:
        """Return the index of the first entry of which this rank owns different elements than the
        plan was built for, or None.
        """
        pairs = enumerate(zip(self._owned, _owned(entries), strict=True))
        return next((index for index, (before, now) in pairs if before != now), None)

    def remember(
        self, entries: Sequence[Entry], model_weights: Sequence[Any], masters: Sequence[Any], starts: Sequence[Any]
    ) -> None:
        """Remember the objects and addresses of a call without shards.

        Nothing is remembered with a Hybrid tensor, or one whose codes are in its transpose: their
        cast has steps that `cast_again` does not repeat.
        """
        is_repeatable = len(entries) == len(model_weights) and all(
            entry.tensor is weight and not entry.view.codes_in_transpose
            for entry, weight in zip(entries, model_weights, strict=True)
        )
        if is_repeatable:
            self._fingerprint = Fingerprint(
                model_weights, [entry.view.cast_attributes(entry.tensor) for entry in entries]
            )
            self._given = _facts(masters), list(starts)

    def matches(
        self, model_weights: Sequence[Any], masters: Sequence[Any], starts: Sequence[Any], group: Group
    ) -> bool:
        """Return True if weights, masters and group are the same as in the last call, at the same
        addresses.
        """
        if (
            self._fingerprint is None
            or group.handle is not self._group.handle
            or not self._fingerprint.matches(model_weights)
        ):
            return False
        return (_facts(masters), list(starts)) == self._given

    def parts(self, model_weights: Sequence[Any]) -> list[tuple[Any, WeightView]]:
        """Return the tensors of a call that `matches`, with their views."""
        return list(zip(model_weights, self._views, strict=True))

    def refuse(self, problem: Exception) -> None:
        """Raise the problem of this rank, on all ranks if others take part in this cast."""
        self._driver.ready(problem=problem)
        self._driver.plan.run()

    def cast_again(self) -> None:
        """Cast the current values of the masters of the last call."""
        self._driver.cast()

    def cast(self, entries: Sequence[Entry]) -> None:
        """Cast the masters of this call, which may have moved since the last one."""
        # If the cast raises, the next call must not take the fast path.
        self._fingerprint = None
        for entry in entries:
            entry.view.share(entry.tensor)
        addresses = _addresses(entries)
        if addresses != self._addresses:
            self._driver.move_masters(*_lists(entries))
            self._addresses = addresses
        self._driver.cast()
        for entry in entries:
            entry.scatter()


# The plans of lists of weights by the first weight of a list, for as long as that lives.
_plans: WeakIdKeyDictionary = WeakIdKeyDictionary()


def plans_of(model_weights: Sequence[Any]) -> list[CachedPlan]:
    """Return the plans of all lists that begin with the same weight, oldest first. A new plan is
    appended to them.
    """
    plans: list[CachedPlan] = _plans.setdefault(model_weights[0], [])
    return plans


def forget_plans(weight: Any) -> None:
    """Drop the plans of all lists that begin with this weight."""
    _plans.pop(weight, None)


def _owned(entries: Sequence[Entry]) -> list[tuple[int | None, int]]:
    return [(entry.start, 0 if entry.master is None else entry.master.numel()) for entry in entries]


def _lists(entries: Sequence[Entry]) -> tuple[list[Any], list[ShardData | None]]:
    return [entry.master for entry in entries], [entry.shard for entry in entries]


def _facts(masters: Sequence[Any]) -> tuple[list[Any], ...] | None:
    """Return the addresses, sizes and dtypes of masters, or None if one is not a tensor."""
    present = [master for master in masters if master is not None]
    if not all(isinstance(master, Tensor) for master in present):
        return None
    return (
        [master is None for master in masters],
        [master.data_ptr() for master in present],
        [master.numel() for master in present],
        [master.dtype for master in present],
        [master.is_contiguous() for master in present],
    )


def _addresses(entries: Sequence[Entry]) -> list[tuple[Any, ...]]:
    """Return the addresses of masters and shards. The plan checks new tensors if one changes."""
    return [tuple((t.data_ptr(), t.dtype) for t in _tensors(entry.shard, entry.master)) for entry in entries]


def _tensors(shard: ShardData | None, master: Any) -> list[Any]:
    tensors = () if shard is None else shard if isinstance(shard, tuple) else (shard,)
    return [*tensors, *([] if master is None else [master])]
