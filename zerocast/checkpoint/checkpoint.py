"""Save and load: atomic checkpoints in the format of torch.distributed.checkpoint.

A checkpoint is written to a temporary folder, synced, hashed (`manifest.py`) and only then renamed
(`whole_folder.py`), so a kill or a power failure at any moment leaves either the complete
checkpoint or nothing. Its files are compared with their hashes before anything is loaded, and
loading runs no code from them. Any number of ranks can load what any other number saved; other
tools read the files as plain tensors.
"""

import copy
import dataclasses
import logging
import operator
import secrets
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner

from zerocast.checkpoint import extras, torch_checkpoint
from zerocast.checkpoint.checkpointed import Checkpointed, SavedMoments
from zerocast.checkpoint.manifest import LOADS, SAVES, FileSum, Manifest, Stored, check_files
from zerocast.checkpoint.moments import MOMENTS, PREFIX, problems_of_values
from zerocast.checkpoint.sources.dcp import SafeReader
from zerocast.checkpoint.store import AnyPath, Location, as_location
from zerocast.checkpoint.store_folder import folder_at
from zerocast.checkpoint.untrained import BUFFERS, Untrained, leaves, other_dtypes
from zerocast.checkpoint.whole_folder import check_written
from zerocast.distributed.agreement import first_of, from_rank_0, together, validate_across_ranks
from zerocast.distributed.group import ONE_PROCESS, Group
from zerocast.formats.element import dtype_name

logger = logging.getLogger(__name__)
# The step of a checkpoint that does not belong to a numbered series.
UNNUMBERED: Any = object()
# A setting that ranks compare: else some of them would lose or keep their buffers.
MODEL_IS_PASSED = "whether model= is passed"


def save(
    optimizer: Checkpointed, path: AnyPath, extra: Mapping[str, Any] | None = None, model: nn.Module | None = None
) -> None:
    """Write the optimizer's state into `path`, a new or empty folder, or the URL of one that fsspec
    opens; all ranks call it.

    Each rank writes its own part. The keys are listed in `zerocast.optim.state`, in
    `checkpoint/untrained.py` for frozen parameters and buffers of the `model`, and in
    `checkpoint/extras.py` for `extra`: a few tensors or plain values of the caller, one for all
    ranks or one per rank. Raises RuntimeError on every rank, and leaves nothing behind, if `path`
    is not empty or any rank cannot write.
    """
    state, manifest = contents_of(optimizer, extra, model)
    write(state, as_location(path), group_of(optimizer), manifest)


def load(
    optimizer: Checkpointed,
    path: AnyPath,
    extra: MutableMapping[str, Any] | None = None,
    model: nn.Module | None = None,
) -> None:
    """Read a checkpoint of `save`, on any number of ranks, and recast the weights; all ranks call
    it.

    The tensors of `extra` are filled in place, and its other values replaced. Missing state of
    delayed scaling is computed from the masters. Raises ValueError, with nothing changed, for files
    that differ from the written ones and for a tensor that is missing on either side or has a
    different shape; pickle.UnpicklingError for metadata that would run code. A folder without a
    manifest, as other programs write it, is not checked in advance: a truncated file then raises
    RuntimeError, and the optimizer must load again before it continues. At a URL a folder without a
    manifest is not a complete checkpoint, and raises ValueError.
    """
    location = as_location(path)
    read(optimizer, location, check_files(location, group_of(optimizer)), extra, model)


