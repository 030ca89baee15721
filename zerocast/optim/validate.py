"""Validation of what an optimizer is given: parameters, hyper-parameters, and who owns the weights.

A weight has one owner: nobody else, and of several optimizers the one that was built last.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from zerocast.cast.hyperparameters import check_options
from zerocast.formats.layout import Span
from zerocast.optim.update_rule import rule_of
from zerocast.weight import QuantizedWeight
from zerocast.weight.owners import Claim, Held, find_conflict, overlapping
from zerocast.weight.weight import NOMINAL_DTYPES

OURS = ("a ZeroAdamW", "a ZeroMuon")  # which take parameters over from each other
STAGES = (1, 2)
TAKEN_OVER = (
    "another optimizer was built over these parameters: this one gets no gradients any more, and writes no weights. Use the newer "
    "one, and load states into that"
)
OTHER_GROUPS = (
    "parameters were added to this {name}'s param_groups, taken out or moved since it was built, which changes nothing of what "
    "it trains: build another one and load the state of this one"
)
Named = tuple[str, Tensor, int]  # name, parameter, index of its parameter group


def check_owners(named: Sequence[Named], who: str) -> None:
    """RuntimeError for a weight that has no value yet, and for one that another owner writes."""
    for name, parameter, _ in named:
        if isinstance(parameter, QuantizedWeight) and not _has_value(parameter):
            raise RuntimeError(
                f"{name}, {parameter!r}, has never been cast: masters start from its value, so give it one (quantize_, "
                "load_state_dict, QuantizedWeight.of_buffers)"
            )
    other = find_conflict(_held(named), lambda claim: claim.who in OURS, _parameters(named))
    if other is not None:
        raise RuntimeError(
            f"{other.who} writes weights that {who} is built over: a weight has one owner, so remove() the handle of that, or "
            "del it"
        )


def _has_value(weight: QuantizedWeight) -> bool:
    return weight.state.ever_cast or weight.high_precision_init_val is not None


def check_owns(claim: Claim) -> None:
    """RuntimeError once a newer optimizer has taken a parameter over."""
    if claim.ended:
        raise RuntimeError(TAKEN_OVER)


def listed_parameters(param_groups: Sequence[dict[str, Any]]) -> list[tuple[list[int], str]]:
    """Return which parameters each group has, and what updates them."""
    return [(list(map(id, group["params"])), rule_of(group).name) for group in param_groups]


def take_over(named: Sequence[Named], who: str) -> Claim:
    """Hold these parameters; any older optimizer over any of them has lost all of its own."""
    for older in overlapping(_held(named), _parameters(named)):
        older.end()
    return Claim(who, _held(named), _parameters(named))


def _parameters(named: Sequence[Named]) -> list[Tensor]:
    return [parameter for _, parameter, _ in named]


def _held(named: Sequence[Named]) -> Held:
    return [(p.state, (Span(0, p.numel()),)) for _, p, _ in named if isinstance(p, QuantizedWeight)]


def trainable(params: Iterable[Any]) -> list[Any]:
    """The given pairs, or groups of pairs, without parameters that are frozen or empty.
    TypeError without names.
    """
    items = list(params)
    if items and isinstance(items[0], dict):
        # a group whose parameters are all frozen stays, so that the groups are numbered as the
        # caller numbers them
        return [{"param_names": [], **group, "params": trainable(group.get("params", ()))} for group in items]
    for item in items:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor)):
            raise TypeError("parameters come with their names: pass model.named_parameters()")
    return [(name, parameter) for name, parameter in items if parameter.requires_grad and parameter.numel()]


def validated(param_groups: list[dict[str, Any]], stage: int) -> list[Named]:
    """The parameters with their names and groups. ValueError or TypeError for what cannot be
    trained.
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


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """The values of a parameter group that ranks compare."""
    return rule_of(group).compared(group)


def hyperparameters_by_name(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The hyper-parameters of all groups, by their names and, of several groups, their group's
    number.
    """
    return {
        f"{name} of group {index}" if len(groups) > 1 else name: value
        for index, group in enumerate(groups)
        for name, value in hyperparameters(group).items()
    }


def describe(parameter: Tensor) -> str:
    """Format, shape and dtype, to be compared between ranks."""
    stored = parameter.format if isinstance(parameter, QuantizedWeight) else "plain"
    return f"{stored} {tuple(parameter.shape)} {parameter.dtype}"
