"""Lineage: the checkpoint that a run continues, and the checkpoints that this one descends from.

If a run loads step 100 and saves step 150, then steps 200 and 300 in the same folder belong to an
abandoned branch, though their numbers are larger. So each checkpoint records an id, the number of
its save in the folder, and the ids of the checkpoints that it descends from. An automatic resume
takes the checkpoint that was saved last.

The process remembers which checkpoint each optimizer continues, by its parameters: an optimizer
that is built again over the same parameters is the same run, and one over other parameters is
another run.
"""

import gc
import secrets
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from zerocast.checkpoint.store import Place

# The number of runs that are remembered for each folder.
MOST_RUNS = 16


@dataclass(frozen=True)
class Lineage:
    """The place of a checkpoint among the checkpoints of its folder.

    Attributes:
        id: unique; empty for a checkpoint whose manifest cannot be read.
        number: the number of its save in the folder, from 1.
        ancestors: the ids of the checkpoints in the folder that it descends from.
    """

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    number: int = 0
    ancestors: tuple[str, ...] = ()

    def then(self, others: Iterable["Lineage"]) -> "Lineage":
        """The lineage of the next save by a run that continues this checkpoint. `others` are the
        lineages of the checkpoints that the folder still has.
        """
        numbers = {other.id: other.number for other in others}
        ancestors = tuple(ancestor for ancestor in (*self.ancestors, self.id) if ancestor in numbers)
        return Lineage(number=1 + max(numbers.values(), default=0), ancestors=ancestors)


class Trains(Protocol):
    """The attributes of an optimizer that are read here."""

    @property
    def param_groups(self) -> Any:
        """The parameter groups, as torch.optim.Optimizer has them."""

    @property
    def model(self) -> Any:
        """The model, None if the optimizer does not know it."""


@dataclass(frozen=True)
class Trainee:
    """The set of parameters that an optimizer trains.

    Attributes:
        parameters: their ids. There is no weak reference to a parameter, since
            `torch.utils.swap_tensors`, with which `Module.to` may move it, refuses one that has
            any.
        owner: an object that lives as long as the parameters are trained: the model, or an
            optimizer that knows no model. While it lives, the ids are not used again.
        name: the optimizer, as errors name it.
    """

    parameters: frozenset[int]
    owner: "weakref.ref[Any]"
    name: str

    @staticmethod
    def of(optimizer: Trains) -> "Trainee":
        """The parameters of an optimizer, or of an object that stands for its state."""
        ids = frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        owner = optimizer if optimizer.model is None else optimizer.model
        name = f"a {type(optimizer).__name__} of {len(ids)} parameters (at {id(optimizer):#x})"
        return Trainee(ids, weakref.ref(owner), name)


@dataclass
class _Run:
    """A run of training: its parameters, the checkpoint that it continues, and whether it has saved
    into the folder.
    """

    trainee: Trainee
    lineage: Lineage
    has_saved: bool


class Runs:
    """The runs that have loaded from a folder, or saved into it, in this process."""

    # By resolved path; kept as long as the process lives.
    _of_folders: ClassVar[dict[Place, "Runs"]] = {}

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    @classmethod
    def of(cls, folder: Place) -> "Runs":
        """The runs of a folder, the same object for every Checkpoints of that folder."""
        return cls._of_folders.setdefault(folder.resolve(), Runs())

    def check(self, trainee: Trainee, folder: Place) -> None:
        """RuntimeError if this run has neither loaded from the folder nor saved into it, but
        another run that still lives has saved into it.
        """
        if self._find(trainee) is not None or not self._living_writers():
            return
        # An optimizer and its hooks refer to each other, so one that is no longer used may still
        # wait for the garbage collector.
        gc.collect()
        if others := self._living_writers():
            raise RuntimeError(
                f"two optimizers save into {folder}, {others[0].trainee.name} and {trainee.name}, which has neither saved nor "
                "loaded there and has other parameters: each would replace the checkpoints of the other, so give each a folder of "
                "its own, as in Checkpoints('run/generator') and Checkpoints('run/discriminator')"
            )

    def lineage_of(self, trainee: Trainee) -> Lineage:
        """The lineage of the checkpoint that a run continues; a new lineage for a run that has
        neither loaded nor saved.
        """
        run = self._find(trainee)
        return Lineage() if run is None else run.lineage

    def record(self, trainee: Trainee, lineage: Lineage, has_saved: bool) -> None:
        """Note that a run has loaded or saved the checkpoint of this lineage."""
        previous = self._find(trainee)
        if previous is not None:
            has_saved |= previous.has_saved
        self._runs = [run for run in self._runs if run is not previous][-MOST_RUNS:]
        self._runs.append(_Run(trainee, lineage, has_saved))

    def _find(self, trainee: Trainee) -> _Run | None:
        return next((run for run in reversed(self._runs) if run.trainee.parameters & trainee.parameters), None)

    def _living_writers(self) -> list[_Run]:
        return [run for run in self._runs if run.has_saved and run.trainee.owner() is not None]
