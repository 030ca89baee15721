"""Save and load: atomic checkpoints in the format of torch.distributed.checkpoint.

A checkpoint is written to a temporary folder, synced, hashed (`manifest.py`) and only then renamed
(`whole_folder.py`), so a kill or a power failure at any moment leaves either all of it or nothing.
Its files are compared with their hashes before anything is loaded, and loading runs no code from
them. Any number of ranks can load what any other number saved; other tools read the files as plain
tensors.
"""

import dataclasses
import logging
import operator
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner

from zerocast.checkpoint import extras, torch_checkpoint
from zerocast.checkpoint.manifest import LOADS, NAME, FileSum, Manifest, Stored, check_files
from zerocast.checkpoint.moments import PREFIX, problems_of_values
from zerocast.checkpoint.sources.safe_reader import SafeReader
from zerocast.checkpoint.sources.source import dtype_name
from zerocast.checkpoint.untrained import BUFFERS, Untrained, other_dtypes
from zerocast.checkpoint.whole_folder import MARKER, WholeFolder
from zerocast.distributed.agreement import from_rank_0, validate_across_ranks
from zerocast.distributed.group import ONE_PROCESS, Group
from zerocast.formats import FormatSpec
from zerocast.formats.shared_amax import SharedAmax

logger = logging.getLogger(__name__)
AnyPath = str | os.PathLike[str]
# The moments of each parameter, by name, that a checkpoint holds: their entries in its metadata.
Kept = Mapping[str, Mapping[str, TensorStorageMetadata]]
UNNUMBERED: Any = object()  # the step of a checkpoint that is no step of a run
SAVES = "saves a checkpoint"  # the call, as errors name it when ranks make different ones


