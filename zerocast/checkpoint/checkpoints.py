"""Checkpoints: a folder of numbered checkpoints that keeps the last few, with asynchronous saves.

    with Checkpoints("run/checkpoints", keep=3, asynchronous=True) as checkpoints:
        step = checkpoints.load(optimizer, model=model) if checkpoints.steps() else 0
        ...
        checkpoints.save(optimizer, step, model=model)  # every so often, on all ranks

An asynchronous save copies this rank's part of the state to host memory (12 bytes an owned
element). A thread then writes it, over its own gloo group, while training continues. If it fails,
the next call raises its error, as do `close` and the end of the `with` block; the end of the
process logs an error that was raised to nobody.

One process writes into a folder (`writer.py`), for one optimizer, and a resume takes what was saved
last (`lineage.py`).
"""

import atexit
import dataclasses
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from zerocast.checkpoint import checkpoint
from zerocast.checkpoint.checkpoint import Checkpointed
from zerocast.checkpoint.lineage import Lineage, Runs, Trainee
from zerocast.checkpoint.manifest import LOADS, Manifest, check_step, is_checkpoint
from zerocast.checkpoint.sharded_tensor import TensorShard
from zerocast.checkpoint.whole_folder import (
    NEW,
    PARTIAL,
    TEMPORARY,
    WholeFolder,
    discard,
    make_folder,
    retire,
    temporary_folders,
)
from zerocast.checkpoint.writer import WriterLease
from zerocast.distributed.agreement import from_rank_0
from zerocast.distributed.group import Group

logger = logging.getLogger(__name__)
STEP = r"step_(\d{8,})"
NAME = re.compile(rf"{STEP}(?:{TEMPORARY}{re.escape(NEW)})?")
POLLS = 0.2  # seconds between two looks at the lease of another writer


