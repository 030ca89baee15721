"""What `zerocast.verify` and `zerocast.metrics` see of a prepared model: one parameter group after another, gathered."""

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerocast.distributed.group import Group
from zerocast.formats.layout import Span
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.held import Held, held_by
from zerocast.verification.master_views import MasterView, MasterViews
from zerocast.verification.verify import verify

if TYPE_CHECKING:
    from zerocast.fsdp2.casts import Casts


def sources(casts: "Casts") -> Iterator[MasterViews]:
    """The masters of each group with the weights that a forward pass computes with; what is not gathered is, and freed again.

    A gather casts first if that is due, as that of the next forward pass would.
    """
    casts.check_sharded()
    for group in torch_fsdp.groups(casts.model):
        held = held_by(group, casts)
        if held:
            with torch_fsdp.gathered(group):
                shard_group = Group.of(held[0].shard_mesh)
                yield MasterViews(shard_group, tuple(_owned(one, casts) for one in held), transient=True)


def _owned(held: Held, casts: "Casts") -> MasterView:
    master, shard = held.master, held.master.shard
    rows = shard.shards.span(shard.rank)
    span = Span(rows.start * shard.columns, rows.stop * shard.columns)
    flat = held.local.plain.view(-1) if span.numel else None
    slices = casts.reduction_of(master).group if master.sliced else None
    return MasterView(master.name, held.live, flat, span, master.delayed.get("cast_scale"), slices)


class VerifyEvery:
    """A forward pre-hook of the prepared model: the first forward pass after every so many optimizer steps verifies."""

    def __init__(self, casts: "Casts | None", steps: int) -> None:
        self._casts, self._steps = None if casts is None else weakref.ref(casts), steps
        self._verified = 0
        self._outside_of_graphs = torch.compiler.disable(self._verify)  # here, since it imports the compiler

    def __reduce__(self) -> Any:
        return VerifyEvery, (None, self._steps)  # parameters pickle as plain ones

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """VerificationError on every rank of a shard group if any of its bytes differ."""
        self._outside_of_graphs()

    def _verify(self) -> None:
        casts = None if self._casts is None else self._casts()
        if casts is None:
            return
        casts.before_gather()
        if casts.steps >= self._verified + self._steps:
            self._verified = casts.steps
            verify(casts).raise_for_differences()