class Checkpointed(Protocol):
    """An object whose state a checkpoint holds: a ZeroAdamW or a `zerocast.fsdp2.TrainingState`."""

    @property
    def param_groups(self) -> Any:
        """The parameter groups; two states of the same parameters are of one run."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that write and read together; None for one process."""

    @property
    def model(self) -> nn.Module | None:
        """The model whose state it is, if it is known."""

    @property
    def frozen(self) -> Mapping[str, Tensor]:
        """Parameters that were given and are not trained, by name; none of a known model."""

    @property
    def formats(self) -> Mapping[str, tuple[FormatSpec, torch.dtype]]:
        """Format and nominal dtype of each quantized weight by name; a checkpoint records them."""

    @property
    def shared_amaxes(self) -> Mapping[str, SharedAmax]:
        """The weights that share a tensor amax, by the name of each; recorded too."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors by name, under the keys of `zerocast.optim.state`."""

    def state_to_overwrite(self, kept: Kept | None = None) -> dict[str, Any]:
        """The same tensors, to be overwritten in place by a reader. Moments that the optimizer has
        not made yet have the keys and shapes of those that are `kept`.
        """

    def check_numbers(self, state_dict: Mapping[str, Any]) -> None:
        """ValueError, on this rank alone, for step counts and hyper-parameters that cannot be."""

    def overwriting(self) -> AbstractContextManager[None]:
        """Mark the state as partly written while the body reads into it and calls
        `load_state_dict`.
        """

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Adopt a state whose tensors were loaded."""


def save(
    optimizer: Checkpointed, path: AnyPath, extra: Mapping[str, Any] | None = None, model: nn.Module | None = None
) -> None:
    """Write the optimizer's state into `path`, a new or empty folder; all ranks call it.

    Each rank writes its own part. Keys are those of `zerocast.optim.state`, of
    `checkpoint/untrained.py` for frozen parameters and buffers of the `model`, and of
    `checkpoint/extras.py` for `extra`: a few tensors or plain values of the caller, one for all
    ranks or one a rank. Raises RuntimeError on every rank, and leaves nothing behind, if `path` is
    not empty or any rank cannot write.
    """
    state, manifest = contents_of(optimizer, extra, model)
    write(state, Path(path), group_of(optimizer), manifest)


def load(
    optimizer: Checkpointed,
    path: AnyPath,
    extra: MutableMapping[str, Any] | None = None,
    model: nn.Module | None = None,
) -> None:
    """Read what `save` wrote, on any number of ranks, and recast the weights; all ranks call it.

    The tensors of `extra` are filled in place, and its other values replaced. Missing state of
    delayed scaling is seeded anew. Raises ValueError, with nothing changed, for files that differ
    from what was written and for a tensor that is missing on either side or has another shape;
    pickle.UnpicklingError for metadata that would run code. A folder without a manifest, as other
    programs write it, is not checked in advance: a truncated file then raises RuntimeError, and the
    optimizer must load again before it continues.
    """
    read(optimizer, Path(path), check_files(Path(path), group_of(optimizer)), extra, model)


def read(
    optimizer: Checkpointed,
    path: Path,
    manifest: Manifest,
    extra: MutableMapping[str, Any] | None,
    model: nn.Module | None,
) -> None:
    """Load a checkpoint whose files were compared with its manifest."""
    reader, group = SafeReader(path), group_of(optimizer)
    metadata = reader.read_metadata()
    saved = metadata.state_dict_metadata
    kept = _kept(saved)
    state = optimizer.state_to_overwrite(kept)
    for name in [name for name in state["zerocast"] if _unfit(saved, f"zerocast.{name}", state["zerocast"][name])]:
        del state["zerocast"][name]
    if not any(name.startswith("optim.") for name in saved):
        raise ValueError(f"{path} holds masters and no optimizer state: zerocast.optim.load_masters takes them")
    rest = Untrained.of(optimizer, model, state["model"])
    beside = rest.to_overwrite(saved, group)
    tensors = {name: value for name, value in (extra or {}).items() if isinstance(value, Tensor)}
    of_caller = extras.to_overwrite(tensors, saved, extras.SAME, group.rank)
    found = extras.problems(extra or {}, saved, manifest, group)
    if not found:
        found = other_dtypes(list(_leaves("", of_caller)), saved) + _unfit(saved, "", of_caller)
    found = (
        _unfit(saved, "", state) + _unfit(saved, "", beside) + rest.problems(saved, beside, manifest.formats) + found
    )
    known = {*state["model"], *rest.plain, *rest.quantized}
    found += _unknown(saved, known | {*manifest.frozen})
    found += _unknown_moments(kept, state["optim"]["state"])
    _raise_unfit(path, found, group)
    torch_checkpoint.load({"optim": _numbers(state["optim"])}, reader, group, str(path), "; nothing has changed")
    try:
        optimizer.check_numbers(state)
    except ValueError as error:
        found.append(str(error))
    unread = None
    try:
        found += problems_of_values(reader, metadata, state["optim"]["state"], group)
    except Exception as error:  # a damaged file can raise any error
        unread = RuntimeError(f"{path} cannot be read to its end; nothing has changed: {error!r}")
    validate_across_ranks(group, [], unread, LOADS)
    _raise_unfit(path, found, group)
    _tell_unread(path, saved, manifest, known, rest, group)
    with optimizer.overwriting(), torch.no_grad():
        torch_checkpoint.load_masters(_merged(state, beside, of_caller), reader, group, str(path))
        rest.take(beside["zerocast"])
        optimizer.load_state_dict(state)
    if extra is not None:
        extras.take_values(extra, manifest, group)


def write(
    state: Mapping[str, Any],
    path: Path,
    group: Group,
    manifest: Manifest | None = None,
    planner: SavePlanner | None = None,
    before_commit: Callable[[], Manifest] | None = None,
) -> None:
    """Write a state dictionary as a checkpoint; all ranks of the group call it.

    The sums of the files are added to the `manifest`, or to the one that `before_commit` returns on
    rank 0 once they are written. A `planner` may supply the tensors in place of `state`. A manifest
    with a step lets the checkpoint replace the one at `path`; otherwise an existing folder is an
    error. Raises RuntimeError on every rank, and leaves nothing behind, if any rank cannot write.
    """
    said = manifest or Manifest()
    folder = WholeFolder(path.absolute(), _never if said.step is None else has_manifest)  # "." has no name
    folder = dataclasses.replace(folder, token=group.broadcast_object(folder.token, "the name of a temporary folder"))
    try:
        on_rank_0(group, folder.begin)
        torch_checkpoint.save(state, folder.partial, group, planner)
        files = _hash_files(folder.partial, group)
        complete = before_commit or (lambda: said)
        on_rank_0(group, lambda: _commit(folder, dataclasses.replace(complete(), files=files)))
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


def contents_of(
    optimizer: Checkpointed, extra: Mapping[str, Any] | None, model: nn.Module | None, step: Any = UNNUMBERED
) -> tuple[dict[str, Any], Manifest]:
    """The state dictionary that a checkpoint holds, and what its manifest says. Collective; an
    error on one rank is raised on all.
    """
    group, given, problem, number = group_of(optimizer), dict(extra or {}), None, None
    state: dict[str, Any] = {}
    rest = Untrained()
    try:
        number = None if step is UNNUMBERED else _checked(step)
        extras.check(given)
        state = optimizer.state_dict()
        optimizer.check_numbers(state)
        rest = Untrained.of(optimizer, model, state["model"])
        rest.check()
    except (RuntimeError, TypeError, ValueError) as error:
        problem = error
    validate_across_ranks(group, [], problem, SAVES, {"the step that is saved": number})
    rest.tell_left_out(optimizer, group.rank)
    values, values_of_ranks = extras.values_of(given, group, SAVES)
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    of_caller = extras.state_of(tensors, group, extras.SAME, SAVES)
    masters = {name: one for name, one in state["model"].items() if name not in rest.quantized}
    manifest = Manifest(
        formats=formats_of(optimizer) | rest.formats(),
        step=number,
        values=values,
        values_of_ranks=values_of_ranks,
        frozen=tuple(sorted({*rest.plain, *rest.quantized})),
        left_out=rest.left_out,
    )
    return _merged({**state, "model": masters}, rest.state(group, SAVES), of_caller), manifest


def _checked(step: Any) -> int:
    """The number of a step. TypeError or ValueError for one that is no whole number from 0."""
    if isinstance(step, bool) or not hasattr(type(step), "__index__"):
        raise TypeError(f"a step is a whole number, got {step!r}, a {type(step).__name__}: save(optimizer, int(step))")
    number = operator.index(step)
    if number < 0:
        raise ValueError(f"a step is 0 or more, got {number}: a checkpoint is of the state after so many steps")
    return number


def _merged(state: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    merged = {key: dict(value) for key, value in state.items()}
    for other in others:
        for key, value in other.items():
            merged[key] = {**merged.get(key, {}), **value}
    return merged


def formats_of(optimizer: Checkpointed) -> dict[str, Stored]:
    """The formats of quantized weights, which `zerocast inspect` and `export` read."""
    shares = {name: shared.names for name, shared in optimizer.shared_amaxes.items()}
    return {
        name: Stored(str(fmt), dtype_name(dtype), shares.get(name, ()))
        for name, (fmt, dtype) in optimizer.formats.items()
    }


def group_of(optimizer: Checkpointed) -> Group:
    """The group of ranks that save and load together."""
    return ONE_PROCESS if optimizer.process_group is None else Group.of(optimizer.process_group)


def _never(path: Path) -> bool:
    return False


def has_manifest(path: Path) -> bool:
    """True for a folder that has a manifest: other programs write none."""
    return (path / NAME).is_file()


def _hash_files(folder: Path, group: Group) -> dict[str, FileSum]:
    """The sums of all files, of which each rank hashes a part."""
    names = from_rank_0(group, lambda: sorted(path.name for path in folder.iterdir() if path.name != MARKER), SAVES)
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
        elif tensor.is_floating_point() and not found.properties.dtype.is_floating_point:
            problems.append(f"{name} is {found.properties.dtype} there and {tensor.dtype} here")
    return problems


def _kept(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The entries of the moments of each parameter, by its name."""
    kept: dict[str, dict[str, Any]] = {}
    for path, entry in saved.items():
        if path.startswith(PREFIX):
            name, _, key = path.removeprefix(PREFIX).rpartition(".")
            kept.setdefault(name, {})[key] = entry
    return kept