def read(
    optimizer: Checkpointed,
    path: Location,
    manifest: Manifest,
    extra: MutableMapping[str, Any] | None,
    model: nn.Module | None,
) -> None:
    """Load a checkpoint whose files were compared with its manifest."""
    reader = SafeReader(path)
    group = group_of(optimizer)

    def prepare() -> tuple[Metadata, dict[str, Any]]:
        metadata = reader.read_metadata()
        return metadata, optimizer.state_to_overwrite(_moments_of(metadata.state_dict_metadata))

    # The tensors that a reader is to fill: of the optimizer, of untrained parameters and buffers,
    # and of the caller.
    metadata, state = together(group, prepare, LOADS)
    saved = metadata.state_dict_metadata
    delayed_scaling = state["zerocast"]
    for name in list(delayed_scaling):
        if _unfit(saved, f"zerocast.{name}", delayed_scaling[name]):
            # Missing state of delayed scaling is computed from the masters.
            del delayed_scaling[name]
    if not any(name.startswith("optim.") for name in saved):
        raise ValueError(f"{path} has masters but no optimizer state: load them with zerocast.optim.load_masters")
    untrained = Untrained.collect(optimizer, model, state["model"])
    untrained_state = untrained.to_overwrite(saved, group)
    extra_tensors = {name: value for name, value in (extra or {}).items() if isinstance(value, Tensor)}
    extra_state = extras.to_overwrite(extra_tensors, saved, extras.SAME, group.rank)

    # Compare them with the metadata before anything is read.
    extra_problems = extras.problems(extra or {}, saved, manifest, group)
    if not extra_problems:
        extra_problems = other_dtypes(extra_state, saved) + _unfit(saved, "", extra_state)
    known = {*state["model"], *untrained.plain, *untrained.quantized}
    problems = [
        *_unfit(saved, "", state),
        *_unfit(saved, "", untrained_state),
        *untrained.problems(saved, untrained_state, manifest.formats),
        *extra_problems,
        *_unknown_parameters(saved, known | {*manifest.frozen}),
        *_unknown_moments(_moments_of(saved), state["optim"]["state"]),
    ]
    _raise_unfit(path, problems, group, {MODEL_IS_PASSED: model is not None})

    _check_values(optimizer, state, reader, metadata, path, group)
    _log_unread(path, saved, manifest, known, untrained, state["optim"]["state"], group)

    with optimizer.overwriting(), torch.no_grad():
        torch_checkpoint.load_masters(_merged(state, untrained_state, extra_state), reader, group, str(path))
        untrained.take(untrained_state["zerocast"])
        optimizer.load_state_dict(state)
    if extra is not None:
        extras.take_values(extra, manifest, group)


def _check_values(
    optimizer: Checkpointed, state: dict[str, Any], reader: SafeReader, metadata: Metadata, path: Location, group: Group
) -> None:
    """Read the values of step counts, hyperparameters and moments, before masters change. Raises
    ValueError on every rank for impossible ones, RuntimeError for a file that cannot be read.
    """
    torch_checkpoint.load({"optim": _numbers(state["optim"])}, reader, group, str(path), "; nothing has changed")
    problems: list[str] = []
    unreadable = None
    try:
        optimizer.check_numbers(state)
    except ValueError as error:
        problems.append(str(error))
    try:
        problems += problems_of_values(reader, metadata, state["optim"]["state"], group)
    except Exception as error:
        # A damaged file can raise any error.
        unreadable = RuntimeError(f"{path} cannot be read to its end; nothing has changed: {error!r}")
    validate_across_ranks(group, [], unreadable, LOADS)
    _raise_unfit(path, problems, group)


def write(
    state: Mapping[str, Any],
    path: Location,
    group: Group,
    manifest: Manifest,
    planner: SavePlanner | None = None,
    before_commit: Callable[[], Manifest] | None = None,
) -> None:
    """Write a state dictionary as a checkpoint; all ranks of the group call it.

    The manifest is `manifest`, or the one that `before_commit` returns on rank 0 once the files are
    written; their sums are added to it. A `planner` may supply the tensors in place of `state`. A
    checkpoint with a step in its manifest may replace the one at `path`; otherwise an existing
    folder is an error. Raises RuntimeError on every rank, and leaves nothing behind, if any rank
    cannot write.
    """
    token = group.broadcast_object(secrets.token_hex(8), "the name of a temporary folder")
    # The path is made absolute since "." has no name to which a suffix could be added.
    folder = folder_at(path.absolute(), token, replaces_checkpoints=manifest.step is not None)

    def commit(files: dict[str, FileSum]) -> None:
        final_manifest = manifest if before_commit is None else before_commit()
        check_written(folder.partial, {name: sums.nbytes for name, sums in files.items()})
        dataclasses.replace(final_manifest, files=files).write(folder.partial)
        folder.commit()

    try:
        partial = from_rank_0(group, folder.begin, SAVES)
        files = _of_all_ranks(torch_checkpoint.save(state, partial, group, planner), group)
        from_rank_0(group, lambda: commit(files), SAVES)
    # A CheckpointException is not an Exception, and it is the same on every rank.
    except (CheckpointException, Exception, KeyboardInterrupt) as error:
        if group.rank == 0:
            folder.abandon()
        if isinstance(error, KeyboardInterrupt):
            raise
        reason = str(error)
        if isinstance(error, CheckpointException):
            if isinstance(error.failures.get(group.rank, (None,))[0], KeyboardInterrupt):
                raise KeyboardInterrupt from error
            reason = torch_checkpoint.reasons(error)
        raise RuntimeError(f"{folder.path} was not written: {reason}") from error


