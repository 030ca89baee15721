"""NotedBytes: which bytes of a bucket's tensors casts have noted as changed, so that no copy of
them is kept.

Stored tensors are views of the weights wherever their layout allows. A view of codes whose casts
note what they change (`zerocast/cast/change_notes.py`) is found by its address; of all others the
`Sender` keeps the bytes. Each rank knows what it casts itself: ranks tell each other which bytes of
a bucket those are, and share the others equally.
"""

import bisect
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from zerocast.cast.change_notes import ChangeNotes
from zerocast.distributed.group import Group
from zerocast.formats.layout import Span, round_up


@runtime_checkable
class NotesChanges(Protocol):
    """An owner of masters whose casts can note what they change."""

    def note_changes(self) -> ChangeNotes:
        """Let casts note what they change from now on, for the caller alone."""
        ...

    def forget_changes(self, notes: ChangeNotes) -> None:
        """Let casts note nothing any more, unless somebody else has asked since."""
        ...


class NotedBytes:
    """What the casts of some owners of masters note. ValueError for owners whose casts cannot."""

    def __init__(self, owners: Sequence[Any]) -> None:
        other = [type(owner).__name__ for owner in owners if not isinstance(owner, NotesChanges)]
        if other or not owners:
            raise ValueError(
                f"{', '.join(other) or 'nobody'} casts these weights, and only ZeroAdamW, ZeroMuon and a CastPlan can note what "
                "a cast changes: under FSDP2 codes are cast as they are gathered, and hosts move their buffers; leave "
                "note_changes=False"
            )
        self._owners: list[NotesChanges] = list(owners)
        self._notes: list[ChangeNotes] = []
        try:
            for owner in self._owners:
                self._notes.append(owner.note_changes())
        except ValueError:
            self.close()
            raise

    @property
    def ended(self) -> bool:
        """True once casts note nothing here any more: by `close`, or since somebody else asked."""
        return any(notes.ended for notes in self._notes)

    def close(self) -> None:
        """Let casts note nothing any more."""
        for owner, notes in zip(self._owners, self._notes, strict=False):
            owner.forget_changes(notes)

    def forget(self) -> None:
        """From now on note what changes after this."""
        for notes in self._notes:
            notes.forget()

    def views(self, tensors: Sequence[Tensor]) -> "list[NotedView]":
        """The noted views among tensors laid end to end."""
        weights = sorted(
            (data.data_ptr(), data.nbytes, position, index, owned.start, owned.stop)
            for position, notes in enumerate(self._notes)
            for index, (data, owned) in notes.noted().items()
        )
        starts = [start for start, *_ in weights]
        views, offset = [], 0
        for tensor in tensors:
            at = bisect.bisect_right(starts, tensor.data_ptr()) - 1
            if at >= 0 and tensor.nbytes:
                start, nbytes, position, index, *owned = weights[at]
                first = tensor.data_ptr() - start
                if first + tensor.nbytes <= nbytes:
                    place = Span(offset, offset + tensor.nbytes)
                    views.append(NotedView(self._notes[position], index, place, first, Span(*owned)))
            offset += tensor.nbytes
        return views


class NotedView:
    """A tensor of a bucket that lies at `place` there, and from byte `first` on in a weight. Of its
    bytes this rank has cast `own`, in the bucket, out of `owned`, in the weight.
    """

    def __init__(self, notes: ChangeNotes, index: int, place: Span, first: int, owned: Span) -> None:
        self._notes, self._index, self._shift = notes, index, place.start - first
        self.place = place
        self.own = Span(owned.start + self._shift, owned.stop + self._shift).intersect(place)

    def changed(self) -> Tensor:
        """Which of the bytes of `own` have changed, bool."""
        return self._notes.changed(self._index, Span(self.own.start - self._shift, self.own.stop - self._shift))


class Division:
    """Who reports which bytes of a bucket of `nbytes`. Collective to make where casts make `notes`.

    Attributes:
        parts: by rank, the bytes that it reports: those that its casts note, then its part of those
            that are compared. Together they are the bucket.
        compared: the bytes that this rank compares.
    """

    def __init__(self, views: Sequence[NotedView], nbytes: int, group: Group, notes: bool) -> None:
        places = {view.place.start: [view.own.start, view.own.stop] for view in views}
        found = (
            group.all_gather_object(places, "who casts which bytes")
            if notes and group.size > 1
            else [places] * group.size
        )
        self._views = [view for view in views if all(view.place.start in of_rank for of_rank in found)]
        noted = [
            [Span(*of_rank[view.place.start]) for view in self._views if _numel(of_rank[view.place.start])]
            for of_rank in found
        ]
        if sum(span.numel for spans in noted for span in spans) != sum(view.place.numel for view in self._views):
            raise ValueError(
                f"the {group.size} ranks of this Sender do not cast all bytes of these weights, so they cannot say which have "
                "changed: give it the group that shares the masters, or leave note_changes=False"
            )
        compared = list(_equal_parts(self._others(nbytes), group.size))
        self.compared = compared[group.rank]
        self.parts = [[*of_rank, *part] for of_rank, part in zip(noted, compared, strict=True)]

    def changed(self, device: torch.device) -> Tensor:
        """Which of the noted bytes of this rank have changed, bool."""
        found = [view.changed() for view in self._views if view.own.numel]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.bool, device=device)

    def _others(self, nbytes: int) -> list[Span]:
        found, end = [], 0
        for view in self._views:
            if end < view.place.start:
                found.append(Span(end, view.place.start))
            end = view.place.stop
        return [*found, Span(end, nbytes)] if end < nbytes else found


def _numel(ends: Sequence[int]) -> int:
    return ends[1] - ends[0]


def _equal_parts(spans: Sequence[Span], ranks: int) -> Iterator[list[Span]]:
    """Spans laid end to end, cut into equal parts of whole words of 8 bytes, one a rank."""
    total = sum(span.numel for span in spans)
    step = round_up(-(-total // ranks), 8)
    for rank in range(ranks):
        part, found, start = Span(min(rank * step, total), min((rank + 1) * step, total)), [], 0
        for span in spans:
            common = Span(start, start + span.numel).intersect(part)
            if common.numel:
                found.append(Span(span.start + common.start - start, span.start + common.stop - start))
            start += span.numel
        yield found