def _numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of one element in a nested state: step counts, hyper-parameters and marks."""
    nested = {key: _numbers(value) for key, value in state.items() if isinstance(value, Mapping)}
    return nested | {key: one for key, one in state.items() if isinstance(one, Tensor) and one.dim() == 0}


def _unknown_moments(kept: Kept, state: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A problem for each moment of the checkpoint that the optimizer here does not keep."""
    return [
        f"{PREFIX}{name}.{key} is there and not kept here"
        for name, moments in state.items()
        for key in kept.get(name, {})
        if key not in moments
    ]


def _raise_unfit(path: Path, found: list[str], group: Group) -> None:
    """ValueError on every rank if any has found a problem."""
    problem = ValueError(f"{path} does not fit this optimizer: {'; '.join(found[:4])}") if found else None
    validate_across_ranks(group, [], problem, LOADS)


def _unknown(saved: Mapping[str, Any], known: set[str]) -> list[str]:
    """A problem for each master of the checkpoint that the optimizer does not have."""
    names = [name.removeprefix("model.") for name in saved if name.startswith("model.")]
    return [f"model.{name} is there and is no parameter of the optimizer here" for name in names if name not in known]


def _tell_unread(
    path: Path, saved: Mapping[str, Any], manifest: Manifest, known: set[str], rest: Untrained, group: Group
) -> None:
    """Log frozen parameters and buffers of the checkpoint that are not loaded."""
    left = [name for name in manifest.frozen if name not in known]
    buffers = {name.split(".", 1)[1] for name in saved if name.startswith(f"{BUFFERS}.")}
    left += sorted(buffers - {*rest.buffers})
    if left and group.rank == 0:
        logger.warning(
            "%s also holds %d frozen parameters and buffers that are not loaded, the first is %s: pass model= to load them",
            path,
            len(left),
            left[0],
        )


def _leaves(prefix: str, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from _leaves(name, value)
        else:
            yield name, value
