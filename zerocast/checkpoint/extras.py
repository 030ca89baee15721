"""Extras: values of the caller in a checkpoint, one for all ranks or one a rank.

    extra.<name>                  a tensor that all ranks have alike
    extra_of_ranks.<rank>.<name>  one that differs, such as a random state or a position in the data

Values that are no tensors are in the manifest. Nothing is converted: a tensor loads into its own
dtype and shape, and a value that JSON would change is refused.
"""

import hashlib
import json
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from zerocast.checkpoint.manifest import Manifest
from zerocast.distributed.group import Group

SAME, OF_RANKS = "extra", "extra_of_ranks"


def check(extra: Mapping[str, Any] | None) -> None:
    """TypeError for a value that a checkpoint cannot hold exactly."""
    for name, value in (extra or {}).items():
        if not isinstance(name, str):
            raise TypeError(f"names in extra are texts, got {name!r}")
        if not isinstance(value, Tensor) and not _is_plain(value):
            raise TypeError(
                f"extra[{name!r}] is of type {type(value).__name__}: a checkpoint holds tensors, and None, bool, int, float, str, "
                "and lists and dicts of them; turn other values into these (torch.from_numpy(array), list(values))"
            )


def split(extra: Mapping[str, Any], group: Group, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values that all ranks of the group have alike, and those that differ. Collective."""
    if group.size == 1:
        return dict(extra), {}
    digests = {name: _digest(value) for name, value in extra.items()}
    by_rank: list[dict[str, str]] = group.all_gather_object(digests, f"digests of extra values as this rank {what}")
    same = {name for name in digests if all(digests[name] == other.get(name) for other in by_rank)}
    alike = {name: value for name, value in extra.items() if name in same}
    return alike, {name: value for name, value in extra.items() if name not in same}


def state_of(tensors: Mapping[str, Tensor], group: Group, prefix: str, what: str) -> dict[str, Any]:
    """Tensors as a checkpoint holds them: under `prefix` those that ranks have alike, and under
    `<prefix>_of_ranks.<rank>` this rank's own.
    """
    alike, own = split(tensors, group, what)
    return {prefix: alike, f"{prefix}_of_ranks": {str(group.rank): own} if own else {}}


def values_of(extra: Mapping[str, Any], group: Group, what: str) -> tuple[dict[str, Any], tuple[dict[str, Any], ...]]:
    """The values that are no tensors: those that all ranks have alike, and those of each rank."""
    alike, own = split({name: value for name, value in extra.items() if not isinstance(value, Tensor)}, group, what)
    by_rank = group.all_gather_object(own, "values of extra") if group.size > 1 else [own]
    return alike, tuple(by_rank) if any(by_rank) else ()


def take_values(extra: MutableMapping[str, Any], manifest: Manifest, group: Group) -> None:
    """Put the values that are no tensors into `extra`, in place of those of the same names."""
    own = manifest.values_of_ranks[group.rank] if group.rank < len(manifest.values_of_ranks) else {}
    for name, value in extra.items():
        if not isinstance(value, Tensor):
            extra[name] = own[name] if name in own else manifest.values[name]


def problems(extra: Mapping[str, Any], saved: Mapping[str, Any], manifest: Manifest, group: Group) -> list[str]:
    """Why these values cannot be taken from a checkpoint with the entries `saved`."""
    found = []
    for name, value in extra.items():
        is_tensor = isinstance(value, Tensor)
        ranks = _ranks_with(name, saved) if is_tensor else _ranks_with_value(name, manifest)
        one = f"{SAME}.{name}" in saved if is_tensor else name in manifest.values
        if not one and not ranks:
            other = name in manifest.values or _ranks_with_value(name, manifest)
            is_other = bool(other) if is_tensor else f"{SAME}.{name}" in saved or bool(_ranks_with(name, saved))
            kinds = ("no tensor", "a tensor") if is_tensor else ("a tensor", "no tensor")
            found.append(
                f"extra.{name} is {kinds[0]} there and {kinds[1]} here" if is_other else f"extra.{name} is missing"
            )
        elif ranks and len(ranks) != group.size:
            found.append(
                f"extra.{name} has a value for each of {len(ranks)} ranks there, and {group.size} ranks load it: a value of one "
                "rank is not another's, so load on as many ranks, or leave it out of extra and begin it again"
            )
    return found


def to_overwrite(
    tensors: Mapping[str, Tensor], saved: Mapping[str, Any], prefix: str, rank: int
) -> dict[str, dict[str, Any]]:
    """The entries of a state dictionary whose tensors a reader fills: those of `rank` where ranks
    have their own.
    """
    own = {name: one for name, one in tensors.items() if f"{prefix}_of_ranks.{rank}.{name}" in saved}
    alike = {name: one for name, one in tensors.items() if name not in own}
    return {prefix: alike, f"{prefix}_of_ranks": {str(rank): own} if own else {}}


def world_of(saved: Mapping[str, Any], prefix: str) -> int:
    """How many ranks have values of their own under a prefix."""
    front = f"{prefix}_of_ranks."
    return len({name[len(front) :].partition(".")[0] for name in saved if name.startswith(front)})


def _ranks_with(name: str, saved: Mapping[str, Any]) -> list[int]:
    return [rank for rank in range(world_of(saved, SAME)) if f"{OF_RANKS}.{rank}.{name}" in saved]


def _ranks_with_value(name: str, manifest: Manifest) -> list[int]:
    return [rank for rank, values in enumerate(manifest.values_of_ranks) if name in values]


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(type(key) is str and _is_plain(one) for key, one in value.items())
    if isinstance(value, list):
        return type(value) is list and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _digest(value: Any) -> str:
    if not isinstance(value, Tensor):
        return json.dumps(value, sort_keys=True)
    if type(value) is not Tensor and not isinstance(value, torch.nn.Parameter):
        return f"{type(value).__name__} {tuple(value.shape)}"  # sharded over the ranks: one value
    plain = value.detach().cpu().contiguous()
    content = plain.view(-1).view(torch.uint8).numpy().tobytes()
    return f"{plain.dtype} {tuple(plain.shape)} {hashlib.sha256(content).hexdigest()}"
