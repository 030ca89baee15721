"""Checkpoints: a folder of numbered checkpoints that keeps the last few, with asynchronous saves.

    checkpoints = Checkpoints("run/checkpoints", keep=3, asynchronous=True)
    step = checkpoints.load(optimizer) if checkpoints.steps() else 0
    ...
    checkpoints.save(optimizer, step)        # every so often, on all ranks
    checkpoints.wait()                       # at the end, before the process group goes

An asynchronous save copies this rank's part of the state to host memory (12 bytes an owned
element). A thread then writes it, over its own gloo group, while training continues. The next
`save`, `load` or `wait` waits for the thread and raises its error.
"""

import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from zerocast.checkpoint import checkpoint
from zerocast.checkpoint.checkpoint import Checkpointed
from zerocast.checkpoint.manifest import LOADS, Stored, check_step, is_checkpoint
from zerocast.checkpoint.sharded_tensor import TensorShard
from zerocast.checkpoint.whole_folder import NEW, PARTIAL, WholeFolder, discard
from zerocast.distributed.agreement import from_rank_0
from zerocast.distributed.group import Group

logger = logging.getLogger(__name__)
NAME = re.compile(rf"step_(\d{{8,}})(?:{re.escape(NEW)})?")


class Checkpoints:
    """Checkpoints `step_00000100`, ... in `folder`.

    Args:
        folder: shared by all ranks; created if it does not exist.
        keep: how many of the newest to keep; None keeps all. Older ones are deleted once a new one
            is complete.
        asynchronous: `save` returns once the state is copied to host memory.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int | None = 3, asynchronous: bool = False) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep is None or at least 1, got {keep}")
        self._folder, self._keep, self._asynchronous = Path(folder), keep, asynchronous
        self._group: Group | None = None  # of asynchronous saves
        self._saving: _Saving | None = None

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, oldest first; nothing is moved or deleted.

        A complete checkpoint may still be damaged, which `load` detects.
        """
        if not self._folder.is_dir():
            return []
        matches = [NAME.fullmatch(path.name) for path in self._folder.iterdir() if is_checkpoint(path)]
        return sorted({int(match[1]) for match in matches if match})

    def path(self, step: int) -> Path:
        """The folder of a step: `step_00000100`, or `step_00000100.new` between a crash and the
        next save.
        """
        return self._place(step).found

    def save(self, optimizer: Checkpointed, step: int, extra: Mapping[str, Tensor] | None = None) -> None:
        """Write the state after `step` steps; all ranks call it.

        A checkpoint of the same step is replaced. `extra` holds a few plain tensors of the caller.
        Raises RuntimeError on every rank, with all older checkpoints kept, if any rank cannot
        write; an asynchronous save raises it at the next `save`, `load` or `wait`.
        """
        self.wait()
        state, group = checkpoint.state_of(optimizer, extra), checkpoint.group_of(optimizer)
        formats = checkpoint.formats_of(optimizer)
        if not self._asynchronous:
            self._write(state, step, group, formats)
            return
        if self._group is None:
            # for host memory; training uses the other one meanwhile
            self._group = group.duplicate("gloo")
        own, copied = self._group, _snapshot(state)
        self._saving = _Saving(step, lambda: self._write(copied, step, own, formats))

    def wait(self) -> None:
        """Wait for a save in progress; RuntimeError on every rank if it could not be written."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def load(self, optimizer: Checkpointed, step: int | None = None, extra: Mapping[str, Tensor] | None = None) -> int:
        """Read a checkpoint into the optimizer and its weights; returns its step. All ranks call
        it.

        Without `step`, reads the newest undamaged one; damaged ones are logged and skipped. Raises
        FileNotFoundError if there is none, ValueError if the chosen one is damaged or does not fit,
        or if all are damaged.
        """
        self.wait()
        group = checkpoint.group_of(optimizer)
        places: dict[int, Path] = from_rank_0(group, lambda: {one: self.path(one) for one in self.steps()}, LOADS)
        if not places or (step is not None and step not in places):
            wanted = "complete checkpoint" if step is None else f"checkpoint of step {step}"
            raise FileNotFoundError(f"{self._folder} holds no {wanted}; there are: {list(places) or 'none'}")
        if step is None:
            step = _newest_intact(places, group)
        else:
            check_step(places[step], step, group)
        checkpoint.read(optimizer, places[step], extra)
        return step

    def _write(self, state: Mapping[str, Any], step: int, group: Group, formats: Mapping[str, Stored]) -> None:
        checkpoint.write(state, self._place(step).path, group, formats=formats, step=step)
        checkpoint.on_rank_0(group, lambda: self._prune(step))

    def _place(self, step: int) -> WholeFolder:
        return WholeFolder(self._folder / f"step_{step:08d}")

    def _prune(self, newest: int) -> None:
        """Finish interrupted replacements; delete checkpoints beyond `keep` and the remains of
        crashes.
        """
        for step in self.steps():
            self._place(step).settle()
        discard(self._folder.glob(f"step_*{PARTIAL}"))
        steps = [step for step in self.steps() if step != newest]
        for step in steps[: max(0, len(steps) + 1 - self._keep)] if self._keep else ():
            path = self._place(step).path
            try:  # renamed first, so that a kill leaves nothing that looks complete
                path.rename(path.with_name(path.name + PARTIAL))
            except OSError as error:
                logger.warning("%s is too old and cannot be deleted: %s", path, error)
        discard(self._folder.glob(f"step_*{PARTIAL}"))


def _newest_intact(places: Mapping[int, Path], group: Group) -> int:
    """The newest step with an undamaged checkpoint; the oldest one's ValueError if all are
    damaged.
    """
    for step in sorted(places, reverse=True):
        try:
            check_step(places[step], step, group)
        except ValueError as error:
            if step == min(places):
                raise
            if group.rank == 0:
                logger.warning("passing over the checkpoint of step %d: %s", step, error)
        else:
            return step
    raise AssertionError("there is no step")


class _Saving:
    """A checkpoint that a thread writes."""

    def __init__(self, step: int, work: Callable[[], None]) -> None:
        self._step, self._work = step, work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {step}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Wait for the thread; RuntimeError if it could not write the checkpoint."""
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(f"the checkpoint of step {self._step} was not written: {self._error}") from self._error


def _snapshot(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the current values in host memory."""
    return {key: _snapshot(value) if isinstance(value, Mapping) else _copy(value) for key, value in state.items()}


def _copy(value: Tensor) -> Tensor:
    if isinstance(value, TensorShard):
        return TensorShard.of(value.flat.to("cpu", copy=True), value.span, tuple(value.shape))
    return value.detach().to("cpu", copy=True)
