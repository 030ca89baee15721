"""DelayedShards: scales and amax histories of the delayed-scaling weights of an amax group, in few tensors."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class DelayedShards:
    """`states` are those of `Master.delayed_on`; from now on they are views of arenas on `device`, with the values they had."""

    def __init__(self, states: Sequence[dict[str, Tensor]], device: torch.device) -> None:
        self._scale, self._cast_scale = (torch.empty(len(states), device=device) for _ in range(2))
        lengths = [state["amax_history"].numel() for state in states]
        past = torch.empty(sum(lengths), device=device)
        self.arenas = (self._scale, self._cast_scale, past) if states else ()  # all that delayed scaling remembers
        histories = past.split(lengths) if states else ()
        for index, (state, history) in enumerate(zip(states, histories, strict=True)):
            scale, cast_scale = self._scale[index : index + 1], self._cast_scale[index : index + 1]
            for name, view in (("scale", scale), ("cast_scale", cast_scale), ("amax_history", history)):
                state[name] = view.copy_(state[name])

    @contextlib.contextmanager
    def cast(self, repeat: bool) -> Iterator[None]:
        """Within, a cast by the scales of now, which become those of the last cast; with `repeat` by those of the last one."""
        if repeat:
            kept = self._scale.clone()
            self._scale.copy_(self._cast_scale)
            yield
            self._scale.copy_(kept)
        else:
            self._cast_scale.copy_(self._scale)
            yield
