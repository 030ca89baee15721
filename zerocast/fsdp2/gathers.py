"""Gathers: FSDP2's parameter groups in a prepared model, and what steps do to what they have gathered."""

import weakref
from typing import Any

from torch import nn

from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.held import Held, held_by


class Gathers:
    """The groups hold modules, and are known to every master through here: they are referred to weakly."""

    def __init__(self) -> None:
        self._groups: list[weakref.ref[Any]] = []
        self._firsts: list[Held] = []  # a weight of each group
        self._within: int | None = None  # the backward pass within which an optimizer stepped, by a hook of a gradient

    def find(self, model: nn.Module, casts: Any) -> list[list[Held]]:
        """The weights of `casts` once FSDP2 has sharded the model, by group, each group's in the order of its gather."""
        self._groups = [weakref.ref(group) for group in torch_fsdp.groups(model)]
        by_group = [held for held in (held_by(group(), casts) for group in self._groups) if held]
        self._firsts = [first for first, *_ in by_group]
        return by_group

    def gathered(self) -> list[Held]:
        """One weight of each group that is gathered now."""
        return [held for held in self._firsts if held.is_gathered]

    def free(self) -> None:
        """Let the next forward pass gather what is left gathered."""
        torch_fsdp.reshard(group() for group in self._groups)

    def discard(self) -> None:
        """The same, and forget gathers that a pass which broke off has left."""
        self._discard()
        self.free()
        self._within = None

    def after_step(self) -> None:
        """Let there be a gather before the next forward pass.

        Optimizers that step within a backward pass, each a few parameters, take one step together: what is gathered for the rest
        of that pass are the weights of its forward pass.
        """
        within = torch_fsdp.backward_pass()
        if within is None:
            self.discard()
        elif within != self._within:
            torch_fsdp.at_end_of_backward(self._free_idle)
        self._within = within

    @property
    def step_goes_on(self) -> bool:
        """Whether the backward pass is running within which optimizers step."""
        return self._within is not None and torch_fsdp.backward_pass() is not None

    def before_cast(self) -> None:
        """A backward pass within which optimizers stepped may have raised, and left gathers of the weights before."""
        if self._within is not None:
            self._discard()

    def after_cast(self) -> None:
        """What follows is another step."""
        self._within = None

    def _discard(self) -> None:
        torch_fsdp.discard_gathers(group() for group in self._groups)

    def _free_idle(self) -> None:
        """At the end of a backward pass, which may be one of recomputed modules within another."""
        torch_fsdp.reshard(group for group in (group() for group in self._groups) if torch_fsdp.is_idle(group))
