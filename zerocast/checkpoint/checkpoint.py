"""Save and load: atomic checkpoints in the format of torch.distributed.checkpoint.

A checkpoint is written to a temporary folder, synced, hashed (`manifest.py`) and only then renamed
(`whole_folder.py`), so a kill or a power failure at any moment leaves either all of it or nothing.
Its files are compared with their hashes before anything is loaded, and loading runs no code from
them. Any number of ranks can load what any other number saved; other tools read the files as plain
tensors.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner

from zerocast.checkpoint import torch_checkpoint
from zerocast.checkpoint.manifest import FileSum, Manifest, Stored, check_files
from zerocast.checkpoint.sources.safe_reader import SafeReader
from zerocast.checkpoint.sources.source import dtype_name
from zerocast.checkpoint.whole_folder import WholeFolder
from zerocast.distributed.agreement import from_rank_0, validate_across_ranks
from zerocast.distributed.group import ONE_PROCESS, Group
from zerocast.formats import FormatSpec
from zerocast.formats.shared_amax import SharedAmax

AnyPath = str | os.PathLike[str]
SAVES = "saves a checkpoint"  # the call, as errors name it when ranks make different ones


class Checkpointed(Protocol):
    """An object whose state a checkpoint holds: a ZeroAdamW or a `zerocast.fsdp2.TrainingState`."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that write and read together; None for one process."""

    @property
    def formats(self) -> Mapping[str, tuple[FormatSpec, torch.dtype]]:
        """Format and nominal dtype of each quantized weight by name; a checkpoint records them."""

    @property
    def shared_amaxes(self) -> Mapping[str, SharedAmax]:
        """The weights that share a tensor amax, by the name of each; recorded too."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors by name, under the keys of `zerocast.optim.state`."""

    def state_to_overwrite(self) -> dict[str, Any]:
        """The same tensors, to be overwritten in place by a reader."""

    def overwriting(self) -> AbstractContextManager[None]:
        """Mark the state as partly written while the body reads into it and calls
        `load_state_dict`.
        """

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Adopt a state whose tensors were loaded."""


def save(optimizer: Checkpointed, path: AnyPath, extra: Mapping[str, Tensor] | None = None) -> None:
    """Write the optimizer's state into `path`, a new or empty folder; all ranks call it.

    Each rank writes its own part. Keys are those of `zerocast.optim.state`, and `extra.<name>` for
    a few plain tensors of the caller. Raises RuntimeError on every rank, and leaves nothing behind,
    if `path` is not empty or any rank cannot write.
    """
    write(state_of(optimizer, extra), Path(path), group_of(optimizer), formats=formats_of(optimizer))


def load(optimizer: Checkpointed, path: AnyPath, extra: Mapping[str, Tensor] | None = None) -> None:
    """Read what `save` wrote, on any number of ranks, and recast the weights; all ranks call it.

    The tensors of `extra` are filled in place. Missing state of delayed scaling is seeded anew.
    Raises ValueError, with nothing changed, for files that differ from what was written and for a
    tensor that is missing on either side or has another shape; pickle.UnpicklingError for metadata
    that would run code. A folder without a manifest, as other programs write it, is not checked in
    advance: a truncated file then raises RuntimeError, and the optimizer must load again before it
    continues.
    """
    check_files(Path(path), group_of(optimizer))
    read(optimizer, Path(path), extra)


def read(optimizer: Checkpointed, path: Path, extra: Mapping[str, Tensor] | None) -> None:
    """Load a checkpoint whose files have been checked already."""
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
        torch_checkpoint.load_masters(state, reader, group, str(path))
        optimizer.load_state_dict(state)


def write(
    state: Mapping[str, Any],
    path: Path,
    group: Group,
    formats: Mapping[str, Stored] | None = None,
    planner: SavePlanner | None = None,
    step: int | None = None,
) -> None:
    """Write a state dictionary as a checkpoint; all ranks of the group call it.

    The manifest records `formats` and `step`. A `planner` may supply the tensors in place of
    `state`. With a `step` the checkpoint replaces what is at `path`; without one an existing folder
    is an error. Raises RuntimeError on every rank, and leaves nothing behind, if any rank cannot
    write.
    """
    folder = WholeFolder(path.absolute())  # "." has no name to write beside
    on_rank_0(group, lambda: _begin(folder, replace=step is not None))
    try:
        torch_checkpoint.save(state, folder.partial, group, planner)
        files = _hash_files(folder.partial, group)
        on_rank_0(group, lambda: _commit(folder, Manifest(files, dict(formats or {}), step)))
    except CheckpointException as error:  # no Exception, and the same on every rank
        _abandon(folder, group)
        if isinstance(error.failures.get(group.rank, (None,))[0], KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise RuntimeError(f"{folder.path} was not written: {torch_checkpoint.reasons(error)}") from error
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
    """The state dictionary that a checkpoint holds."""
    return {**optimizer.state_dict(), "extra": dict(extra or {})}


def formats_of(optimizer: Checkpointed) -> dict[str, Stored]:
    """The formats of quantized weights, which `zerocast inspect` and `convert` read."""
    shares = {name: shared.names for name, shared in optimizer.shared_amaxes.items()}
    return {
        name: Stored(str(fmt), dtype_name(dtype), shares.get(name, ()))
        for name, (fmt, dtype) in optimizer.formats.items()
    }


def group_of(optimizer: Checkpointed) -> Group:
    """The group of ranks that save and load together."""
    return ONE_PROCESS if optimizer.process_group is None else Group.of(optimizer.process_group)


def _begin(folder: WholeFolder, replace: bool) -> None:
    if not replace and folder.holds_anything():
        raise FileExistsError(
            f"{folder.path} is there already: a checkpoint is not overwritten, delete it or choose another place"
        )
    folder.begin()


def _hash_files(folder: Path, group: Group) -> dict[str, FileSum]:
    """The sums of all files, of which each rank hashes a part."""
    names = from_rank_0(group, lambda: sorted(path.name for path in folder.iterdir()), SAVES)
    own, problem = {}, None
    try:
        own = {name: FileSum.of(folder / name) for name in names[group.rank :: group.size]}
    except OSError as error:
        problem = error
    validate_across_ranks(group, [], problem, SAVES)
    parts: list[dict[str, FileSum]] = group.all_gather_object(own, "the sums of a checkpoint's files")
    return {name: sums for part in parts for name, sums in part.items()}


def _commit(folder: WholeFolder, manifest: Manifest) -> None:
    manifest.write(folder.partial)
    folder.commit()


def on_rank_0(group: Group, work: Callable[[], object]) -> None:
    """Run `work` on rank 0 while the others wait; an error is raised on every rank."""
    from_rank_0(group, lambda: work() and None, SAVES)


def _unfit(saved: Mapping[str, Any], prefix: str, state: Mapping[str, Any]) -> list[str]:
    """A problem for each tensor of `state` that the checkpoint lacks or has in another shape."""
    problems = []
    for name, tensor in _leaves(prefix, state):
        found = saved.get(name)
        if not isinstance(found, TensorStorageMetadata):
            problems.append(f"{name} is no tensor there" if found else f"{name} is missing")
        elif found.size != tensor.shape:
            problems.append(f"{name} has shape {tuple(found.size)} there and {tuple(tensor.shape)} here")
    return problems


def _unknown(saved: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """A problem for each master of the checkpoint that the optimizer does not have."""
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
