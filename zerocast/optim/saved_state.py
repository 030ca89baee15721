"""Rules for the state of an optimizer that is saved or loaded, the same for ZeroAdamW, ZeroMuon,
FusedAdamW and torch's optimizers over FSDP2 masters.

A parameter that no step has changed may have no moments. Its entry is then a mark:

    optim.state.<name>.never_stepped   bool[]

Loading the mark clears moments. A parameter with neither moments nor a mark is an error.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.checkpoint.moments import MOMENTS, SCALES, check_values
from zerocast.checkpoint.sharded_tensor import TensorShard
from zerocast.optim.update_rule import UpdateRule

NEVER_STEPPED = "never_stepped"
# The step count, which only Adam's state has, as in torch.optim.
STEP = "step"
ADAM_STATE = frozenset({"exp_avg", "exp_avg_sq", STEP})
BETAS = ("beta1", "beta2")


def never_stepped() -> dict[str, Tensor]:
    """Return the entry of a parameter that no step has changed."""
    return {NEVER_STEPPED: torch.tensor(True)}


def hyperparameters(group: Mapping[str, Any], rule: UpdateRule) -> dict[str, Tensor]:
    """Return the numbers of a parameter group as f64[]."""
    values = {name: float(group[name]) for name in rule.numbers}
    if "betas" in rule.others:
        values |= dict(zip(BETAS, map(float, group["betas"]), strict=True))
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def loaded_hyperparameters(
    names: Sequence[str], group: Mapping[str, Any], rule: UpdateRule, saved: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the saved numbers of a parameter group, whose parameters are `names`.

    ValueError for numbers that are missing, unknown or out of range, and for parameters of the
    group that have different ones. A state without any leaves the group as it is.
    """
    if not saved:
        return {}
    loaded: dict[str, Any] = {}
    expected = hyperparameters(group, rule).keys()
    for name in names:
        if name not in saved or saved[name].keys() != expected:
            raise ValueError(
                f"the state does not fit this optimizer: {name} has the hyper-parameters {sorted(saved.get(name, ()))} there, and "
                f"{sorted(expected)} here"
            )
        numbers: dict[str, Any] = {key: float(value) for key, value in saved[name].items()}
        if "betas" in rule.others:
            numbers["betas"] = tuple(numbers.pop(key) for key in BETAS)
        try:
            rule.check({**group, **numbers})
        except ValueError as error:
            raise ValueError(f"in the state of {name}, {error}") from error
        loaded = loaded or numbers
        if loaded != numbers:
            raise ValueError(f"{name} has other hyper-parameters in the state than the rest of its parameter group")
    return loaded


def problem_of(check: Callable[[], None], owner: str) -> Exception | None:
    """Return the error of a `check` of a state on this rank, so that all ranks can raise it. It is
    a ValueError if the state does not fit the `owner`; an error of memory is not changed.
    """
    try:
        check()
    except KeyError as error:
        return ValueError(f"the state does not fit this {owner}: it lacks {error}")
    except torch.OutOfMemoryError as error:
        return error
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return ValueError(str(error))
    return None


def check_moments(name: str, moments: Mapping[str, Any], expected: Collection[str] | None) -> None:
    """ValueError, on this rank alone, for saved moments that a parameter cannot have. Its update
    keeps the moments `expected`, which is None if that is not known.
    """
    if NEVER_STEPPED in moments:
        if len(moments) > 1 or not bool(moments[NEVER_STEPPED]):
            raise ValueError(
                f"{name} has {sorted(moments)} in the state: {NEVER_STEPPED} is true, and without moments beside it"
            )
        return
    if not moments and expected != set():
        raise ValueError(f"the state lacks the moments of {name}, and no {NEVER_STEPPED} there says that it has none")
    if expected is not None and set(moments) != set(expected):
        raise ValueError(
            f"the state does not fit this optimizer: {name} has {sorted(moments)} there, and its update here keeps "
            f"{sorted(expected)}"
        )
    for key, value in moments.items():
        if key == STEP:
            check_step(name, value)
        elif key in MOMENTS or key in SCALES:
            _check_values(name, key, value, is_code=f"{key}_scale" in moments)


def check_shapes(name: str, moments: Mapping[str, Any], parameter: Tensor) -> None:
    """ValueError for saved moments whose shape is not that of their parameter."""
    for key, value in moments.items():
        if key in MOMENTS and tuple(value.shape) != tuple(parameter.shape):
            raise ValueError(
                f"{key} of {name} has shape {tuple(value.shape)} in the state and {tuple(parameter.shape)} here"
            )


def check_step(name: str, value: Any) -> None:
    """ValueError unless a step count is a whole number from 0 on."""
    count = float(value)
    if not (0 <= count < math.inf and count == int(count)):
        raise ValueError(f"{name} has step {count} in the state: a step count is a whole number from 0 on")


def _check_values(name: str, key: str, value: Any, is_code: bool) -> None:
    if not isinstance(value, Tensor) or value.is_floating_point() == is_code:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{key} of {name} is {kind} in the state: moments are floating-point tensors")
    own = value.flat if isinstance(value, TensorShard) else getattr(value, "_local_tensor", value).detach()
    if type(own) is not Tensor or own.is_meta or not own.numel():
        # Another library keeps these moments in its own class of tensors, which is not read here.
        return
    check_values(name, key, own)
