"""ParamGroups: FSDP2's parameter groups in a prepared model, and what steps do to them."""

import weakref
from collections.abc import Collection
from typing import Any

from torch import nn

from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.gather_status import GatherStatus
from zerocast.fsdp2.weight import FSDPWeight, ParamGroup


class ParamGroups:
    """FSDP2's parameter groups in a prepared model, and what optimizer steps do to what they have
    gathered.

    Attributes:
        prepared: those that gather prepared weights, once FSDP2 has sharded the model.
    """

    def __init__(self) -> None:
        self.prepared: list[ParamGroup] = []
        self._groups: list[weakref.ref[Any]] = []
        # What the last forward pass left gathered, and how many weights it had received by then.
        self._left: list[tuple[ParamGroup, int]] = []
        # The backward pass within which an optimizer has stepped, from a gradient's hook, until the
        # next cast.
        self._stepped_in: int | None = None

    def find(self, model: nn.Module, weights: Collection[FSDPWeight], status: GatherStatus) -> None:
        """Find the groups of a sharded model, and which of `weights` each of them gathers."""
        groups = list(torch_fsdp.groups(model))
        self._groups = [weakref.ref(group) for group in groups]
        members = [(group, prepared_params(group, weights)) for group in groups]
        self.prepared = [ParamGroup(group, found, status) for group, found in members if found]

    # -- what is left gathered

    def note_left_gathered(self) -> None:
        """A forward pass ends, and leaves some groups gathered."""
        self._left = [(group, group.received) for group in self.prepared if group.is_unsharded]

    def left_gathered(self) -> list[ParamGroup]:
        """The groups that nothing has gathered since the last forward pass left them so; alike
        on all ranks.
        """
        return [group for group, received in self._left if group.is_unsharded and group.received == received]

    def free(self) -> None:
        """Let the next forward pass gather what is left gathered."""
        torch_fsdp.reshard(group() for group in self._groups)

    def discard(self) -> None:
        """The same, and forget gathers that a pass which broke off has left."""
        torch_fsdp.discard_gathers(group() for group in self._groups)
        self.free()
        self._stepped_in = None

    # -- optimizer steps

    def after_step(self) -> None:
        """Let there be a gather before the next forward pass.

        Optimizers that step within a backward pass, each a few parameters, take one step together:
        what is gathered for the rest of that pass are the weights of its forward pass.
        """
        backward = torch_fsdp.backward_pass()
        if backward is None:
            self.discard()
        elif backward != self._stepped_in:
            torch_fsdp.at_end_of_backward(self._free_idle)
        self._stepped_in = backward

    @property
    def is_in_pass(self) -> bool:
        """True while a module is in its forward or backward pass."""
        groups = (group() for group in self._groups)
        return any(group is not None and not torch_fsdp.is_idle(group) for group in groups)

    @property
    def step_goes_on(self) -> bool:
        """True while the backward pass runs within which optimizers step."""
        return self._stepped_in is not None and torch_fsdp.backward_pass() is not None

    def before_forward(self, model: nn.Module) -> None:
        """Discard what a backward pass has left gathered, or begun to gather, that raised after an
        optimizer had stepped within it. FSDP2 has gathered the weights of `model` itself by now.
        """
        if self._stepped_in is not None and torch_fsdp.backward_pass() is None:
            own = list(torch_fsdp.groups_at(model))
            below = [group for group in (group() for group in self._groups) if group not in own]
            torch_fsdp.discard_gathers(below)
            torch_fsdp.reshard(below)
            self._stepped_in = None

    def after_cast(self) -> None:
        """A step that follows is another one."""
        self._stepped_in = None

    def _free_idle(self) -> None:
        """At the end of a backward pass, which may be one of recomputed modules within another."""
        torch_fsdp.reshard(group for group in (group() for group in self._groups) if torch_fsdp.is_idle(group))


def prepared_params(group: Any, weights: Collection[FSDPWeight]) -> list[tuple[FSDPWeight, Any]]:
    """(weight, FSDPParam) of the parameters of an FSDPParamGroup whose local tensor is the
    MasterParameter of one of `weights`.
    """
    params: list[tuple[Any, Any]] = [
        (getattr(param._sharded_local_tensor, "weight", None), param) for param in group.fsdp_params
    ]
    return [(weight, param) for weight, param in params if weight in weights]
