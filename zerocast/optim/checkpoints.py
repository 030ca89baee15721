"""Checkpoints: a folder with one checkpoint a step, of which the last few are kept; written during training if asked to.

    checkpoints = Checkpoints("run/checkpoints", keep=3, asynchronous=True)
    step = checkpoints.load(optimizer) if checkpoints.steps() else 0
    ...
    checkpoints.save(optimizer, step)        # every so often, on all ranks
    checkpoints.wait()                       # at the end, before the process group goes

An asynchronous save copies this rank's part of the state to host memory (12 bytes an owned element), and a thread writes it, over
a gloo group of its own, while training goes on. The next save, `load` and `wait` wait for it, and raise what it raised.
"""

import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from zerocast.agreement import agree
from zerocast.group import ONE_PROCESS, Group
from zerocast.optim import checkpoint
from zerocast.optim.checkpoint import Checkpointed
from zerocast.optim.sharded_tensor import TensorShard
from zerocast.sources.manifest import LOADS, Stored, check_files

logger = logging.getLogger(__name__)
NAME = re.compile(r"step_(\d{8,})")


class Checkpoints:
    """Checkpoints `step_00000100`, ... in `folder`.

    Args:
        folder: made when it is not there; seen by all ranks.
        keep: how many to keep, the newest; None keeps all. Older ones go when a new one is complete.
        asynchronous: let `save` return as soon as the state is copied.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int | None = 3, asynchronous: bool = False) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep is None or at least 1, got {keep}")
        self._folder, self._keep, self._asynchronous = Path(folder), keep, asynchronous
        self._group: Group | None = None  # of asynchronous saves
        self._saving: _Saving | None = None

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, oldest first. Complete is not undamaged: `load` finds out."""
        if not self._folder.is_dir():
            return []
        matches = [NAME.fullmatch(path.name) for path in self._folder.iterdir() if (path / ".metadata").is_file()]
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self._folder / f"step_{step:08d}"

    def save(self, optimizer: Checkpointed, step: int, extra: Mapping[str, Tensor] | None = None) -> None:
        """Write the state after `step` steps, in place of one of the same step; all ranks call it.

        RuntimeError on every rank, and all older checkpoints kept, when any rank cannot write; asynchronously, at the next `save`,
        `load` or `wait`. `extra` holds a few plain tensors of the caller.
        """
        self.wait()
        state, group = checkpoint.state_of(optimizer, extra), checkpoint.group_of(optimizer)
        formats = checkpoint.formats_of(optimizer)
        if not self._asynchronous:
            self._write(state, step, group, formats)
            return
        if self._group is None:
            self._group = group.duplicate("gloo")  # for host memory; training uses the other one meanwhile
        own, copied = self._group, _snapshot(state)
        self._saving = _Saving(step, lambda: self._write(copied, step, own, formats))

    def wait(self) -> None:
        """Until what is being saved is complete. RuntimeError on every rank if it could not be written."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def load(self, optimizer: Checkpointed, step: int | None = None, extra: Mapping[str, Tensor] | None = None) -> int:
        """Read a checkpoint into the optimizer and its weights; all ranks call it. Returns its step.

        Without `step`, the newest one whose files are what was written; damaged ones are logged and passed over. Raises
        FileNotFoundError when there is none, ValueError when the one asked for is damaged or does not fit, or all are damaged.
        """
        self.wait()
        group = checkpoint.group_of(optimizer)
        steps: list[int] = agree(group, [], None, self.steps(), LOADS)[0]
        if not steps or (step is not None and step not in steps):
            wanted = "complete checkpoint" if step is None else f"checkpoint of step {step}"
            raise FileNotFoundError(f"{self._folder} holds no {wanted}; there are: {steps or 'none'}")
        if step is None:
            step = self._newest_intact(steps, group)
        else:
            check_files(self.path(step), group)
        checkpoint.read(optimizer, self.path(step), extra)
        return step

    def _newest_intact(self, steps: list[int], group: Group) -> int:
        *older, newest = steps
        try:
            check_files(self.path(newest), group)
        except ValueError as error:
            if not older:
                raise
            if group.rank == 0:
                logger.warning("passing over the checkpoint of step %d: %s", newest, error)
            return self._newest_intact(older, group)
        return newest

    def _write(self, state: Mapping[str, Any], step: int, group: Group, formats: Mapping[str, Stored]) -> None:
        checkpoint.write(state, self.path(step), group, replace=True, formats=formats)
        checkpoint.on_rank_0(group, lambda: self._prune(step))

    def _prune(self, newest: int) -> None:
        """Delete what is too old, and what saves that were killed have left."""
        steps = [step for step in self.steps() if step != newest]
        for step in steps[: max(0, len(steps) + 1 - self._keep)] if self._keep else ():
            path = self.path(step)
            try:  # a kill after this leaves nothing that looks whole
                path.rename(path.with_name(path.name + checkpoint.PARTIAL))
            except OSError as error:
                logger.warning("%s is too old and cannot be deleted: %s", path, error)
        for path in self._folder.glob(f"step_*{checkpoint.PARTIAL}"):
            checkpoint.remove(path, ONE_PROCESS)


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
        """Until it is written; RuntimeError if it was not."""
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(f"the checkpoint of step {self._step} was not written: {self._error}") from self._error


def _snapshot(state: Mapping[str, Any]) -> dict[str, Any]:
    """The values of now, in host memory."""
    return {key: _snapshot(value) if isinstance(value, Mapping) else _copy(value) for key, value in state.items()}


def _copy(value: Tensor) -> Tensor:
    if isinstance(value, TensorShard):
        return TensorShard.of(value.flat.to("cpu", copy=True), value.span, tuple(value.shape))
    return value.detach().to("cpu", copy=True)
