"""Checkpoints of a ZeroAdamW on disk: torch.distributed.checkpoint, whole or not there, read without running what they carry.

A checkpoint is written beside its place, brought to the disk, hashed (`manifest.py`), and only then
renamed (`whole_folder.py`): a kill or a power failure at any moment leaves the whole of it or none. It
is checked against its hashes before anything is loaded. Any number of ranks can load what any other
number saved, and other tools read the files as plain tensors.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner

from zerocast.checkpoint.clear_writer import ClearWriter, reasons
from zerocast.checkpoint.sources.manifest import FileSum, Manifest, Stored, check_files
from zerocast.checkpoint.sources.safe_reader import SafeReader
from zerocast.checkpoint.sources.source import dtype_name
from zerocast.checkpoint.whole_folder import WholeFolder
from zerocast.distributed.agreement import from_rank_0, validate_across_ranks
from zerocast.distributed.group import ONE_PROCESS, Group
from zerocast.formats import FormatSpec

AnyPath = str | os.PathLike[str]
SAVES = "saves a checkpoint"  # what ranks are in the middle of, if not in the same call


class Checkpointed(Protocol):
    """What has a state that checkpoints hold: a ZeroAdamW, or `zerocast.fsdp2.TrainingState`."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that write and read together; None for one process."""

    @property
    def formats(self) -> Mapping[str, tuple[FormatSpec, torch.dtype]]:
        """Format and nominal dtype of each quantized weight by name; a checkpoint notes them."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors by name, under the keys of `zerocast.optim.state`."""

    def state_to_overwrite(self) -> dict[str, Any]:
        """The same, for a reader that fills it."""

    def overwriting(self) -> AbstractContextManager[None]:
        """Within, a reader does so, and `load_state_dict` takes over what it read."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state that was loaded."""


def save(optimizer: Checkpointed, path: AnyPath, extra: Mapping[str, Tensor] | None = None) -> None:
    """Write the optimizer's state into `path`, a new or empty folder, every rank its part; `extra` holds a few plain tensors.

    All ranks call it. Keys are those of `zerocast.optim.state`, and `extra.<name>`. Raises RuntimeError on every rank, and leaves
    nothing behind, when `path` holds anything already or any rank cannot write.
    """
    write(state_of(optimizer, extra), Path(path), group_of(optimizer), formats=formats_of(optimizer))


def load(optimizer: Checkpointed, path: AnyPath, extra: Mapping[str, Tensor] | None = None) -> None:
    """Read what `save` wrote, on any number of ranks, and make the weights from it; `extra` is filled in place.

    All ranks call it. Raises ValueError, with nothing changed, for files that are not what was written and for a tensor that is
    missing here or there or has another shape, pickle.UnpicklingError for metadata that would run code. Without a manifest, as
    other programs leave it, a file that breaks off is found on the way: RuntimeError, and then the optimizer must load again before
    it goes on. State of delayed scaling that is missing is seeded anew.
    """
    check_files(Path(path), group_of(optimizer))
    read(optimizer, Path(path), extra)


def read(optimizer: Checkpointed, path: Path, extra: Mapping[str, Tensor] | None) -> None:
    """What `load` does once the files are known to be what was written."""
    reader, group = SafeReader(path), group_of(optimizer)
    saved = reader.read_metadata().state_dict_metadata
    state = {**optimizer.state_to_overwrite(), "extra": dict(extra or {})}
    for name in [name for name in state["zerocast"] if _unfit(saved, f"zerocast.{name}", state["zerocast"][name])]:
        del state["zerocast"][name]
    if not any(name.startswith("optim.") for name in saved):
        raise ValueError(f"{path} holds masters and no optimizer state: zerocast.optim.load_masters takes them")
    problems = _unfit(saved, "", state) + _unknown(saved, state)
    if problems:
        raise ValueError(f"{path} does not fit this optimizer: {'; '.join(problems[:4])}")
    with optimizer.overwriting():
        try:
            with _without_process_group_warning():
                state_dict_loader.load(
                    state, storage_reader=reader, process_group=group.handle, no_dist=group.handle is None
                )
        except CheckpointException as error:  # no Exception, and the same on every rank
            raise RuntimeError(
                f"{path} cannot be read to its end; masters are now partly what it holds: {reasons(error)}"
            ) from error
        optimizer.load_state_dict(state)


