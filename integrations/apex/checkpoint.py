"""Checkpoints: Apex's own state dict of full FP32 tensors, with delayed scaling in it."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from zerocast import QuantizedWeight
from zerocast.cast.delayed_scaling import DelayedScaling

logger = logging.getLogger(__name__)
MASTER_AND_MOMENTS = ("param", "exp_avg", "exp_avg_sq")


class PlainZeros(TorchFunctionMode):
    """Let `zeros_like` of a QuantizedWeight return a plain tensor while the mode is active.

    Apex allocates the full tensor of a master by `zeros_like` of its parameter.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace `zeros_like` of a QuantizedWeight; run all other functions unchanged."""
        kwargs = kwargs or {}
        if func is torch.zeros_like and args and isinstance(args[0], QuantizedWeight):
            return torch.zeros(args[0].shape, **{"dtype": args[0].dtype, "device": args[0].device, **kwargs})
        return func(*args, **kwargs)


def check_format(state_dict_format: int | None) -> None:
    """Raise ValueError for the deprecated first format.

    It replaces the buckets that weights are cast from.
    """
    if state_dict_format not in (None, 2):
        raise ValueError(f"state dicts of format 2 hold quantized weights' masters, got format {state_dict_format}")


def _format_of(state_dict: Mapping[str, Any]) -> int | None:
    """Return the format of a state dict, by the same test as Apex's.

    The first format has no entry "format".
    """
    if "buckets" in state_dict or "gathered_states" in state_dict:
        return 1
    tagged: int | None = state_dict.get("format")
    return tagged


def problem_of(state_dict: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]) -> Exception | None:
    """Return the error if a state does not fit these parameters, or None.

    Apex would only notice after it has overwritten some of them.
    """
    try:
        check_format(_format_of(state_dict))
        _check_entries(state_dict, param_groups)
    except KeyError as error:
        return ValueError(f"the state does not fit this optimizer: it lacks {error}")
    except ValueError as error:
        return error
    return None


def _check_entries(state_dict: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]) -> None:
    saved, ours = ([len(group["params"]) for group in groups] for groups in (state_dict["param_groups"], param_groups))
    if saved != ours:
        raise ValueError(f"the state has groups of {saved} parameters, this optimizer of {ours}")
    names, our_names = (
        [name for group in groups for name in group.get("param_names", ())]
        for groups in (state_dict["param_groups"], param_groups)
    )
    # Other names may be those of a wrapped model. torch compares none, and loads by position.
    if names != our_names and sorted(names) == sorted(our_names):
        moved = next(pair for pair in zip(names, our_names, strict=True) if pair[0] != pair[1])
        raise ValueError(
            "the state has the parameters of this optimizer in another order, {} in the place of {}: build the optimizer with "
            "the parameters in the order of the state".format(*moved)
        )
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    parameters = [parameter for group in param_groups for parameter in group["params"]]
    for key, parameter in zip(keys, parameters, strict=True):
        shapes = {name: tuple(state_dict["state"][key][name].shape) for name in MASTER_AND_MOMENTS}
        if any(shape != tuple(parameter.shape) for shape in shapes.values()):
            raise ValueError(
                f"parameter {key} has shapes {shapes} in the state and {tuple(parameter.shape)} in this optimizer"
            )


def add_delayed(state: Mapping[Any, Any], delayed: DelayedScaling, keys: Mapping[str, Any]) -> None:
    """Add CPU copies of delayed scaling to the state entry of each weight.

    `keys` maps the name of a weight to its key in Apex's state.
    """
    for name, tensors in delayed.state_dict().items():
        state[keys[name]].update({field: tensor.detach().cpu().clone() for field, tensor in tensors.items()})


def load_delayed(state: Mapping[Any, Any], delayed: DelayedScaling, keys: Mapping[str, Any]) -> None:
    """Load the delayed scaling that `add_delayed` has added.

    The next cast seeds scales that are missing or do not fit.
    """
    for name in delayed.load_state_dict({name: state[key] for name, key in keys.items()}):
        if dist.get_rank() == 0:
            logger.warning("no delayed scaling that fits %s in the state: seeded from the loaded master", name)
