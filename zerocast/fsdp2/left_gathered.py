"""LeftGathered: what a forward pass left gathered, when masters may have been written to before the next one.

No gather comes by which a rank could say so. So where something is left gathered, which is so on all ranks or on none, they say it
before the forward pass of the prepared model: if all wrote to a weight, all gather anew; if only some did, all of them raise.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zerocast.fsdp2.amax_group import Reduction
from zerocast.fsdp2.gathers import Gathers
from zerocast.fsdp2.headers import UNREAD, Gather, Headers
from zerocast.fsdp2.held import Held
from zerocast.fsdp2.master import Master
from zerocast.fsdp2.shard_weight import EMPTY, WRITTEN


class Gathering(Protocol):
    """The casts of a model."""

    generation: int
    gathers: Gathers
    headers: Headers

    def check_sharded(self) -> None:
        """RuntimeError unless FSDP2 manages all weights."""

    def by_reduction(self) -> Sequence[tuple[Reduction, list[Master]]]:
        """The weights, by those who share their amaxes."""


class Said:
    """What all ranks said of these weights."""

    def __init__(self, masters: Sequence[Master], reduction: Reduction, generation: int) -> None:
        self._masters, self._world = masters, reduction.group.size
        self._here = [master.says for master in masters]
        here = torch.tensor([(said, generation) for said in self._here], dtype=torch.int32)
        if reduction.device == "cuda":
            here = here.pin_memory().to("cuda", non_blocking=True)
        self.headers = torch.empty((self._world, *here.shape), dtype=here.dtype, device=here.device)
        reduction.group.all_gather_into(
            self.headers.view(-1), here.view(-1), what="writes to weights that are gathered"
        )

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
    """`before` and `after` are forward hooks of a prepared model."""

    def __init__(self, casts: Gathering | None) -> None:
        self._casts = None if casts is None else weakref.ref(casts)
        self._left: list[tuple[Held, int]] = []  # a weight of each group, and how often it had been gathered
        self._outside_of_graphs = torch.compiler.disable(self._run)  # here, since it imports the compiler

    def __reduce__(self) -> Any:
        return LeftGathered, (None,)  # parameters pickle as plain ones

    def before(self, module: nn.Module, inputs: Any) -> None:
        """Ask, where it is needed; RuntimeError on all ranks where they disagree, on a GPU one of the next times."""
        self._outside_of_graphs(self._ask)

    def after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Note what is left gathered."""
        self._outside_of_graphs(self._note)

    def _run(self, step: Callable[[Gathering], None]) -> None:
        casts = None if self._casts is None else self._casts()
        if casts is not None:
            step(casts)

    def _note(self, casts: Gathering) -> None:
        self._left = [(held, held.master.received) for held in casts.gathers.gathered()]

    def _ask(self, casts: Gathering) -> None:
        casts.check_sharded()
        left = [held for held, count in self._left if held.is_gathered and held.master.received == count]
        if not left:
            return
        casts.headers.check(leave=UNREAD)
        everywhere = False
        for reduction, masters in casts.by_reduction():
            said = Said(masters, reduction, casts.generation)
            if said.headers.is_cuda:
                Gather(casts.headers, [said]).note(said, said.headers.view(-1, 2))
            else:
                said.check(said.headers)
            everywhere = said.everywhere() or everywhere
            for master in masters:
                master.freshness.finish = None
        if everywhere:
            for held in left:
                held.gather_again()
