"""UpdateRule: the hyper-parameters of a parameter group, with their ranges, for AdamW, for Muon and
for optimizers of torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor

COMMON = ("lr", "eps", "weight_decay")
ADJUSTMENTS = (None, "original", "match_rms_adamw")
# torch has the same limit.
MOST_STEPS = 99


@dataclass(frozen=True)
class UpdateRule:
    """The rule by which a parameter group is updated.

    Attributes:
        name: the name of the rule, for messages.
        numbers: hyper-parameters that are non-negative numbers. A saved state has them.
        others: further conditions, by hyper-parameter: a function that returns True for a valid
            value.
    """

    name: str
    numbers: tuple[str, ...]
    others: Mapping[str, Callable[[Any], bool]]

    def check(self, group: Mapping[str, Any], wait: bool = True) -> None:
        """Raise ValueError or TypeError for hyper-parameters that are out of range. Without `wait`,
        tensors on a device are not checked, since a step does not wait for the device.
        """
        names = (*self.numbers, *self.others)
        values = {name: group[name] if wait else _without_device_tensors(group[name]) for name in names}
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
        """Return the hyper-parameters that ranks compare, keyed by name."""
        return {"lr": float(group["lr"]), **{name: group[name] for name in (*self.others, *self.numbers[1:])}}


def _without_device_tensors(value: Any) -> Any:
    """Return the value, with tensors on a device replaced by 0.0, which is in every range."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_without_device_tensors, value))
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
    """Return the rule of a parameter group: Muon if `use_muon` is true, otherwise AdamW."""
    return MUON if group.get("use_muon") else ADAMW


def rule_of_torch(group: Mapping[str, Any]) -> UpdateRule:
    """Return the rule of a parameter group of any torch optimizer: the numbers that it has."""
    numbers = [name for name in (*COMMON, "momentum") if isinstance(group.get(name), (Real, Tensor))]
    return UpdateRule("torch", tuple(numbers), {"betas": _is_betas} if len(group.get("betas") or ()) == 2 else {})
