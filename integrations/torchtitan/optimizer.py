"""The optimizer container: torchtitan's own, whose AdamW may be FusedAdamW, and which checkpoints
delayed scaling too.

torchtitan's container is an optimizer itself, whose step runs the steps of those inside. The hooks
of torch run for both, so the container says that its step leaves the amaxes that FusedAdamW
measured.
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
        """The optimizers inside are FusedAdamW, which measure the amaxes of the next cast."""
        for manager in managers_behind(parameter for part in self.model_parts for parameter in part.parameters()):
            manager.measuring.add(self)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state as it is now; every rank calls it. Moments are those in use, step counts and
        delayed scaling copies.
        """
        state = {key: _apart(value) for key, value in super().state_dict().items()}
        return state | {f"{PREFIX}{name}.{field}": value.clone() for name, field, value in _delayed(self.model_parts)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the same parameters; every rank calls it. The next gather repeats
        the last cast.
        """
        super().load_state_dict({key: value for key, value in state_dict.items() if not key.startswith(PREFIX)})
        for part in filter(is_prepared, self.model_parts):
            saved: dict[str, dict[str, Tensor]] = {}
            for name, field, _ in _delayed([part]):
                saved.setdefault(name, {})[field] = state_dict[f"{PREFIX}{name}.{field}"]
            fsdp2.load_state_dict(part, saved)


def _apart(value: Any) -> Any:
    """A copy of a step count, which a reader may fill; other tensors themselves."""
    return value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value


def _delayed(model_parts: list[nn.Module]) -> list[tuple[str, str, Tensor]]:
    """Weight, field and value of the state of delayed scaling."""
    states = [fsdp2.state_dict(part) for part in filter(is_prepared, model_parts)]
    return [
        (name, field, value) for state in states for name, fields in state.items() for field, value in fields.items()
    ]
