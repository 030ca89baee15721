"""Lineage: which checkpoint of a folder a run stands on, and which it descends from.

After a load of step 100 and a save of step 150, the steps 200 and 300 that exist already are of a
branch that was given up. Numbers of steps do not tell; so each checkpoint has an id, the number of
its save in the folder, and the ids of the checkpoints that it descends from. An automatic resume
takes the one that was saved last.

The process remembers where each optimizer stands, by its parameters: an optimizer that is built
again over the same parameters is the same run, and one over other parameters is another run.
"""

import gc
import secrets
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

MOST_RUNS = 16  # of a folder that are remembered


@dataclass(frozen=True)
class Lineage:
    """The id of a checkpoint, the number of its save in the folder, from 1, and the ids of the
    checkpoints of the folder that it descends from.
    """

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    number: int = 0
    ancestors: tuple[str, ...] = ()

    def then(self, others: Iterable["Lineage"]) -> "Lineage":
        """The lineage of the next save, in a folder that holds `others`."""
        held = {other.id: other.number for other in others}
        ancestors = tuple(one for one in (*self.ancestors, self.id) if one in held)
        return Lineage(number=1 + max(held.values(), default=0), ancestors=ancestors)


class Trains(Protocol):
    """What is asked of an optimizer."""

    @property
    def param_groups(self) -> Any:
        """The parameter groups."""

    @property
    def model(self) -> Any:
        """The model, where the optimizer knows it."""


@dataclass(frozen=True)
class Trainee:
    """Which parameters an optimizer trains, by their ids; what lives as long as they are trained;
    and what an error calls it.

    It refers to no parameter: torch moves none to which anybody has a weak reference.
    """

    parameters: frozenset[int]
    owner: "weakref.ref[Any]"
    name: str

    @staticmethod
    def of(optimizer: Trains) -> "Trainee":
        """Those of an optimizer, or of a state of one that its model outlives."""
        ids = frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        owner = optimizer if optimizer.model is None else optimizer.model
        name = f"a {type(optimizer).__name__} of {len(ids)} parameters (at {id(optimizer):#x})"
        return Trainee(ids, weakref.ref(owner), name)


@dataclass
class _Run:
    """What an optimizer trains, where it stands, and whether it has saved here."""

    trainee: Trainee
    lineage: Lineage
    has_saved: bool


class Runs:
    """The runs that have loaded from a folder, or saved into it, in this process."""

    _of_folders: ClassVar[dict[Path, "Runs"]] = {}  # for as long as the process lives

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    @classmethod
    def of(cls, folder: Path) -> "Runs":
        """Those of a folder, whichever object asks."""
        return cls._of_folders.setdefault(folder.resolve(), Runs())

    def check(self, trainee: Trainee, folder: Path) -> None:
        """RuntimeError if another run, which is still there, has saved into the folder, and this
        one continues no checkpoint of it.
        """
        if self._find(trainee) is not None or not self._saved():
            return
        gc.collect()  # an optimizer and its hooks refer to each other
        if others := self._saved():
            raise RuntimeError(
                f"two optimizers save into {folder}, {others[0].trainee.name} and {trainee.name}, which has neither saved nor "
                "loaded there and has other parameters: each would replace the checkpoints of the other, so give each a folder of "
                "its own, as in Checkpoints('run/generator') and Checkpoints('run/discriminator')"
            )

    def lineage_of(self, trainee: Trainee) -> Lineage:
        """Where a run stands; a new lineage for one that has neither loaded nor saved."""
        run = self._find(trainee)
        return Lineage() if run is None else run.lineage

    def stands(self, trainee: Trainee, lineage: Lineage, has_saved: bool) -> None:
        """A run has loaded or saved this checkpoint."""
        run = self._find(trainee)
        if run is not None:
            has_saved |= run.has_saved
        self._runs = [one for one in self._runs if one is not run][-MOST_RUNS:]
        self._runs.append(_Run(trainee, lineage, has_saved))

    def _find(self, trainee: Trainee) -> _Run | None:
        return next((run for run in reversed(self._runs) if run.trainee.parameters & trainee.parameters), None)

    def _saved(self) -> list[_Run]:
        return [run for run in self._runs if run.has_saved and run.trainee.owner() is not None]
