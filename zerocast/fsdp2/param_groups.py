"""ParamGroups: FSDP2's parameter groups, each of which gathers its weights together, and what
a step does to what they have gathered.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.gather_layout import JointFill, JointLayout, RowFill, ScaleFill, fill_scales, header_of
from zerocast.fsdp2.gather_status import GatherStatus


class ParamGroup:
    """One of FSDP2's parameter groups (an FSDPParamGroup), whose weights `names` are gathered
    together, in this order.

    Groups know their modules and are known to every prepared weight. They and the weights are
    referred to weakly: the garbage collector does not look into all tensors, so it would never free
    a model, or not by one collection.
    """

    fill: JointFill  # of the scales, from joint side channels

    def __init__(self, group: Any, weights: Sequence[Any], status: GatherStatus) -> None:
        self._group: Callable[[], Any] = weakref.ref(group)
        self._weights, self._status = tuple(map(weakref.ref, weights)), status
        self.names = tuple(weight.name for weight in weights)
        self._noted: list[Tensor] = []
        self._fills: list[ScaleFill | RowFill] = []
        # of each weight in joint side channels: these `[world, bytes]`, and the headers in them,
        # int32 `[world, 2]`
        self.sides: tuple[Tensor, ...] = ()
        self.headers: list[Tensor] = []
        self.received = 0  # weights, over all gathers

    @property
    def weights(self) -> list[Any]:
        """The prepared weights, in the order of `names`."""
        return [weight() for weight in self._weights]

    @property
    def is_unsharded(self) -> bool:
        """True while its weights are gathered."""
        return bool(self._group().is_unsharded)

    def problem(self) -> str | None:
        """Why quantized weights cannot be gathered by it, if so."""
        if self._group()._use_post_forward_mesh:
            return (
                "reshard_after_forward=<int> does not work with quantized weights (FSDP2 reshards plain tensors alone): "
                "give True or False"
            )
        return None

    def gather_again(self) -> None:
        """Gather in the same memory."""
        torch_fsdp.gather_again(self._group())

    def unshard(self, joint: JointLayout, side: Tensor) -> None:
        """The joint side channels lie in `side` from now on, at every gather."""
        self.sides = joint.gathered(side)
        self.headers = list(map(header_of, self.sides))
        self.fill = JointFill(joint.layouts, side.view(len(self.sides[0]), -1))

    def note(self, names: Sequence[str], headers: Sequence[Tensor]) -> None:
        """Weights were received, whose headers are read later: with those of the whole group."""
        if names[0] == self.names[0]:
            self._noted.clear()  # left by a gather that broke off
        self._noted += headers
        if names[-1] == self.names[-1]:
            self._status.note(self.names, self._noted)

    def put_scales(self, name: str, fills: Iterable[ScaleFill | RowFill]) -> None:
        """A weight was received; after the last one the scales of all are put where products read
        them.
        """
        if name == self.names[0]:
            self._fills.clear()
        self._fills += fills
        if name == self.names[-1] and self._fills:
            with torch.no_grad(), torch_fsdp.unversioned([fill.buffer for fill in self._fills]):
                fill_scales(self._fills)
            self._fills.clear()


class ParamGroups:
    """FSDP2's parameter groups in a prepared model, and what optimizer steps do to what they
    have gathered.
    """

    def __init__(self, status: GatherStatus) -> None:
        self._status = status
        self._groups: list[weakref.ref[Any]] = []
        self._prepared: list[ParamGroup] = []
        # gathered after a forward pass, and what it had received
        self._left: list[tuple[ParamGroup, int]] = []
        # the backward pass within which an optimizer stepped, by a gradient's hook
        self._stepped_in: int | None = None

    def find(self, model: nn.Module, weights: Collection[Any]) -> list[tuple[ParamGroup, list[tuple[Any, Any]]]]:
        """The groups that gather any of `weights`, each with (weight, FSDPParam) in the order of
        its gather.
        """
        self._groups = [weakref.ref(group) for group in torch_fsdp.groups(model)]
        found = []
        for group in torch_fsdp.groups(model):
            members = prepared_params(group, weights)
            if members:
                found.append((ParamGroup(group, [weight for weight, _ in members], self._status), members))
        self._prepared = [group for group, _ in found]
        return found

    def note_left_gathered(self) -> None:
        """A forward pass ends, and leaves some groups gathered."""
        self._left = [(group, group.received) for group in self._prepared if group.is_unsharded]

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
        self._discard()
        self.free()
        self._stepped_in = None

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

    def before_cast(self) -> None:
        """A backward pass within which optimizers stepped may have raised, and left gathers of
        the weights before.
        """
        if self._stepped_in is not None:
            self._discard()

    def after_cast(self) -> None:
        """A step that follows is another one."""
        self._stepped_in = None

    def _discard(self) -> None:
        torch_fsdp.discard_gathers(group() for group in self._groups)

    def _free_idle(self) -> None:
        """At the end of a backward pass, which may be one of recomputed modules within another."""
        torch_fsdp.reshard(group for group in (group() for group in self._groups) if torch_fsdp.is_idle(group))


def prepared_params(group: Any, weights: Collection[Any]) -> list[tuple[Any, Any]]:
    """(weight, FSDPParam) of the parameters of an FSDPParamGroup whose local tensor is the
    MasterParameter of one of `weights`.
    """
    params = [(getattr(param._sharded_local_tensor, "weight", None), param) for param in group.fsdp_params]
    return [(weight, param) for weight, param in params if weight in weights]
