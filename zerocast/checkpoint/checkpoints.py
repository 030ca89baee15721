"""Checkpoints: a folder of numbered checkpoints that keeps the last few, with asynchronous saves.

    with Checkpoints("run/checkpoints", keep=3, asynchronous=True) as checkpoints:
        step = checkpoints.load(optimizer, model=model) if checkpoints.steps() else 0
        ...
        checkpoints.save(optimizer, step, model=model)  # every so often, on all ranks

An asynchronous save copies this rank's part of the state to CPU memory (12 bytes per owned
element). A thread then writes it, over its own gloo group, while training continues. If it fails,
the next call raises its error, as do `close` and the end of the `with` block. An error that was
never raised is logged at the end of the process.

One process at a time writes into a folder (`writer.py`), for one optimizer, and a resume loads the
checkpoint that was saved last (`lineage.py`).
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
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from zerocast.checkpoint import checkpoint
from zerocast.checkpoint.checkpointed import Checkpointed
from zerocast.checkpoint.lineage import Lineage, Runs, TrainedParameters
from zerocast.checkpoint.manifest import LOADS, SAVES, Manifest, check_step, is_checkpoint
from zerocast.checkpoint.store import AnyPath, Location, StorePath, as_location
from zerocast.checkpoint.store_folder import folder_at
from zerocast.checkpoint.torch_checkpoint import TensorShard
from zerocast.checkpoint.whole_folder import NEW, TEMPORARY, Folder, discard, has_manifest, make_folder, mark_incomplete
from zerocast.checkpoint.writer import NoLease, WriterLease
from zerocast.distributed.agreement import from_rank_0, validate_across_ranks
from zerocast.distributed.group import Group

logger = logging.getLogger(__name__)
STEP = r"step_(\d{8,})"
NAME = re.compile(rf"{STEP}(?:{TEMPORARY}{re.escape(NEW)})?")
# Seconds between two polls of the lease of another writer.
POLL_INTERVAL = 0.2


class Checkpoints:
    """Checkpoints `step_00000100`, ... in `folder`.

    Args:
        folder: a folder that all ranks share, created if it does not exist; or a URL that fsspec
            opens.
        keep: the number of the newest checkpoints to keep; None keeps all. Older ones are deleted
            once a new one is complete, starting with abandoned branches.
        asynchronous: `save` returns once the state is copied to CPU memory.

    Rank 0 owns the folder as its writer from its first save until `close`, the end of a `with`
    block, or the end of its process. Another process that saves there during this time raises
    RuntimeError. A writer that died is replaced by the next process that saves. At a URL nothing
    prevents another process from writing: each run needs a separate folder.
    """

    def __init__(self, folder: AnyPath, keep: int | None = 3, asynchronous: bool = False) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep is None or at least 1, got {keep}")
        self._folder = as_location(folder)
        self._keep = keep
        self._asynchronous = asynchronous
        # A gloo group for asynchronous saves, made by the first of them.
        self._group: Group | None = None
        # The asynchronous save whose result no call has waited for yet.
        self._saving: _Saving | None = None
        # On rank 0 from the first save until `close`.
        self._writer: _FolderWriter | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Call `close`. If the block raised an error, that error propagates, and the error of a
        failed save is only logged.
        """
        try:
            self.close()
        except RuntimeError as failed:
            if error is None:
                raise
            logger.error("%s", failed)

    def close(self) -> None:
        """Wait for a save in progress, and let other processes write into the folder; all ranks
        call it. Raises RuntimeError on every rank if the save could not be written.
        """
        try:
            self.wait()
        finally:
            self._writer = None

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, oldest first; nothing is moved or deleted.

        A complete checkpoint may still be damaged, which `load` detects. Raises RuntimeError if an
        asynchronous save has failed. Since a single rank may call this, `wait` raises the error
        again.
        """
        if self._saving is not None:
            self._saving.raise_if_failed()
        return self._steps()

    def path(self, step: int) -> Location:
        """Return the folder of a step: `step_00000100`, or one with a longer name between a crash
        and the next save, and at a URL after a step was saved again. The text of the result is the
        path or the URL.
        """
        path: Location = self._whole_folder(step).current_path
        return path

    def save(
        self,
        optimizer: Checkpointed,
        step: int,
        extra: Mapping[str, Any] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """Write the state after `step` steps; all ranks call it.

        A checkpoint of the same step is replaced. `extra` holds a few tensors or plain values of
        the caller, one for all ranks or one per rank; frozen parameters and buffers are taken from
        `model`. Raises RuntimeError on every rank, with all older checkpoints kept, if any rank
        cannot write, or if another process or another optimizer writes into the folder. If an
        asynchronous save cannot be written, the next call raises. Raises TypeError or ValueError
        for a step that is not a non-negative integer.
        """
        self.wait()
        state, manifest = checkpoint.contents_of(optimizer, extra, model, step)
        group = checkpoint.group_of(optimizer)
        trained = TrainedParameters.from_optimizer(optimizer)
        self._become_writer(trained, group)
        parent = self._runs.lineage_of(trained)

        def write(state: Mapping[str, Any], group: Group) -> None:
            lineage = self._write(state, group, manifest, parent)
            self._runs.record(trained, lineage, has_saved=True)

        if not self._asynchronous:
            write(state, group)
            return
        if self._group is None:
            # The thread needs a group that works on CPU memory and that training does not use at
            # the same time.
            self._group = group.duplicate("gloo")
        save_group = self._group
        snapshot = _snapshot(state)
        self._saving = _Saving(step, lambda: write(snapshot, save_group), group.rank)

    def wait(self) -> None:
        """Wait for a save in progress. Raises RuntimeError on every rank if it could not be
        written.
        """
        saving = self._saving
        self._saving = None
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

        Without `step`, reads the undamaged checkpoint that was saved last; damaged ones are logged
        and skipped. The tensors of `extra` are filled in place and its other values replaced;
        frozen parameters and buffers are read into `model`. Raises FileNotFoundError if there is no
        checkpoint, ValueError if the chosen one is damaged or does not fit, or if all are damaged.
        """
        self.wait()
        group = checkpoint.group_of(optimizer)
        # Rank 0 lists the folder for all, since ranks may see a network file system differently.
        paths: dict[int, Location] = from_rank_0(
            group, lambda: {step: self.path(step) for step in self._steps()}, LOADS
        )
        validate_across_ranks(group, [], None, LOADS, {"the step that is loaded": step})
        if not paths or (step is not None and step not in paths):
            wanted = "complete checkpoint" if step is None else f"checkpoint of step {step}"
            raise FileNotFoundError(f"{self._folder} holds no {wanted}; there are: {list(paths) or 'none'}")
        if step is None:
            step, manifest = self._last_intact(paths, group)
        else:
            manifest = check_step(paths[step], step, group)
        checkpoint.read(optimizer, paths[step], manifest, extra, model)
        self._runs.record(TrainedParameters.from_optimizer(optimizer), manifest.lineage, has_saved=False)
        return step

    @property
    def _runs(self) -> Runs:
        return Runs.for_folder(self._folder)

    def _steps(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        matches = [NAME.fullmatch(path.name) for path in self._folder.iterdir() if is_checkpoint(path)]
        return sorted({int(match[1]) for match in matches if match})

    def _become_writer(self, trained: TrainedParameters, group: Group) -> None:
        """Take the lease of the folder. If it is unclear whether the current writer is alive, wait
        until it is clear. Raises RuntimeError on every rank if another writer is alive, or if
        another optimizer saves into the folder.
        """

        def poll() -> bool:
            self._runs.check(trained, self._folder)
            if self._writer is None:
                make_folder(self._folder)
                self._writer = _FolderWriter.for_folder(self._folder)
            if self._writer.is_writing:
                raise RuntimeError(
                    f"another Checkpoints of this process is writing into {self._folder}: use one per folder, or wait() for its "
                    "save"
                )
            return self._writer.lease.poll()

        is_logged = group.rank > 0
        while not from_rank_0(group, poll, SAVES):
            if not is_logged:
                logger.warning(
                    "another process has written checkpoints into %s: waiting to see if it is alive", self._folder
                )
            is_logged = True
            time.sleep(POLL_INTERVAL)

    def _write(self, state: Mapping[str, Any], group: Group, manifest: Manifest, parent: Lineage) -> Lineage:
        """Write a checkpoint of a run that continues `parent`, and delete checkpoints that are too
        old. Returns the lineage of the new one.
        """
        step = manifest.step
        assert step is not None
        # Set on rank 0 by `complete`.
        lineage = manifest.lineage

        def complete() -> Manifest:
            nonlocal lineage
            assert self._writer is not None
            self._writer.lease.check()
            lineage = self._next_lineage(step, parent)
            return dataclasses.replace(manifest, lineage=lineage)

        try:
            if self._writer is not None:
                self._writer.is_writing = True
            checkpoint.write(state, self._whole_folder(step).path, group, manifest, before_commit=complete)
        finally:
            if self._writer is not None:
                self._writer.is_writing = False
        from_rank_0(group, lambda: self._prune(step), SAVES)
        written: Lineage = group.broadcast_object(lineage, "the lineage of a checkpoint")
        return written

    def _next_lineage(self, step: int, parent: Lineage) -> Lineage:
        """Return the lineage of the checkpoint of `step` by a run that continues `parent`. Logs a
        warning if the run abandons a branch from which an automatic resume would have continued
        until now.
        """
        others = self._lineages()
        replaced = others.pop(step, None)
        lineage = parent.then(others.values())
        abandoned_steps = sorted(other for other, known in others.items() if known.id not in lineage.ancestors)
        last = max(others.values(), key=lambda known: known.number, default=None)
        if abandoned_steps and last is not None and last.id not in lineage.ancestors and replaced != parent:
            logger.warning(
                "the checkpoint of step %d in %s does not descend from the checkpoints of steps %s: an automatic resume now "
                "continues from step %d, and these are deleted first",
                step,
                self._folder,
                abandoned_steps,
                step,
            )
        if replaced is not None:
            # The replaced checkpoint may have been the last save, so its number counts as well.
            lineage = dataclasses.replace(lineage, number=max(lineage.number, replaced.number + 1))
        return lineage

    def _lineages(self) -> dict[int, Lineage]:
        """Return the lineages of complete checkpoints by step; one with an empty id if the manifest
        cannot be read.
        """
        lineages = {}
        for step in self._steps():
            try:
                lineages[step] = Manifest.of_step(self.path(step), step).lineage
            except (OSError, ValueError):
                lineages[step] = Lineage(id="")
        return lineages

    def _whole_folder(self, step: int) -> Folder[Any]:
        return folder_at(self._folder / f"step_{step:08d}", replaces_checkpoints=True)

    def _prune(self, newest: int) -> None:
        """Finish interrupted replacements; delete checkpoints beyond `keep` and the remains of
        crashes. Called by the one living writer of the folder only.
        """
        for step in self._steps():
            self._whole_folder(step).finish_replacement()
        discard(self._whole_folder(newest).remains(self._folder, STEP))
        if self._keep is None:
            return
        lineages = self._lineages()
        ancestors = lineages.pop(newest).ancestors
        # Abandoned branches come first, then older saves.
        steps = sorted(lineages, key=lambda step: (lineages[step].id in ancestors, lineages[step].number, step))
        retired = []
        for step in steps[: max(0, len(steps) + 1 - self._keep)]:
            path = self._whole_folder(step).current_path
            if not has_manifest(path):
                logger.warning("%s is too old and has no manifest.json, so it is not deleted", path)
                continue
            try:
                # The rename comes first, so that a kill during the deletion leaves nothing that
                # looks complete.
                retired.append(mark_incomplete(path))
            except OSError as error:
                logger.warning("%s is too old and cannot be deleted: %s", path, error)
        discard(retired)

    def _last_intact(self, paths: Mapping[int, Location], group: Group) -> tuple[int, Manifest]:
        """Return the step and manifest of the undamaged checkpoint that was saved last. Raises the
        last error if all are damaged.
        """
        lineages: dict[int, Lineage] = from_rank_0(group, self._lineages, LOADS)
        newest = max(lineages.values(), key=lambda known: known.number, default=Lineage())

        def order(step: int) -> tuple[bool, bool, int, int]:
            # Unreadable manifests first, so that each of them is logged. Then the branch of the
            # last save, the last saved first.
            lineage = lineages.get(step, Lineage(id=""))
            return lineage.id == "", lineage.id in (newest.id, *newest.ancestors), lineage.number, step

        steps = sorted(paths, key=order, reverse=True)
        for step in steps:
            try:
                manifest = check_step(paths[step], step, group)
            except ValueError as error:
                if step == steps[-1]:
                    raise
                if group.rank == 0:
                    logger.warning("skipping the checkpoint of step %d: %s", step, error)
            else:
                if group.rank == 0 and manifest.lineage.id not in (newest.id, *newest.ancestors):
                    logger.warning("the checkpoint of step %d belongs to an abandoned branch", step)
                return step, manifest
        raise AssertionError("there is no step")


class _FolderWriter:
    """The lease of a folder, shared by all Checkpoints of that folder in this process. It is
    released once the last of them has dropped it.

    Attributes:
        lease: the right to write, which other processes see.
        is_writing: True while a Checkpoints writes.
    """

    def __init__(self, folder: Location) -> None:
        self.lease = NoLease() if isinstance(folder, StorePath) else WriterLease(folder)
        self.is_writing = False
        weakref.finalize(self, self.lease.release)

    @classmethod
    def for_folder(cls, folder: Location) -> "_FolderWriter":
        """Return the writer of a folder, which is made if no Checkpoints of this process has it."""
        # A forked process must not use the lease of its parent.
        key = os.getpid(), folder.resolve()
        writer = _FOLDER_WRITERS.get(key)
        if writer is None:
            writer = _FOLDER_WRITERS[key] = _FolderWriter(folder)
        return writer


class _Saving:
    """A checkpoint that a thread writes; the thread starts immediately."""

    def __init__(self, step: int, write: Callable[[], None], rank: int) -> None:
        self._step = step
        self._write = write
        self.rank = rank
        # Set by the thread when it fails.
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {step}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
            _UNREPORTED.add(self)

    def wait(self) -> None:
        """Wait for the thread. Raises RuntimeError if it could not write the checkpoint."""
        self._thread.join()
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise RuntimeError if the thread has ended and could not write the checkpoint."""
        if self._error is not None:
            _UNREPORTED.discard(self)
            raise RuntimeError(str(self)) from self._error

    def __str__(self) -> str:
        return f"the checkpoint of step {self._step} was not written: {self._error}"


# (process id, folder) -> the writer of that folder, as long as a Checkpoints has it.
_FOLDER_WRITERS: "weakref.WeakValueDictionary[tuple[int, Location], _FolderWriter]" = weakref.WeakValueDictionary()
# Failed saves whose errors were not raised yet.
_UNREPORTED: set[_Saving] = set()


@atexit.register
def _log_unreported() -> None:
    """Log, on rank 0, the failed saves whose errors were never raised."""
    for saving in _UNREPORTED:
        if saving.rank == 0:
            logger.error("%s", saving)


def _snapshot(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the tensors of a nested state to CPU memory."""
    return {key: _snapshot(value) if isinstance(value, Mapping) else _copy(value) for key, value in state.items()}


def _copy(value: Tensor) -> Tensor:
    if isinstance(value, TensorShard):
        return TensorShard.from_flat(value.flat.to("cpu", copy=True), value.span, tuple(value.shape))
    return value.detach().to("cpu", copy=True)
