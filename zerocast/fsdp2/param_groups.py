"""ParamGroups: FSDP2's parameter groups in a prepared model, and which of them stay gathered."""

import weakref
from collections.abc import Collection
from typing import Any

from torch import nn

from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.gather_status import GatherStatus
from zerocast.fsdp2.weight import FSDPWeight, ParamGroup


class ParamGroups:
    """FSDP2's parameter groups in a prepared model. They are freed after optimizer steps, so that
    the next forward pass gathers the bytes of the next cast.

    Attributes:
        prepared: the groups that gather prepared weights. Empty until FSDP2 has sharded the model.
    """

    def __init__(self) -> None:
        self.prepared: list[ParamGroup] = []
        # All groups of the model, those without prepared weights too.
        self._groups: list[weakref.ref[Any]] = []
        # The groups that the last forward pass left gathered, each with the number of its gathers
        # until then.
        self._left: list[tuple[ParamGroup, int]] = []
        # The backward pass within which an optimizer has stepped, from a gradient's hook, until the
        # next cast.
        self._stepped_in: int | None = None

    def find(self, model: nn.Module, weights: Collection[FSDPWeight], status: GatherStatus) -> None:
        """Find the groups of a sharded model, and which of `weights` each of them gathers."""
        groups = list(torch_fsdp.groups(model))
        self._groups = list(map(weakref.ref, groups))
        members = [(group, prepared_params(group, weights)) for group in groups]
        self.prepared = [ParamGroup(group, params, status) for group, params in members if params]

    @property
    def _fsdp_groups(self) -> list[Any]:
        """All FSDPParamGroups, which the model keeps alive."""
        return [group for reference in self._groups if (group := reference()) is not None]

    # -- groups that are left gathered

    def note_left_gathered(self) -> None:
        """Remember the groups that are gathered. Called at the end of a forward pass."""
        self._left = [(group, group.received) for group in self.prepared if group.is_unsharded]

    def left_gathered(self) -> list[ParamGroup]:
        """Return the groups that the last forward pass left gathered, and that no pass has freed or
        gathered again since. They are the same on all ranks.
        """
        return [group for group, received in self._left if group.is_unsharded and group.received == received]

    def free(self) -> None:
        """Free all groups that are gathered, so that the next forward pass gathers them again."""
        torch_fsdp.reshard(self._fsdp_groups)

    def discard(self) -> None:
        """Free all groups, and drop gathers of a pass that failed partway."""
        torch_fsdp.discard_gathers(self._fsdp_groups)
        self.free()
        self._stepped_in = None

    # -- optimizer steps

    def after_step(self) -> None:
        """Free all groups after an optimizer step.

        Optimizers that step within a backward pass, each a few parameters, take one step together.
        The rest of that pass needs the weights of its forward pass, so they are freed at its end.
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
        return not all(map(torch_fsdp.is_idle, self._fsdp_groups))

    @property
    def step_goes_on(self) -> bool:
        """True while the backward pass runs within which optimizers step."""
        return self._stepped_in is not None and torch_fsdp.backward_pass() is not None

    def before_forward(self, model: nn.Module) -> None:
        """Discard the gathers of a backward pass that raised after an optimizer had stepped within
        it. The weights of `model` itself stay, since FSDP2 has gathered them by now for this pass.
        """
        if self._stepped_in is not None and torch_fsdp.backward_pass() is None:
            of_model = list(torch_fsdp.groups_at(model))
            below = [group for group in self._fsdp_groups if group not in of_model]
            torch_fsdp.discard_gathers(below)
            torch_fsdp.reshard(below)
            self._stepped_in = None

    def after_cast(self) -> None:
        """Called after a cast. An optimizer step that follows is not part of the last one."""
        self._stepped_in = None

    def _free_idle(self) -> None:
        """Free the groups that are in no pass. Called at the end of a backward pass, which may be
        the pass of recomputed modules within another one.
        """
        torch_fsdp.reshard(filter(torch_fsdp.is_idle, self._fsdp_groups))


def prepared_params(group: Any, weights: Collection[FSDPWeight]) -> list[tuple[FSDPWeight, Any]]:
    """Return (weight, FSDPParam) of the parameters of an FSDPParamGroup whose local tensor is the
    MasterParameter of one of `weights`.
    """
    params: list[tuple[Any, Any]] = [
        (getattr(param._sharded_local_tensor, "weight", None), param) for param in group.fsdp_params
    ]
    return [(weight, param) for weight, param in params if weight in weights]