def contents_of(
    optimizer: Checkpointed, extra: Mapping[str, Any] | None, model: nn.Module | None, step: Any = UNNUMBERED
) -> tuple[dict[str, Any], Manifest]:
    """Return the state dictionary and the manifest of a checkpoint. Collective; an error on one
    rank is raised on all.
    """
    group = group_of(optimizer)
    problem = None
    step_number = None
    state: dict[str, Any] = {}
    untrained = Untrained()
    try:
        step_number = None if step is UNNUMBERED else _checked_step(step)
        extras.check(extra)
        # An asynchronous save writes them later, when the caller may have changed its lists.
        extra = {
            name: value if isinstance(value, Tensor) else copy.deepcopy(value) for name, value in (extra or {}).items()
        }
        state = optimizer.state_dict()
        optimizer.check_numbers(state)
        untrained = Untrained.collect(optimizer, model, state["model"])
        untrained.check()
    except (RuntimeError, TypeError, ValueError) as error:
        problem = error
    settings = {"the step that is saved": step_number, MODEL_IS_PASSED: model is not None}
    validate_across_ranks(group, [], problem, SAVES, settings)
    extra = extra or {}
    untrained.log_left_out(optimizer, group.rank)
    values, values_of_ranks = extras.values_of(extra, group)
    extra_tensors = {name: value for name, value in extra.items() if isinstance(value, Tensor)}
    extra_state = extras.state_of(extra_tensors, group, extras.SAME)
    masters = {name: master for name, master in state["model"].items() if name not in untrained.quantized}
    manifest = Manifest(
        formats=formats_of(optimizer) | untrained.formats(),
        step=step_number,
        values=values,
        values_of_ranks=values_of_ranks,
        frozen=tuple(sorted({*untrained.plain, *untrained.quantized})),
        left_out=untrained.left_out,
    )
    return _merged({**state, "model": masters}, untrained.state(group), extra_state), manifest


def _checked_step(step: Any) -> int:
    """Return the step as an int. Raises TypeError or ValueError unless it is a non-negative
    integer.
    """
    if isinstance(step, bool) or not hasattr(type(step), "__index__"):
        raise TypeError(f"a step is an integer, got {step!r}, a {type(step).__name__}: save(optimizer, int(step))")
    number = operator.index(step)
    if number < 0:
        raise ValueError(f"a step is 0 or more, got {number}: it is the number of steps that the state has taken")
    return number


