"""Extras: values of the caller in a checkpoint, one for all ranks or one per rank.

    extra.<name>                  a tensor that is equal on all ranks
    extra_of_ranks.<rank>.<name>  one that differs, such as a random state or a position in the data

Values that are not tensors are in the manifest. Nothing is converted: a tensor is loaded into the
same dtype and shape, and a value that JSON would change raises TypeError.
"""

import hashlib
import json
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from zerocast.checkpoint.manifest import SAVES, Manifest
from zerocast.distributed.group import Group

# Prefixes of the keys of tensors.
SAME = "extra"
OF_RANKS = "extra_of_ranks"


def check(extra: Mapping[str, Any] | None) -> None:
    """Raise TypeError for a value that a checkpoint cannot hold exactly."""
    for name, value in (extra or {}).items():
        if not isinstance(name, str):
            raise TypeError(f"names in extra must be str, got {name!r}")
        if not isinstance(value, Tensor) and not _is_plain(value):
            raise TypeError(
                f"extra[{name!r}] is of type {type(value).__name__}: a checkpoint holds tensors, and None, bool, int, float, str, "
                "and lists and dicts of them; turn other values into these (torch.from_numpy(array), list(values))"
            )


def split(extra: Mapping[str, Any], group: Group) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split values into those that are equal on all ranks of the group and those that differ.
    Collective.
    """
    if group.size == 1:
        return dict(extra), {}
    digests = {name: _digest(value) for name, value in extra.items()}
    by_rank: list[dict[str, str]] = group.all_gather_object(digests, f"digests of extra values as this rank {SAVES}")
    equal = {}
    differing = {}
    for name, value in extra.items():
        if all(digests[name] == other.get(name) for other in by_rank):
            equal[name] = value
        else:
            differing[name] = value
    return equal, differing


def state_of(tensors: Mapping[str, Tensor], group: Group, prefix: str) -> dict[str, Any]:
    """Return the entries of tensors in a checkpoint: under `prefix` those that are equal on all
    ranks, and under `<prefix>_of_ranks.<rank>` those of this rank that differ. Collective.
    """
    equal, own = split(tensors, group)
    return {prefix: equal, f"{prefix}_of_ranks": {str(group.rank): own} if own else {}}


def values_of(extra: Mapping[str, Any], group: Group) -> tuple[dict[str, Any], tuple[dict[str, Any], ...]]:
    """Return (the values that are not tensors and are equal on all ranks, for each rank the values
    that differ). Collective.
    """
    equal, own = split({name: value for name, value in extra.items() if not isinstance(value, Tensor)}, group)
    by_rank = group.all_gather_object(own, "values of extra") if group.size > 1 else [own]
    return equal, tuple(by_rank) if any(by_rank) else ()


def take_values(extra: MutableMapping[str, Any], manifest: Manifest, group: Group) -> None:
    """Replace the values in `extra` that are not tensors by the values in the manifest."""
    own = manifest.values_of_ranks[group.rank] if group.rank < len(manifest.values_of_ranks) else {}
    for name, value in extra.items():
        if not isinstance(value, Tensor):
            extra[name] = own[name] if name in own else manifest.values[name]


def problems(extra: Mapping[str, Any], saved: Mapping[str, Any], manifest: Manifest, group: Group) -> list[str]:
    """Return the reasons why values for `extra` cannot be taken from a checkpoint with this
    manifest and the entries `saved` in its metadata.
    """
    found: list[str] = []
    for name, value in extra.items():
        is_tensor = isinstance(value, Tensor)
        ranks_with_tensor = [rank for rank in range(world_of(saved, SAME)) if f"{OF_RANKS}.{rank}.{name}" in saved]
        ranks_with_value = [rank for rank, values in enumerate(manifest.values_of_ranks) if name in values]
        has_tensor = f"{SAME}.{name}" in saved or bool(ranks_with_tensor)
        has_value = name in manifest.values or bool(ranks_with_value)
        ranks = ranks_with_tensor if is_tensor else ranks_with_value
        if not has_tensor and not has_value:
            found.append(f"extra.{name} is missing")
        elif is_tensor and not has_tensor:
            found.append(f"extra.{name} is not a tensor in the checkpoint, expected a tensor")
        elif not is_tensor and not has_value:
            found.append(f"extra.{name} is a tensor in the checkpoint, expected a plain value")
        elif ranks and len(ranks) != group.size:
            found.append(
                f"extra.{name} has a value for each of {len(ranks)} ranks in the checkpoint, but {group.size} ranks load it: "
                "load on the same number of ranks, or remove it from extra and initialize it again"
            )
    return found


def to_overwrite(
    tensors: Mapping[str, Tensor], saved: Mapping[str, Any], prefix: str, rank: int
) -> dict[str, dict[str, Any]]:
    """Return the entries of a state dictionary whose tensors a reader fills. A tensor that differs
    between ranks in the checkpoint is read from the entry of `rank`.
    """
    own = {name: tensor for name, tensor in tensors.items() if f"{prefix}_of_ranks.{rank}.{name}" in saved}
    equal = {name: tensor for name, tensor in tensors.items() if name not in own}
    return {prefix: equal, f"{prefix}_of_ranks": {str(rank): own} if own else {}}


def world_of(saved: Mapping[str, Any], prefix: str) -> int:
    """Return the number of ranks that have tensors that differ between ranks, under a prefix."""
    start = f"{prefix}_of_ranks."
    return len({name.removeprefix(start).partition(".")[0] for name in saved if name.startswith(start)})


def _is_plain(value: Any) -> bool:
    """Return True for a value that JSON stores exactly."""
    if isinstance(value, dict):
        return type(value) is dict and all(type(key) is str and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return type(value) is list and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _digest(value: Any) -> str:
    if not isinstance(value, Tensor):
        return json.dumps(value, sort_keys=True)
    if type(value) is not Tensor and not isinstance(value, torch.nn.Parameter):
        # A subclass such as DTensor is sharded over the ranks: together they have a single value.
        return f"{type(value).__name__} {tuple(value.shape)}"
    plain = value.detach().cpu().contiguous()
    content = plain.view(-1).view(torch.uint8).numpy().tobytes()
    return f"{plain.dtype} {tuple(plain.shape)} {hashlib.sha256(content).hexdigest()}"
