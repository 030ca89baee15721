"""The optimizer container: torchtitan's own, which also checkpoints delayed scaling and may have
FusedAdamW for its AdamW.

torchtitan's container is a torch optimizer too, whose step runs the steps of the optimizers inside,
and torch calls the step hooks of both. The hooks of the container would discard the amaxes that
FusedAdamW has just measured, so the container registers as an optimizer that measures them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zerocast import fsdp2
from zerocast.fsdp2.prepare import is_prepared, managers_behind
from zerocast.integrations import overrides

from . import host

PREFIX = "zerocast."
_Host: Any = host.OptimizersContainer


@overrides("leave_amaxes")
class DelayedStates(_Host):  # type: ignore[misc]
    """torchtitan's container with the state of fp8_delayed weights in addition to the optimizers',
    as `zerocast.<weight>.{scale,amax_history,cast_scale}`.
    """

    def leave_amaxes(self) -> None:
        """Register this container as one whose step measures the amaxes of the next cast.

        For a container whose optimizers are FusedAdamW.
        """
        parameters = (parameter for part in self.model_parts for parameter in part.parameters())
        for manager in managers_behind(parameters):
            manager.measuring.add(self)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the current state. Collective. Moments are the tensors in use; step counts and
        delayed scaling are copies.
        """
        state = {key: _own_step_count(value) for key, value in super().state_dict().items()}
        return state | {f"{PREFIX}{name}.{field}": value.clone() for name, field, value in _delayed(self.model_parts)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same parameters. Collective.

        The next gather repeats the last cast.
        """
        super().load_state_dict({key: value for key, value in state_dict.items() if not key.startswith(PREFIX)})
        for part in filter(is_prepared, self.model_parts):
            saved: dict[str, dict[str, Tensor]] = {}
            for name, field, _ in _delayed([part]):
                saved.setdefault(name, {})[field] = state_dict[f"{PREFIX}{name}.{field}"]
            fsdp2.load_state_dict(part, saved)


def _own_step_count(value: Any) -> Any:
    """Return a copy of a step count, into which a load may write; any other value itself."""
    return value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value


def _delayed(model_parts: list[nn.Module]) -> list[tuple[str, str, Tensor]]:
    """Return (weight, field, value) of the state of delayed scaling of all model parts."""
    states = [fsdp2.state_dict(part) for part in filter(is_prepared, model_parts)]
    return [
        (name, field, value) for state in states for name, fields in state.items() for field, value in fields.items()
    ]


class FusedOptimizers(DelayedStates):
    """One FusedAdamW for each model part, with the state of torchtitan's AdamW under the same
    keys.
    """

    def __init__(self, model_parts: list[nn.Module], options: Mapping[str, Any]) -> None:
        super().__init__(model_parts, fsdp2.FusedAdamW, dict(options))
        self.leave_amaxes()


def build_optimizers(
    model_parts: list[nn.Module], optimizer_config: Any, parallel_dims: Any, ft_manager: Any = None
) -> Any:
    """Build optimizers like torchtitan's `build_optimizers`; also supports
    `implementation="zerocast"`.

    Raises ValueError for `"zerocast"` with an optimizer other than AdamW, with a step in the
    backward pass or with TorchFT.
    """
    if optimizer_config.implementation != "zerocast":
        return host.build_optimizers(model_parts, optimizer_config, parallel_dims, ft_manager)
    for is_set, setting in (
        (optimizer_config.name != "AdamW", f"optimizer.name={optimizer_config.name}"),
        (optimizer_config.early_step_in_backward, "optimizer.early_step_in_backward"),
        (ft_manager is not None and ft_manager.enabled, "TorchFT"),
    ):
        if is_set:
            raise ValueError(
                f"optimizer.implementation=zerocast is an AdamW that steps after the backward pass, not with {setting}"
            )
    options = {name: getattr(optimizer_config, name) for name in ("lr", "eps", "weight_decay")}
    return FusedOptimizers(model_parts, options | {"betas": (optimizer_config.beta1, optimizer_config.beta2)})
