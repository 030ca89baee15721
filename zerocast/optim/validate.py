"""Validation of an optimizer's arguments: parameters, hyperparameters, and the ownership of
weights.

A weight has one owner. Of several optimizers over a weight, the last one that was built owns it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from zerocast.cast.adam_update import check_options
from zerocast.formats.layout import Span
from zerocast.optim.update_rule import rule_of
from zerocast.weight import QuantizedWeight
from zerocast.weight.owners import Claim, Held, find_conflict, overlapping
from zerocast.weight.validity import Use
from zerocast.weight.weight import NOMINAL_DTYPES

# Owners that take parameters over from each other.
OURS = ("a ZeroAdamW", "a ZeroMuon")
STAGES = (1, 2)
TAKEN_OVER = (
    "another optimizer was built over these parameters: this one no longer gets gradients or writes weights. Use the newer one, "
    "and load states into it"
)
OTHER_GROUPS = (
    "the param_groups of this {name} were modified after it was built (parameters added, removed or moved), which has no effect: "
    "call add_param_group, or build another optimizer and load the state of this one"
)
# (name, parameter, index of its parameter group)
Named = tuple[str, Tensor, int]


def check_owners(named: Sequence[Named], who: str) -> None:
    """Raise RuntimeError for a weight that has no value, or a partial one, and for one that has
    another owner, as seen by the new owner `who`.
    """
    for name, parameter, _ in named:
        if not isinstance(parameter, QuantizedWeight) or parameter.high_precision_init_val is not None:
            continue
        if not parameter.state.ever_cast:
            raise RuntimeError(
                f"{name}, {parameter!r}, has never been cast: masters start from its value, so set one (quantize_, "
                "load_state_dict, QuantizedWeight.of_buffers)"
            )
        parameter.state.validity.check(Use.READ)
    other = find_conflict(_held(named), lambda claim: claim.who in OURS, _parameters(named))
    if other is not None:
        raise RuntimeError(
            f"{other.who} writes weights that {who} is built over, but a weight has one owner: remove() the handle of "
            f"{other.who}, or del it"
        )


def listed_parameters(param_groups: Sequence[dict[str, Any]]) -> list[tuple[list[int], bool]]:
    """Return the ids of each group's parameters, and whether Muon updates them."""
    return [(list(map(id, group["params"])), bool(group.get("use_muon"))) for group in param_groups]


def take_over(named: Sequence[Named], who: str) -> Claim:
    """Claim these parameters. The claim of an older optimizer ends, for all of its parameters, if
    it has any of these.
    """
    for older in overlapping(_held(named), _parameters(named)):
        older.end()
    return Claim(who, _held(named), _parameters(named))


def _parameters(named: Sequence[Named]) -> list[Tensor]:
    return [parameter for _, parameter, _ in named]


def _held(named: Sequence[Named]) -> Held:
    return [(p.state, (Span(0, p.numel()),)) for _, p, _ in named if isinstance(p, QuantizedWeight)]


def trainable(params: Iterable[Any]) -> list[Any]:
    """Return the given (name, parameter) pairs, or groups of pairs, without parameters that are
    frozen or empty. Raises TypeError for parameters without names.
    """
    items = list(params)
    if items and isinstance(items[0], dict):
        # A group whose parameters are all frozen stays, so that groups keep the caller's numbers.
        return [{"param_names": [], **group, "params": trainable(group.get("params", ()))} for group in items]
    for item in items:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor)):
            raise TypeError("parameters must have names: pass model.named_parameters()")
    return [(name, parameter) for name, parameter in items if parameter.requires_grad and parameter.numel()]


def validated(param_groups: list[dict[str, Any]], stage: int) -> list[Named]:
    """Return the parameters with their names and the indices of their groups. Raises ValueError or
    TypeError for invalid arguments, or if no parameter can be trained.
    """
    if stage not in STAGES:
        raise ValueError(f"stage is one of {STAGES}, got {stage}")
    for group in param_groups:
        rule_of(group).check(group)
    check_options(param_groups)
    return _check_parameters(param_groups)


def _check_parameters(param_groups: list[dict[str, Any]]) -> list[Named]:
    named = [
        (name, parameter, index)
        for index, group in enumerate(param_groups)
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    ]
    if not named:
        raise ValueError("no parameter needs a gradient")
    if len({name for name, _, _ in named}) < len(named):
        raise ValueError("two parameters have the same name")
    if len({id(parameter) for _, parameter, _ in named}) < len(named):
        raise ValueError("a parameter is listed twice, under two names")
    devices = {parameter.device for _, parameter, _ in named}
    if len(devices) > 1:
        raise ValueError(f"the parameters of one optimizer are on one device, got {sorted(map(str, devices))}")
    for name, parameter, _ in named:
        if parameter.dtype not in NOMINAL_DTYPES:
            raise TypeError(f"{name} is {parameter.dtype}; bf16, fp16 and fp32 parameters can be trained")
    return named


def hyperparameters_by_name(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the hyperparameters of all groups that ranks compare, keyed by name. With several
    groups the names include the number of the group.
    """
    return {
        f"{name} of group {index}" if len(groups) > 1 else name: value
        for index, group in enumerate(groups)
        for name, value in rule_of(group).compared(group).items()
    }


def describe(parameter: Tensor) -> str:
    """Return the format, shape and dtype of a parameter, as a text that ranks compare."""
    stored = parameter.format if isinstance(parameter, QuantizedWeight) else "plain"
    return f"{stored} {tuple(parameter.shape)} {parameter.dtype}"
