"""LeftGathered: what a forward pass left gathered, when masters may have been written to before the next one.

No gather comes by which a rank could say so. So where something is left gathered, which is so on all ranks or on none, they say it
before the forward pass of the prepared model: if all wrote to a weight, all gather anew; if only some did, all of them raise.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zerocast.fsdp2.amax_group import Reduction
from zerocast.fsdp2.headers import UNREAD, Headers
from zerocast.fsdp2.master import Master
from zerocast.fsdp2.shard_weight import EMPTY, WRITTEN


class Gathering(Protocol):
    """The casts of a model."""

    generation: int
    headers: Headers

    @property
    def leaves_gathered(self) -> bool:
        """Whether anything is gathered now."""

    def by_reduction(self) -> Sequence[tuple[Reduction, list[Master]]]:
        """The weights, by those who share their amaxes."""

    def free_gathered(self) -> None:
        """Let the forward pass gather."""


class Said:
    """What all ranks said of these weights."""

    def __init__(self, masters: Sequence[Master], reduction: Reduction, generation: int) -> None:
        self._masters, self._world = masters, reduction.group.size
        self._here = [master.says for master in masters]
        here = torch.tensor([(said, generation) for said in self._here], dtype=torch.int32)
        if reduction.device == "cuda":
            here = here.pin_memory().to("cuda", non_blocking=True)
        self.headers = torch.empty((self._world, *here.shape), dtype=here.dtype, device=here.device)
        reduction.group.all_gather_into(self.headers.view(-1), here.view(-1))

    def check(self, headers: Tensor) -> None:
        """RuntimeError where ranks disagree about a weight."""
        for master, by_rank in zip(self._masters, headers.view(self._world, -1, 2).unbind(1), strict=True):
            master.check(by_rank)

    def everywhere(self) -> bool:
        """Whether some weight was written to on all ranks that have rows of it. Waits for a GPU only if it may have been."""
        mine = [index for index, said in enumerate(self._here) if said in (WRITTEN, EMPTY)]
        return bool(mine) and any(
            all(said in (WRITTEN, EMPTY) for said in by_rank) for by_rank in self.headers[:, mine, 0].t().tolist()
        )


class LeftGathered:
    """The forward pre-hook of a prepared model, which comes before FSDP2's."""

    def __init__(self, casts: Gathering | None) -> None:
        self._casts = None if casts is None else weakref.ref(casts)
        self._outside_of_graphs = torch.compiler.disable(self._ask)  # here, since it imports the compiler

    def __reduce__(self) -> Any:
        return LeftGathered, (None,)  # parameters pickle as plain ones

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Ask, where it is needed; RuntimeError on all ranks where they disagree, on a GPU one of the next times."""
        self._outside_of_graphs()

    def _ask(self) -> None:
        casts = None if self._casts is None else self._casts()
        if casts is None or not casts.leaves_gathered:
            return
        casts.headers.check(leave=UNREAD)
        everywhere = False
        for reduction, masters in casts.by_reduction():
            said = Said(masters, reduction, casts.generation)
            if said.headers.is_cuda:
                casts.headers.note(said, said.headers)
            else:
                said.check(said.headers)
            everywhere = said.everywhere() or everywhere
            for master in masters:
                master.freshness.finish = None
        if everywhere:
            casts.free_gathered()
