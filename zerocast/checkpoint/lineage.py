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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor


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


@dataclass
class _Run:
    """A run by its parameters: where it stands, and whether it has saved here."""

    parameters: list["weakref.ref[Tensor]"]
    lineage: Lineage
    name: str
    has_saved: bool

    def is_of(self, parameters: Sequence[Tensor]) -> bool:
        ids = {id(parameter) for parameter in parameters}
        return any(id(one) in ids for one in self._alive())

    def is_alive(self) -> bool:
        return bool(self._alive())

    def _alive(self) -> list[Tensor]:
        return [one for ref in self.parameters if (one := ref()) is not None]


class Runs:
    """The runs that have loaded from a folder, or saved into it, in this process."""

    _of_folders: ClassVar[dict[Path, "Runs"]] = {}  # for as long as the process lives

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    @classmethod
    def of(cls, folder: Path) -> "Runs":
        """Those of a folder, whichever object asks."""
        return cls._of_folders.setdefault(folder.resolve(), Runs())

    def check(self, optimizer: Any, folder: Path) -> None:
        """RuntimeError if another run, which is still there, has saved into the folder, and this
        one continues no checkpoint of it.
        """
        if self._find(_parameters(optimizer.param_groups)) is not None or not self._saved():
            return
        gc.collect()  # an optimizer and its hooks refer to each other
        if others := self._saved():
            raise RuntimeError(
                f"two optimizers save into {folder}, {others[0].name} and {name_of(optimizer)}, which has neither saved nor loaded "
                "there and has other parameters: each would replace the checkpoints of the other, so give each a folder of its "
                "own, as in Checkpoints('run/generator') and Checkpoints('run/discriminator')"
            )

    def lineage_of(self, param_groups: Sequence[Mapping[str, Any]]) -> Lineage:
        """Where a run stands; a new lineage for one that has neither loaded nor saved."""
        run = self._find(_parameters(param_groups))
        return Lineage() if run is None else run.lineage

    def stands(self, param_groups: Sequence[Mapping[str, Any]], lineage: Lineage, name: str, has_saved: bool) -> None:
        """A run has loaded or saved this checkpoint."""
        parameters = _parameters(param_groups)
        run = self._find(parameters)
        if run is not None:
            has_saved |= run.has_saved
        self._runs = [one for one in self._runs if one is not run and one.is_alive()]
        self._runs.append(_Run([weakref.ref(one) for one in parameters], lineage, name, has_saved))

    def _find(self, parameters: Sequence[Tensor]) -> _Run | None:
        return next((run for run in self._runs if run.is_of(parameters)), None)

    def _saved(self) -> list[_Run]:
        return [run for run in self._runs if run.has_saved and run.is_alive()]


def name_of(optimizer: Any) -> str:
    """What an error calls an optimizer, which may be one of several of its class."""
    return (
        f"a {type(optimizer).__name__} of {len(_parameters(optimizer.param_groups))} parameters (at {id(optimizer):#x})"
    )


def _parameters(param_groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    return [parameter for group in param_groups for parameter in group["params"]]
