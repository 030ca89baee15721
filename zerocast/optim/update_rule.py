"""UpdateRule: the hyper-parameters of a parameter group, by what updates the group.

It tells which values are valid, which values ranks compare, and which ones a state holds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor

COMMON = ("lr", "eps", "weight_decay")
ADJUSTMENTS = (None, "original", "match_rms_adamw")
MOST_STEPS = 99  # torch's own bound


@dataclass(frozen=True)
class UpdateRule:
    """What updates a parameter group.

    Attributes:
        name: of the update, for messages.
        numbers: hyper-parameters that are numbers from 0 on; a state holds them.
        others: the ones of other kinds, each with what is valid for it.
    """

    name: str
    numbers: tuple[str, ...]
    others: Mapping[str, Callable[[Any], bool]]

    def check(self, group: Mapping[str, Any], wait: bool = True) -> None:
        """ValueError or TypeError for hyper-parameters that are out of range. Without `wait`,
        tensors on a device pass unread, since a step does not wait for the device.
        """
        names = (*self.numbers, *self.others)
        values = {name: group[name] if wait else _on_host(group[name]) for name in names}
        for name in self.numbers:
            if not isinstance(values[name], (Real, Tensor)):
                raise TypeError(f"{name} is a number, got {values[name]!r}")
        for name in self.numbers:
            if not 0.0 <= values[name] < math.inf:
                raise ValueError(f"{name} is out of range: {values[name]}")
        for name, is_valid in self.others.items():
            if not is_valid(values[name]):
                raise ValueError(f"{name} is out of range: {values[name]}")

    def compared(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The values that ranks compare."""
        return {"lr": float(group["lr"]), **{name: group[name] for name in (*self.others, *self.numbers[1:])}}


def _on_host(value: Any) -> Any:
    """The value itself, with 0.0, which is in every range, in place of tensors on a device."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_on_host, value))
    return 0.0 if isinstance(value, Tensor) and value.device.type != "cpu" else value


def _is_betas(betas: Any) -> bool:
    if not isinstance(betas, Sequence) or not all(isinstance(beta, (Real, Tensor)) for beta in betas):
        raise TypeError(f"betas are two numbers, got {betas!r}")
    return len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas)


def _is_step_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= MOST_STEPS


def _are_coefficients(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 3 and all(math.isfinite(number) for number in value)


ADAMW = UpdateRule("AdamW", COMMON, {"betas": _is_betas})
MUON = UpdateRule(
    "Muon",
    (*COMMON, "momentum"),
    {
        "momentum": lambda value: value < 1.0,
        "nesterov": lambda value: isinstance(value, bool),
        "ns_coefficients": _are_coefficients,
        "ns_steps": _is_step_count,
        "adjust_lr_fn": lambda value: value in ADJUSTMENTS,
    },
)


def rule_of(group: Mapping[str, Any]) -> UpdateRule:
    """Muon of a group that says `use_muon`, else AdamW."""
    return MUON if group.get("use_muon") else ADAMW


def rule_of_torch(group: Mapping[str, Any]) -> UpdateRule:
    """Return the rule of a parameter group of any torch optimizer: the numbers that it has."""
    numbers = [name for name in (*COMMON, "momentum") if isinstance(group.get(name), (Real, Tensor))]
    return UpdateRule("torch", tuple(numbers), {"betas": _is_betas} if len(group.get("betas") or ()) == 2 else {})
