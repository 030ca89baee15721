"""Source: the masters of one DistributedOptimizer as `zerocast.verify` sees them, and whether their bytes have been gathered."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zerocast import CastPlan
from zerocast.verification.master_views import MasterViews

from .shards import Shards
from .te_tensors import TETensors


class Source:
    """`shards`, `theirs` among them, as `plan` casts them; `gathers` are the bucket groups that bring their bytes.

    `finish` waits for one of them.
    """

    def __init__(
        self,
        plan: CastPlan,
        shards: Shards,
        theirs: TETensors,
        gathers: Sequence[Any],
        finish: Callable[[Any], None],
    ) -> None:
        self._plan, self._shards, self._theirs, self._gathers = plan, shards, theirs, list(gathers)
        self._finish = finish
        self._due: set[int] = set()
        self._claim = plan.claim("an attachment to Megatron-Core")

    def cast(self) -> None:
        """The masters were cast: every bucket group has a gather before it."""
        self._due = set(map(id, self._gathers))

    def gathered(self, bucket_group: Any) -> None:
        """A gather has brought the bytes of the last cast."""
        self._due.discard(id(bucket_group))

    def gather(self) -> None:
        """Gather all bytes now, those on their way first. Collective."""
        for bucket_group in self._gathers:
            self._finish(bucket_group)
            bucket_group.start_param_sync(force_sync=True)

    def gather_due(self) -> None:
        """Gather the bytes of the last cast that no gather has brought, as the next forward pass would. Collective."""
        for bucket_group in self._gathers:
            self._finish(bucket_group)
            if id(bucket_group) in self._due:
                bucket_group.start_param_sync(force_sync=True)

    def master_views(self) -> Iterator[MasterViews]:
        """The masters; what no gather has brought since the last cast is gathered first, as the next forward pass would."""
        self.gather_due()
        self._theirs.follow_copies()
        scales = {id(owned.weight): owned.scale for source in self._plan.master_views() for owned in source.masters}
        yield MasterViews(self._plan.group, tuple(self._shards.owned(scales)))


def masters_from_model(optimizer: Any, shards: Shards, theirs: TETensors) -> Callable[..., None]:
    """Masters from the model, as at the start of a fine-tuning run: from a state dict by the host, from codes by dequantizing."""
    original = optimizer._copy_model_params_to_main_params

    @torch.no_grad()
    def copy_model(state_dict: Any = None) -> None:
        if state_dict is not None:
            original(state_dict=state_dict)
            return
        theirs.follow()
        for i, (weight, master) in enumerate(zip(shards.weights, shards.masters, strict=True)):
            if master is not None:
                span = shards.span(i)
                master.copy_(weight.dequantize().view(-1)[span.start : span.stop])
        for part, master in shards.plain:
            master.copy_(part)

    return copy_model
