"""DelayedState: the delayed scaling of a model's masters: saved, loaded, begun, and put back where a cast breaks off."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from zerocast.fsdp2.amax_reduction import CastGroup
from zerocast.fsdp2.weight import FSDPWeight


class DelayedState:
    """Of those among the masters that have any, once they are bound."""

    def __init__(self) -> None:
        self._masters: list[FSDPWeight] = []
        self._groups: Sequence[CastGroup] = ()
        self._seeded: frozenset[str] = frozenset()  # those whose scale comes from an amax

    def bind(self, masters: Sequence[FSDPWeight], groups: Sequence[CastGroup]) -> None:
        """These are cast by these groups from now on."""
        self._masters, self._groups = [master for master in masters if master.delayed], groups

    def by_name(self) -> dict[str, dict[str, Tensor]]:
        """What is in use."""
        return {master.name: master.delayed for master in self._masters}

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from a saved state, which may be what is in use; what it lacks is found anew, with a warning."""
        seeded = []
        for master in self._masters:
            saved = state.get(master.name, {})
            if "scale" in saved and "amax_history" in saved:
                for name, tensor in master.delayed.items():
                    tensor.copy_(saved.get(name, saved["scale"]))
                seeded.append(master.name)
            else:
                warnings.warn(
                    f"no state of delayed scaling for {master.name}: it starts anew from its amax", stacklevel=4
                )
        self._seeded = frozenset(seeded)

    def seed(self) -> None:
        """Give scales that nobody has set the amax of the present master: a cast of its own, once."""
        if len(self._seeded) == len(self._masters):
            return
        unseeded = [master for master in self._masters if master.name not in self._seeded]
        seeded = [master.delayed for master in self._masters if master.name in self._seeded]
        kept = [(tensor, tensor.clone()) for state in seeded for tensor in state.values()]
        with self.or_as_before():
            for master in unseeded:
                master.delayed["amax_history"].zero_()
            for group in self._groups:
                group.cast(repeat=False)
            for tensor, value in kept:
                tensor.copy_(value)
            for master in unseeded:
                master.delayed["cast_scale"].copy_(master.delayed["scale"])
        self._seeded = frozenset(self.by_name())

    @contextlib.contextmanager
    def or_as_before(self) -> Iterator[None]:
        """Within, a cast moves on; what raises puts all back, and the next gather casts as if this had never begun."""
        state = [tensor for group in self._groups for tensor in group.delayed.arenas]
        kept = [tensor.clone() for tensor in state]
        try:
            yield
        except BaseException:
            for tensor, value in zip(state, kept, strict=True):
                tensor.copy_(value)
            raise