class Checkpoints:
    """Checkpoints `step_00000100`, ... in `folder`.

    Args:
        folder: shared by all ranks; created if it does not exist.
        keep: how many of the newest to keep; None keeps all. Older ones are deleted once a new one
            is complete, those of branches that were given up first.
        asynchronous: `save` returns once the state is copied to host memory.

    Rank 0 writes into the folder from its first save until `close`, the end of a `with` block, or
    the end of its process, and another process that saves there raises RuntimeError meanwhile. A
    writer that died is in nobody's way.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int | None = 3, asynchronous: bool = False) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep is None or at least 1, got {keep}")
        self._folder, self._keep, self._asynchronous = Path(folder), keep, asynchronous
        self._group: Group | None = None  # of asynchronous saves
        self._saving: _Saving | None = None
        self._place_of_writer: _WriterPlace | None = None  # from the first save until `close`, on rank 0

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Call `close`. If the block raised, its error goes on, and that of a save is logged."""
        try:
            self.close()
        except RuntimeError as failed:
            if error is None:
                raise
            logger.error("%s", failed)

    def close(self) -> None:
        """Wait for a save in progress, and let other processes write into the folder; all ranks
        call it. RuntimeError on every rank if the save could not be written.
        """
        try:
            self.wait()
        finally:
            self._place_of_writer = None

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, oldest first; nothing is moved or deleted.

        A complete checkpoint may still be damaged, which `load` detects. RuntimeError if an
        asynchronous save has failed; as ranks call this one by one, `wait` raises it once more.
        """
        if self._saving is not None:
            self._saving.raise_if_failed()
        return self._steps()

    def path(self, step: int) -> Path:
        """The folder of a step: `step_00000100`, or one with a longer name between a crash and the
        next save.
        """
        return self._place(step).found

    def save(
        self,
        optimizer: Checkpointed,
        step: int,
        extra: Mapping[str, Any] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """Write the state after `step` steps; all ranks call it.

        A checkpoint of the same step is replaced. `extra` holds a few tensors or plain values of
        the caller, one for all ranks or one a rank; frozen parameters and buffers are those of
        `model`. Raises RuntimeError on every rank, with all older checkpoints kept, if any rank
        cannot write, if another process writes here, or if another optimizer saves here; an
        asynchronous save that cannot be written raises at the next call. TypeError or ValueError
        for a step that is no whole number from 0.
        """
        self.wait()
        state, manifest = checkpoint.contents_of(optimizer, extra, model, step)
        group = checkpoint.group_of(optimizer)
        trainee = Trainee.of(optimizer)
        self._become_writer(trainee, group)
        stands = self._runs.lineage_of(trainee)

        def work(state: Mapping[str, Any], group: Group) -> None:
            lineage = self._write(state, group, manifest, stands)
            self._runs.stands(trainee, lineage, has_saved=True)

        if not self._asynchronous:
            work(state, group)
            return
        if self._group is None:
            # for host memory; training uses the other one meanwhile
            self._group = group.duplicate("gloo")
        own, copied = self._group, _snapshot(state)
        self._saving = _Saving(step, lambda: work(copied, own), group.rank)

    def wait(self) -> None:
        """Wait for a save in progress; RuntimeError on every rank if it could not be written."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def load(
        self,
        optimizer: Checkpointed,
        step: int | None = None,
        extra: MutableMapping[str, Any] | None = None,
        model: nn.Module | None = None,
    ) -> int:
        """Read a checkpoint into the optimizer and its weights; returns its step. All ranks call
        it.

        Without `step`, reads the undamaged one that was saved last; damaged ones are logged and
        skipped. The tensors of `extra` are filled in place and its other values replaced; frozen
        parameters and buffers go into `model`. Raises FileNotFoundError if there is none,
        ValueError if the chosen one is damaged or does not fit, or if all are damaged.
        """
        self.wait()
        group = checkpoint.group_of(optimizer)
        places: dict[int, Path] = from_rank_0(group, lambda: {one: self.path(one) for one in self._steps()}, LOADS)
        if not places or (step is not None and step not in places):
            wanted = "complete checkpoint" if step is None else f"checkpoint of step {step}"
            raise FileNotFoundError(f"{self._folder} holds no {wanted}; there are: {list(places) or 'none'}")
        if step is None:
            step, manifest = self._last_intact(places, group)
        else:
            manifest = check_step(places[step], step, group)
        checkpoint.read(optimizer, places[step], manifest, extra, model)
        self._runs.stands(Trainee.of(optimizer), manifest.lineage, has_saved=False)
        return step

    @property
    def _runs(self) -> Runs:
        return Runs.of(self._folder)

    def _steps(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        matches = [NAME.fullmatch(path.name) for path in self._folder.iterdir() if is_checkpoint(path)]
        return sorted({int(match[1]) for match in matches if match})

    def _become_writer(self, trainee: Trainee, group: Group) -> None:
        """Take the lease of the folder, or wait until it is clear that its writer is dead.
        RuntimeError on every rank if another writer lives, or another optimizer saves here.
        """

        def poll() -> bool:
            self._runs.check(trainee, self._folder)
            if self._place_of_writer is None:
                make_folder(self._folder)
                self._place_of_writer = _WriterPlace.of(self._folder)
            self._place_of_writer.check_idle()
            return self._place_of_writer.lease.poll()

        is_told = group.rank > 0
        while not from_rank_0(group, poll, checkpoint.SAVES):
            if not is_told:
                logger.warning(
                    "another process has written checkpoints into %s: waiting to see if it lives", self._folder
                )
            is_told = True
            time.sleep(POLLS)

    def _write(self, state: Mapping[str, Any], group: Group, manifest: Manifest, stands: Lineage) -> Lineage:
        """Write a checkpoint and delete what is too old; returns its lineage."""
        step = manifest.step
        assert step is not None
        written = [manifest]

        def complete() -> Manifest:
            assert self._place_of_writer is not None
            self._place_of_writer.lease.check()
            written[0] = dataclasses.replace(manifest, lineage=self._next_lineage(step, stands))
            return written[0]

        try:
            if self._place_of_writer is not None:
                self._place_of_writer.is_writing = True
            checkpoint.write(state, self._place(step).path, group, manifest, before_commit=complete)
        finally:
            if self._place_of_writer is not None:
                self._place_of_writer.is_writing = False
        checkpoint.on_rank_0(group, lambda: self._prune(step))
        lineage: Lineage = group.broadcast_object(written[0].lineage, "the lineage of a checkpoint")
        return lineage

    def _next_lineage(self, step: int, stands: Lineage) -> Lineage:
        """The lineage of the checkpoint of `step` by a run that stands there. It is logged if the
        run leaves a branch that an automatic resume would have taken so far.
        """
        others = self._lineages()
        replaced = others.pop(step, None)
        lineage = stands.then(others.values())
        given_up = sorted(one for one, other in others.items() if other.id not in lineage.ancestors)
        last = max(others.values(), key=lambda one: one.number, default=None)
        if given_up and last is not None and last.id not in lineage.ancestors and replaced != stands:
            logger.warning(
                "the checkpoint of step %d in %s does not descend from those of steps %s: from now on an automatic resume goes on "
                "from step %d, and those are deleted first",
                step,
                self._folder,
                given_up,
                step,
            )
        if replaced is not None:  # its number counts, too
            lineage = dataclasses.replace(lineage, number=max(lineage.number, replaced.number + 1))
        return lineage

    def _lineages(self) -> dict[int, Lineage]:
        """The lineages of complete checkpoints by step; one without id for a damaged manifest."""
        lineages = {}
        for step in self._steps():
            try:
                lineages[step] = Manifest.of_step(self.path(step), step).lineage
            except (OSError, ValueError):
                lineages[step] = Lineage(id="")
        return lineages

    def _place(self, step: int) -> WholeFolder:
        return WholeFolder(self._folder / f"step_{step:08d}", checkpoint.has_manifest)

    def _prune(self, newest: int) -> None:
        """Finish interrupted replacements; delete checkpoints beyond `keep` and the remains of
        crashes. Only the one living writer of the folder comes here.
        """
        for step in self._steps():
            self._place(step).settle()
        discard(temporary_folders(self._folder, STEP, PARTIAL))
        lineages, retired = self._lineages(), []
        ancestors = lineages.pop(newest).ancestors
        steps = sorted(lineages, key=lambda step: (lineages[step].id in ancestors, lineages[step].number, step))
        for step in steps[: max(0, len(steps) + 1 - self._keep)] if self._keep else ():
            path = self._place(step).path
            if not checkpoint.has_manifest(path):
                logger.warning("%s is too old and has no manifest.json, so it is not deleted", path)
                continue
            try:  # renamed first, so that a kill leaves nothing that looks complete
                retired.append(retire(path))
            except OSError as error:
                logger.warning("%s is too old and cannot be deleted: %s", path, error)
        discard(retired)

    def _last_intact(self, places: Mapping[int, Path], group: Group) -> tuple[int, Manifest]:
        """The undamaged checkpoint that was saved last; the last error if all are damaged."""
        lineages: dict[int, Lineage] = from_rank_0(group, self._lineages, LOADS)
        newest = max(lineages.values(), key=lambda one: one.number, default=Lineage())

        def order(step: int) -> tuple[bool, bool, int, int]:
            one = lineages.get(step, Lineage(id=""))
            return one.id == "", one.id in (newest.id, *newest.ancestors), one.number, step

        steps = sorted(places, key=order, reverse=True)
        for step in steps:
            try:
                manifest = check_step(places[step], step, group)
            except ValueError as error:
                if step == steps[-1]:
                    raise
                if group.rank == 0:
                    logger.warning("passing over the checkpoint of step %d: %s", step, error)
            else:
                if group.rank == 0 and manifest.lineage.id not in (newest.id, *newest.ancestors):
                    logger.warning("the checkpoint of step %d is of a branch that was given up", step)
                return step, manifest
        raise AssertionError("there is no step")


class _WriterPlace:
    """The process as the writer of a folder, for all Checkpoints of that folder in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lease, self.is_writing = folder, WriterLease(folder), False
        weakref.finalize(self, self.lease.release)

    @classmethod
    def of(cls, folder: Path) -> "_WriterPlace":
        """That of a folder, as long as any Checkpoints has it."""
        key = os.getpid(), folder.resolve()
        place = _PLACES.get(key)
        if place is None:
            place = _PLACES[key] = _WriterPlace(folder)
        return place

    def check_idle(self) -> None:
        """RuntimeError while a save of another Checkpoints goes on."""
        if self.is_writing:
            raise RuntimeError(
                f"another Checkpoints of this process is writing into {self.folder}: use one for a folder, or wait() for its save"
            )


class _Saving:
    """A checkpoint that a thread writes."""

    def __init__(self, step: int, work: Callable[[], None], rank: int) -> None:
        self._step, self._work, self.rank = step, work, rank
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {step}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
            _UNHEARD.add(self)

    def wait(self) -> None:
        """Wait for the thread; RuntimeError if it could not write the checkpoint."""
        self._thread.join()
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """RuntimeError if the thread has ended and could not write the checkpoint."""
        if self._error is not None:
            _UNHEARD.discard(self)
            raise RuntimeError(str(self)) from self._error

    def __str__(self) -> str:
        return f"the checkpoint of step {self._step} was not written: {self._error}"


_PLACES: "weakref.WeakValueDictionary[tuple[int, Path], _WriterPlace]" = weakref.WeakValueDictionary()
_UNHEARD: set[_Saving] = set()  # that failed, with errors that were raised to nobody


@atexit.register
def _log_unheard() -> None:
    """Log, on rank 0, the saves that failed without a word."""
    for saving in _UNHEARD:
        if saving.rank == 0:
            logger.error("%s", saving)


def _snapshot(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the current values in host memory."""
    return {key: _snapshot(value) if isinstance(value, Mapping) else _copy(value) for key, value in state.items()}


def _copy(value: Tensor) -> Tensor:
    if isinstance(value, TensorShard):
        return TensorShard.of(value.flat.to("cpu", copy=True), value.span, tuple(value.shape))
    return value.detach().to("cpu", copy=True)
