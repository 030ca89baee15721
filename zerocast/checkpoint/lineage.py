"""Lineage: the checkpoint that a run continues, and the checkpoints that this one descends from.

If a run loads step 100 and saves step 150, then steps 200 and 300 in the same folder belong to an
abandoned branch, though their numbers are larger. So each checkpoint records an id, the number of
its save in the folder, and the ids of the checkpoints that it descends from. An automatic resume
loads the checkpoint that was saved last.

The process remembers which checkpoint each optimizer continues, by its parameters: an optimizer
that is built again over the same parameters is the same run, and an optimizer over different
parameters is a different run.
"""

import gc
import secrets
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from zerocast.checkpoint.checkpointed import Checkpointed
from zerocast.checkpoint.store import Location

# The number of runs that are remembered for each folder.
MAX_RUNS = 16


@dataclass(frozen=True)
class Lineage:
    """The relation of a checkpoint to the other checkpoints of its folder.

    Attributes:
        id: unique; empty for a checkpoint whose manifest cannot be read.
        number: the number of its save in the folder, from 1.
        ancestors: the ids of the checkpoints in the folder that it descends from.
    """

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    number: int = 0
    ancestors: tuple[str, ...] = ()

    def then(self, others: Iterable["Lineage"]) -> "Lineage":
        """Return the lineage of the next save by a run that continues this checkpoint. `others` are
        the lineages of the checkpoints that the folder still has.
        """
        numbers = {other.id: other.number for other in others}
        ancestors = tuple(ancestor for ancestor in (*self.ancestors, self.id) if ancestor in numbers)
        return Lineage(number=1 + max(numbers.values(), default=0), ancestors=ancestors)


@dataclass(frozen=True)
class TrainedParameters:
    """The set of parameters that an optimizer trains.

    Attributes:
        parameters: their ids. Weak references to them are not kept, since
            `torch.utils.swap_tensors`, which `Module.to` may use, raises on a parameter that has
            one.
        owner: an object that lives as long as the parameters are trained: the model, or an
            optimizer that knows no model. While it is alive, the ids are not reused.
        name: a description of the optimizer, for errors.
    """

    parameters: frozenset[int]
    owner: "weakref.ref[Any]"
    name: str

    @staticmethod
    def from_optimizer(optimizer: Checkpointed) -> "TrainedParameters":
        """Return the parameters of an optimizer, or of an object that holds its state."""
        ids = frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        owner = optimizer if optimizer.model is None else optimizer.model
        name = f"a {type(optimizer).__name__} of {len(ids)} parameters (at {id(optimizer):#x})"
        return TrainedParameters(ids, weakref.ref(owner), name)


@dataclass
class _Run:
    """A run of training: its parameters, the checkpoint that it continues, and whether it has saved
    into the folder.
    """

    trained: TrainedParameters
    lineage: Lineage
    has_saved: bool


class Runs:
    """The runs that have loaded from a folder, or saved into it, in this process."""

    # By resolved path; kept as long as the process lives.
    _of_folders: ClassVar[dict[Location, "Runs"]] = {}

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    @classmethod
    def for_folder(cls, folder: Location) -> "Runs":
        """Return the runs of a folder, the same object for every Checkpoints of that folder."""
        return cls._of_folders.setdefault(folder.resolve(), Runs())

    def check(self, trained: TrainedParameters, folder: Location) -> None:
        """Raise RuntimeError if this run has neither loaded from the folder nor saved into it, but
        another run that is still alive has saved into it.
        """
        if self._find(trained) is not None or not self._living_writers():
            return
        # An optimizer and its hooks refer to each other, so an unused optimizer may not be
        # garbage-collected yet.
        gc.collect()
        if others := self._living_writers():
            raise RuntimeError(
                f"two optimizers save into {folder}, {others[0].trained.name} and {trained.name}: each would replace the "
                "checkpoints of the other. Use a separate folder for each (Checkpoints('run/generator'), "
                "Checkpoints('run/discriminator')), or delete the first optimizer if its run has ended"
            )

    def lineage_of(self, trained: TrainedParameters) -> Lineage:
        """Return the lineage of the checkpoint that a run continues; a new lineage for a run that
        has neither loaded nor saved.
        """
        run = self._find(trained)
        return Lineage() if run is None else run.lineage

    def record(self, trained: TrainedParameters, lineage: Lineage, has_saved: bool) -> None:
        """Record that a run has loaded or saved the checkpoint of this lineage."""
        previous = self._find(trained)
        if previous is not None:
            has_saved |= previous.has_saved
        self._runs = [run for run in self._runs if run is not previous][-MAX_RUNS:]
        self._runs.append(_Run(trained, lineage, has_saved))

    def _find(self, trained: TrainedParameters) -> _Run | None:
        return next((run for run in reversed(self._runs) if run.trained.parameters & trained.parameters), None)

    def _living_writers(self) -> list[_Run]:
        return [run for run in self._runs if run.has_saved and run.trained.owner() is not None]