def _merged(state: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dictionary with the entries of all, merged at its first two levels."""
    merged = {key: dict(value) for key, value in state.items()}
    for other in others:
        for key, value in other.items():
            merged[key] = {**merged.get(key, {}), **value}
    return merged


def formats_of(optimizer: Checkpointed) -> dict[str, Stored]:
    """Return the formats of quantized weights for a manifest, from which `zerocast inspect` and
    `export` read them.
    """
    shares = {name: shared.names for name, shared in optimizer.shared_amaxes.items()}
    return {
        name: Stored(str(fmt), dtype_name(dtype), shares.get(name, ()))
        for name, (fmt, dtype) in optimizer.formats.items()
    }


def group_of(optimizer: Checkpointed) -> Group:
    """Return the group of ranks that save and load together."""
    return ONE_PROCESS if optimizer.process_group is None else Group.of(optimizer.process_group)


def _of_all_ranks(own_sums: Mapping[str, FileSum], group: Group) -> dict[str, FileSum]:
    """Return the sums of the files of all ranks. Collective."""
    sums: dict[str, FileSum] = {}
    for sums_of_rank in group.all_gather_object(own_sums, "the sums of a checkpoint's files"):
        sums |= sums_of_rank
    return sums


def _unfit(saved: Mapping[str, Any], prefix: str, state: Mapping[str, Any]) -> list[str]:
    """Return a problem for each tensor of `state` that the checkpoint lacks, or has with a
    different shape or with a dtype that would lose values. Integers, such as codes, are only read
    with the same dtype.
    """
    problems = []
    for name, tensor in leaves(prefix, state):
        entry = saved.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{name} is not a tensor in the checkpoint" if entry else f"{name} is missing")
        elif entry.size != tensor.shape:
            problems.append(f"{name} has shape {tuple(entry.size)} in the checkpoint, expected {tuple(tensor.shape)}")
        else:
            dtype = entry.properties.dtype
            are_floating_point = dtype.is_floating_point and tensor.is_floating_point()
            if dtype != tensor.dtype and not are_floating_point:
                problems.append(f"{name} is {dtype} in the checkpoint, expected {tensor.dtype}")
    return problems


def _moments_of(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the entries of moments in the metadata of a checkpoint, by parameter."""
    moments: dict[str, dict[str, Any]] = {}
    for path, entry in saved.items():
        if path.startswith(PREFIX):
            name, _, key = path.removeprefix(PREFIX).rpartition(".")
            moments.setdefault(name, {})[key] = entry
    return moments


def _numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the step counts, hyperparameters and flags of a nested state. Moments of parameters
    without dimensions are scalar tensors, too, but are not included: they are views of the moments
    in use.
    """
    numbers: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            numbers[key] = _numbers(value)
        elif isinstance(value, Tensor) and value.dim() == 0 and key not in MOMENTS:
            numbers[key] = value
    return numbers


def _unknown_moments(saved_moments: SavedMoments, state: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a problem for each moment of the checkpoint that this optimizer does not keep."""
    return [
        f"{PREFIX}{name}.{key} is in the checkpoint, but this optimizer does not keep it"
        for name, moments in state.items()
        for key in saved_moments.get(name, {})
        if key not in moments
    ]


def _unknown_parameters(saved: Mapping[str, Any], known: set[str]) -> list[str]:
    """Return a problem for each parameter of the checkpoint that neither optimizer nor model
    has.
    """
    names = [name.removeprefix("model.") for name in saved if name.startswith("model.")]
    return [
        f"model.{name} is in the checkpoint, but not a parameter of this optimizer"
        for name in names
        if name not in known
    ]


def _raise_unfit(
    path: Location, problems: list[str], group: Group, settings: Mapping[str, object] | None = None
) -> None:
    """Raise ValueError on every rank if any rank has problems or settings differ. Collective."""
    error = ValueError(f"{path} does not fit this optimizer: {first_of(problems, '; ')}") if problems else None
    validate_across_ranks(group, [], error, LOADS, settings)


def _log_unread(
    path: Location,
    saved: Mapping[str, Any],
    manifest: Manifest,
    known: set[str],
    untrained: Untrained,
    state: Mapping[str, Any],
    group: Group,
) -> None:
    """Log frozen parameters, buffers, and moments of the checkpoint that are not loaded. `state`
    are the moments that are, keyed by parameter.
    """
    unread = [name for name in manifest.frozen if name not in known]
    buffers = {name.split(".", 1)[1] for name in saved if name.startswith(f"{BUFFERS}.")}
    unread += sorted(buffers - {*untrained.buffers})
    if unread and group.rank == 0:
        logger.warning(
            "%s also holds %d frozen parameters and buffers that are not loaded, the first is %s: pass model= to load them",
            path,
            len(unread),
            unread[0],
        )
    others = sorted({*_moments_of(saved)} - {*state})
    if others and group.rank == 0:
        logger.warning(
            "%s also holds moments of %d parameters that are not loaded, the first is %s: no optimizer that was passed trains it",
            path,
            len(others),
            others[0],
        )
