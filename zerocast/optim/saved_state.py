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
from zerocast.checkpoint.torch_checkpoint import TensorShard
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
    """Return the saved numbers of a parameter group, whose parameters are `names`; an empty dict if
    the state has none.

    Raises ValueError for numbers that are missing, unknown or out of range, and if they differ
    between parameters of the group.
    """
    if not saved:
        return {}
    loaded: dict[str, Any] = {}
    expected = hyperparameters(group, rule).keys()
    for name in names:
        if name not in saved or saved[name].keys() != expected:
            raise ValueError(
                f"the state does not fit this optimizer: {name} has the hyperparameters {sorted(saved.get(name, ()))} in the "
                f"state, and {sorted(expected)} in the optimizer"
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
            raise ValueError(f"{name} has different hyperparameters in the state than the rest of its parameter group")
    return loaded


def problem_of(check: Callable[[], None], owner: str) -> Exception | None:
    """Return the error of a `check` of a state on this rank, so that all ranks can raise it. It is
    a ValueError if the state does not fit the `owner`; an out-of-memory error is returned as it is.
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


def check_names(saved: Collection[str], needed: Collection[str], known: Collection[str], owner: str) -> None:
    """Raise ValueError for a state that lacks parameters of the `owner`, or has unknown ones."""
    missing, extra = sorted({*needed} - {*saved}), sorted({*saved} - {*known})
    if missing or extra:
        raise ValueError(f"the state does not fit this {owner}: it lacks {missing[:4]} and has beyond it {extra[:4]}")


def check_moments(name: str, moments: Mapping[str, Any], expected: Collection[str] | None) -> None:
    """Raise ValueError, on this rank only, for saved moments that a parameter cannot have.
    `expected` are the moments that its update keeps; None if they are not known.
    """
    if NEVER_STEPPED in moments:
        if len(moments) > 1 or not bool(moments[NEVER_STEPPED]):
            raise ValueError(
                f"invalid moments of {name} in the state: {NEVER_STEPPED} must be True and the only entry, got {sorted(moments)}"
            )
        return
    if not moments and expected != set():
        raise ValueError(f"the state has neither moments of {name} nor a {NEVER_STEPPED} mark")
    if expected is not None and set(moments) != set(expected):
        raise ValueError(
            f"the state does not fit this optimizer: {name} has {sorted(moments)} in the state, and its update keeps "
            f"{sorted(expected)}"
        )
    for key, value in moments.items():
        if key == STEP:
            check_step(name, value)
        elif key in MOMENTS or key in SCALES:
            _check_values(name, key, value, is_code=f"{key}_scale" in moments)


def check_not_kept(moments: Mapping[str, Any], count: float) -> None:
    """Raise ValueError, on this rank only, for saved moments that belong to a state with views of
    the current masters or moments, if that state was kept during steps. Its step counts are copies,
    and only they are old. `count` is the step count now.

    A reader that fills such a state in place writes the step counts too.
    """
    # A mark takes the place of a step count of 0.
    clock = moments.get(STEP, moments.get(NEVER_STEPPED))
    if not isinstance(clock, Tensor) or clock.is_inference() or clock._version > 0:
        return
    saved_count = 0.0 if NEVER_STEPPED in moments else float(clock)
    if saved_count != count:
        raise ValueError(
            f"the state is that of step {int(saved_count)}, but its tensors are views of the current masters and moments, of step "
            f"{int(count)}, so nothing would be restored: keep a state with Checkpoints, or a copy.deepcopy of it"
        )


def check_shapes(name: str, moments: Mapping[str, Any], parameter: Tensor) -> None:
    """Raise ValueError for saved moments whose shape differs from the parameter's."""
    for key, value in moments.items():
        if key in MOMENTS and tuple(value.shape) != tuple(parameter.shape):
            raise ValueError(
                f"{key} of {name} has shape {tuple(value.shape)} in the state and {tuple(parameter.shape)} in the model"
            )


def check_step(name: str, value: Any) -> None:
    """Raise ValueError unless a step count is a non-negative integer."""
    count = float(value)
    if not (0 <= count < math.inf and count == int(count)):
        raise ValueError(f"{name} has step {count} in the state: a step count is a non-negative integer")


def _check_values(name: str, key: str, value: Any, is_code: bool) -> None:
    if not isinstance(value, Tensor) or value.is_floating_point() == is_code:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{key} of {name} is {kind} in the state: moments are floating-point tensors")
    own = value.flat if isinstance(value, TensorShard) else getattr(value, "_local_tensor", value).detach()
    if type(own) is not Tensor or own.is_meta or not own.numel():
        # Another library keeps these moments in its own tensor class, whose values are not checked.
        return
    check_values(name, key, own)
