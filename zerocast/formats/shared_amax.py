"""Groups of weights that share one tensor amax, because inference engines fuse their products.

An engine that concatenates query, key and value keeps one global scale for the three. If their
scales differ, it takes one of them and decodes the others wrongly. Weights that share the largest
of their amaxes have equal scales from the start.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from zerocast.formats.spec import AmaxPolicy, FormatSpec

K = TypeVar("K")
# Globs of parameter names, one inner tuple per kind of group.
Patterns = tuple[tuple[str, ...], ...]

PRESETS: Mapping[str, Patterns] = {
    "llama": (
        ("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"),
        ("*.gate_proj.weight", "*.up_proj.weight"),
    ),
}


@dataclass(frozen=True)
class SharedAmax:
    """The names of the weights that share one tensor amax."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(self.names)


def patterns_of(share_amax: str | Sequence[Sequence[str]]) -> Patterns:
    """Return the patterns of a preset, or the given groups of patterns as tuples. Raises ValueError
    for an unknown preset and for a group with fewer than two patterns.
    """
    if isinstance(share_amax, str):
        if share_amax not in PRESETS:
            raise ValueError(f"share_amax is one of {', '.join(PRESETS)}, or groups of patterns; got {share_amax!r}")
        return PRESETS[share_amax]
    groups = tuple(tuple(group) for group in share_amax)
    for group in groups:
        if len(group) < 2 or any(not isinstance(pattern, str) for pattern in group):
            raise ValueError(f"a group of share_amax has two patterns or more, got {group!r}")
    return groups


def groups_of(patterns: Patterns, names: Iterable[str]) -> list[SharedAmax]:
    """Return the weights that match patterns of one group with the same text in place of the
    `*`.
    """
    # (index of the group of patterns, text in place of each "*") -> names of the weights.
    members_of: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for name in names:
        for number, group in enumerate(patterns):
            match = next((match for pattern in group if (match := _match(pattern, name))), None)
            if match is not None:
                members_of.setdefault((number, match.groups()), []).append(name)
                break
    return [SharedAmax(tuple(members)) for members in members_of.values() if len(members) > 1]


def check_group(group: SharedAmax, formats: Mapping[str, FormatSpec]) -> bool:
    """Return True if the weights of a group have a tensor amax to share. Raises ValueError if their
    formats differ, and for delayed scaling, where scales come from the amax history of each weight.
    """
    # A dict instead of a set, so that the error names the formats in the order of the weights.
    kinds = list(dict.fromkeys(formats[name] for name in group.names))
    if len(kinds) > 1:
        raise ValueError(
            f"{group} share a tensor amax but have the formats {' and '.join(map(str, kinds))}: weights that an engine fuses "
            "must have the same format"
        )
    if kinds[0].amax_policy is AmaxPolicy.DELAYED:
        raise ValueError(
            f"{group} use {kinds[0]}, whose scales come from the amax history of each weight, so they cannot share an "
            "amax: use fp8_current"
        )
    return kinds[0].has_tensor_amax


def groups_cast_together(weights: Mapping[K, tuple[SharedAmax | None, FormatSpec]]) -> list[list[K]]:
    """Return the keys of the weights in each group that shares a tensor amax. `weights` are all
    weights whose amaxes one all-reduce covers, each with its group and format.

    Raises ValueError if a weight of a group is missing, since its amax is then reduced elsewhere,
    and for invalid groups (`check_group`).
    """
    members_of: dict[SharedAmax, list[K]] = {}
    for key, (group, _) in weights.items():
        if group is not None:
            members_of.setdefault(group, []).append(key)
    shared = []
    for group, members in members_of.items():
        if len(members) != len(group.names):
            raise ValueError(
                f"{len(members)} of the weights {group} are cast in this plan, but {len(group.names)} share a tensor amax: cast "
                "them in one plan, over one group of ranks"
            )
        formats = {name: weights[key][1] for name, key in zip(group.names, members, strict=True)}
        if check_group(group, formats):
            shared.append(members)
    return shared


def _match(pattern: str, name: str) -> re.Match[str] | None:
    return re.fullmatch("(.*)".join(re.escape(part) for part in pattern.split("*")), name)
