"""The optimizer container: torchtitan's own, which also checkpoints delayed scaling and may have
FusedAdamW for its AdamW.

torchtitan's container is a torch optimizer too, whose step runs the steps of the optimizers inside,
and torch calls the step hooks of both. The hooks of the container would discard the amaxes that
FusedAdamW has just measured, so the container registers as an optimizer that measures them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from zerocast import fsdp2
from zerocast.fsdp2.prepare import is_prepared, managers_behind

from . import host

PREFIX = "zerocast."
_Host: Any = host.OptimizersContainer


class DelayedStates(_Host):  # type: ignore[misc]
    """torchtitan's container with the state of fp8_delayed weights beside that of optimizers, as
    `zerocast.<weight>.{scale,amax_history,cast_scale}`.
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
        """The present state. Collective. Moments are the tensors in use; step counts and delayed
        scaling are copies.
        """
        state = {key: _apart(value) for key, value in super().state_dict().items()}
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


def _apart(value: Any) -> Any:
    """A copy of a step count, into which a load may write; other values themselves."""
    return value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value


def _delayed(model_parts: list[nn.Module]) -> list[tuple[str, str, Tensor]]:
    """(weight, field, value) of the state of delayed scaling of all model parts."""
    states = [fsdp2.state_dict(part) for part in filter(is_prepared, model_parts)]
    return [
        (name, field, value) for state in states for name, fields in state.items() for field, value in fields.items()
    ]