def write(
    state: Mapping[str, Any],
    path: Path,
    group: Group,
    formats: Mapping[str, Stored] | None = None,
    planner: SavePlanner | None = None,
    step: int | None = None,
) -> None:
    """Write a state dictionary as a checkpoint. RuntimeError on every rank of the group if any cannot, with nothing left behind.

    `formats` are noted in the manifest; a `planner` may find the tensors elsewhere than in `state`.
    A `step` is noted too, and the checkpoint then takes the place of what is at `path`; without one
    that is an error.
    """
    folder = WholeFolder(path.absolute())  # "." has no name to write beside
    on_rank_0(group, lambda: _begin(folder, replace=step is not None))
    try:
        with _without_process_group_warning():
            state_dict_saver.save(
                dict(state),
                storage_writer=ClearWriter(folder.partial),
                planner=planner,
                process_group=group.handle,
                no_dist=group.handle is None,
            )
        files = _hash_files(folder.partial, group)
        on_rank_0(group, lambda: _commit(folder, Manifest(files, dict(formats or {}), step)))
    except CheckpointException as error:  # no Exception, and the same on every rank
        _abandon(folder, group)
        if isinstance(error.failures.get(group.rank, (None,))[0], KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise RuntimeError(f"{folder.path} was not written: {reasons(error)}") from error
    except Exception as error:
        _abandon(folder, group)
        raise RuntimeError(f"{folder.path} was not written: {error}") from error
    except KeyboardInterrupt:
        _abandon(folder, group)
        raise


def _abandon(folder: WholeFolder, group: Group) -> None:
    if group.rank == 0:
        folder.abandon()


def state_of(optimizer: Checkpointed, extra: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """What a checkpoint holds."""
    return {**optimizer.state_dict(), "extra": dict(extra or {})}


def formats_of(optimizer: Checkpointed) -> dict[str, Stored]:
    """The formats of quantized weights, for whoever looks at the checkpoint later."""
    return {name: Stored(str(fmt), dtype_name(dtype)) for name, (fmt, dtype) in optimizer.formats.items()}


def group_of(optimizer: Checkpointed) -> Group:
    """The ranks that write and read together."""
    return ONE_PROCESS if optimizer.process_group is None else Group.of(optimizer.process_group)


def _begin(folder: WholeFolder, replace: bool) -> None:
    if not replace and folder.holds_anything():
        raise FileExistsError(
            f"{folder.path} is there already: a checkpoint is not overwritten, delete it or choose another place"
        )
    folder.begin()


def _hash_files(folder: Path, group: Group) -> dict[str, FileSum]:
    """Of all files, each rank some of them."""
    names = from_rank_0(group, lambda: sorted(path.name for path in folder.iterdir()), SAVES)
    own, problem = {}, None
    try:
        own = {name: FileSum.of(folder / name) for name in names[group.rank :: group.size]}
    except OSError as error:
        problem = error
    parts: list[dict[str, FileSum]] = validate_across_ranks(group, [], problem, own, SAVES)
    return {name: sums for part in parts for name, sums in part.items()}


def _commit(folder: WholeFolder, manifest: Manifest) -> None:
    manifest.write(folder.partial)
    folder.commit()


def on_rank_0(group: Group, work: Callable[[], object]) -> None:
    """Run on rank 0 while the others wait; what it raises is raised everywhere."""
    from_rank_0(group, lambda: work() and None, SAVES)


def _unfit(saved: Mapping[str, Any], prefix: str, state: Mapping[str, Any]) -> list[str]:
    """What of `state` cannot be read from a checkpoint with this metadata."""
    problems = []
    for name, tensor in _leaves(prefix, state):
        found = saved.get(name)
        if not isinstance(found, TensorStorageMetadata):
            problems.append(f"{name} is no tensor there" if found else f"{name} is missing")
        elif found.size != tensor.shape:
            problems.append(f"{name} has shape {tuple(found.size)} there and {tuple(tensor.shape)} here")
    return problems


def _unknown(saved: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Masters of the checkpoint that nothing here takes."""
    known = {f"model.{name}" for name in state["model"]}
    unknown = [name for name in saved if name.startswith("model.") and name not in known]
    return [f"{name} is there and is no parameter of the optimizer here" for name in unknown]


def _leaves(prefix: str, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from _leaves(name, value)
        else:
            yield name, value


@contextlib.contextmanager
def _without_process_group_warning() -> Iterator[None]:
    """One process without a process group is an ordinary case here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
