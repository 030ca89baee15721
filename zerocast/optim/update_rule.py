"""UpdateRule: the hyperparameters of a parameter group, with their ranges, for AdamW, for Muon and
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
MAX_STEPS = 99


@dataclass(frozen=True)
class UpdateRule:
    """The rule by which a parameter group is updated.

    Attributes:
        name: the name of the rule, for messages.
        numbers: hyperparameters that are non-negative numbers. A saved state has them.
        others: further conditions, by hyperparameter: a function that returns True for a valid
            value.
    """

    name: str
    numbers: tuple[str, ...]
    others: Mapping[str, Callable[[Any], bool]]

    def check(self, group: Mapping[str, Any], wait: bool = True) -> None:
        """Raise ValueError or TypeError for hyperparameters that are out of range. Without `wait`,
        tensors on a device are not checked, since a step does not wait for the device.
        """
        for name in self.numbers:
            value = group[name]
            is_number = isinstance(value, (Real, Tensor))
            if not is_number:
                raise TypeError(f"{name} is a number, got {value!r}")
            is_read = wait or not isinstance(value, Tensor) or value.device.type == "cpu"
            if is_read and not 0.0 <= value < math.inf:
                raise ValueError(f"{name} is out of range: {value}")
        for name, is_valid in self.others.items():
            value = group[name] if wait else _without_device_tensors(group[name])
            if not is_valid(value):
                raise ValueError(f"{name} is out of range: {value}")

    def compared(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the hyperparameters that ranks compare, keyed by name."""
        return {"lr": float(group["lr"]), **{name: group[name] for name in (*self.others, *self.numbers[1:])}}


def _without_device_tensors(value: Any) -> Any:
    """Return the value, with tensors on a device replaced by 0.0, which is in every range."""
    # A loop, since every step comes here.
    known = []
    for item in value if isinstance(value, (tuple, list)) else (value,):
        is_on_device = isinstance(item, Tensor) and item.device.type != "cpu"
        known.append(0.0 if is_on_device else item)
    return tuple(known) if isinstance(value, (tuple, list)) else known[0]


def _is_betas(betas: Any) -> bool:
    numbers: Sequence[Any] = betas if isinstance(betas, Sequence) else (None,)
    in_range = len(numbers) == 2
    for beta in numbers:
        is_number = isinstance(beta, (Real, Tensor))
        if not is_number:
            raise TypeError(f"betas are two numbers, got {betas!r}")
        in_range = in_range and bool(0.0 <= beta < 1.0)
    return in_range


def _is_step_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= MAX_STEPS


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
