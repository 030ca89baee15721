"""DelayedScaling: scales and amax histories of all delayed-scaling weights, with what is needed to make the live bytes again."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from zerocast.cast.flat_buffer import into_arena
from zerocast.distributed.group import Group
from zerocast.weight import QuantizedWeight


class DelayedScaling:
    """The state of delayed scaling, in arenas; `views[name]` are the f32 tensors of one weight.

    A weight has the `scale` of its next cast and the `amax_history`; `cast_scale` is the scale that its live bytes were cast with.
    Rank 0's state becomes everyone's.
    """

    def __init__(self, weights: Mapping[str, QuantizedWeight], group: Group) -> None:
        delayed = {name: weight for name, weight in weights.items() if weight.scale is not None}
        self._scale = into_arena(list(delayed.values()), "scale")
        self._state = self._scale + into_arena(list(delayed.values()), "amax_history")
        for arena in self._state:
            group.broadcast(arena, "delayed scales")
        self._cast_scale = [arena.clone() for arena in self._scale]
        self.views: dict[str, dict[str, Tensor]] = {}
        for name, weight in delayed.items():
            scale, history = weight.scale, weight.amax_history
            assert scale is not None and history is not None
            cast_scale = self._cast_scale[0][scale.storage_offset() :][:1]
            self.views[name] = {"scale": scale, "amax_history": history, "cast_scale": cast_scale}
        self._lost: set[str] = set()

    def advance(self, skip: Tensor) -> None:
        """A cast follows, with the scales as they are now, unless `skip` holds True."""
        for kept, scale in zip(self._cast_scale, self._scale, strict=True):
            kept.copy_(torch.where(skip, kept, scale))

    def lose(self, name: str) -> None:
        """The state of this weight is not known: the next `replay` seeds it from the amax of its master."""
        views = self.views[name]
        views["cast_scale"].fill_(1.0)
        views["amax_history"].zero_()
        self._lost.add(name)

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Within, a cast repeats the last one; afterwards the state is what it was, but for weights whose state was lost."""
        saved = [arena.clone() for arena in self._state]
        for scale, kept in zip(self._scale, self._cast_scale, strict=True):
            scale.copy_(kept)
        yield
        seeds = [(self.views[name], {key: t.clone() for key, t in self.views[name].items()}) for name in self._lost]
        for arena, value in zip(self._state, saved, strict=True):
            arena.copy_(value)
        for views, seed in seeds:
            views["amax_history"].copy_(seed["amax_history"])
            views["scale"].copy_(seed["scale"])
            views["cast_scale"].copy_(seed["scale"])

    def found(self) -> bool:
        """Whether `replay` has just seeded a lost scale, so that its weight must be cast again with it."""
        any_lost = bool(self._lost)
        self._lost.clear()
        return any_lost
