"""LeftOut: what a model computes with beside the parameters that an optimizer trains. Rank 0's
values of trained ones become those of all ranks, and every step keeps them alike. Nothing does that
for frozen parameters, for ones that another optimizer steps, and for buffers.

Ranks may differ in these rightly, as in experts or in the statistics of their own batches. So what
differs is logged once, and never raised.
"""

import hashlib
import logging
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zerocast.distributed.agreement import largest_of_ranks
from zerocast.distributed.group import Group
from zerocast.weight import QuantizedWeight
from zerocast.weight.models import models_of
from zerocast.weight.owners import is_trained

logger = logging.getLogger(__name__)
SHOWN = 4
# Steps taken when ranks compare. Before the first one other optimizers may not be built yet; after
# it those that leave ranks apart have stepped.
COMPARED_AFTER = (1, 100)


class LeftOut:
    """What an optimizer leaves as it is: the `frozen` parameters that it was given, by name, and
    all else in models that hold any of those that it `trained`. Collective calls.

    A model is known once `zerocast.quantize_` has changed it.
    """

    def __init__(self, group: Group, frozen: Mapping[str, Tensor], trained: Sequence[Tensor]) -> None:
        self._group, self._told = group, set[str]()
        self._models = list(map(weakref.ref, models_of(trained)))
        # All ranks compare again if any of them knows a model.
        self._has_models = self._compare(frozen)

    def after_steps(self, taken: int) -> None:
        """Before a step, after so many: compare, a few times in a run, all that is left out."""
        if self._has_models and taken in COMPARED_AFTER:
            self._compare(self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for model in (reference() for reference in self._models):
            if model is not None:
                parameters = {name: p for name, p in model.named_parameters() if not is_trained(p)}
                found = {**parameters, **dict(model.named_buffers()), **found}
        return {name: tensor for name, tensor in found.items() if name not in self._told}

    def _compare(self, tensors: Mapping[str, Tensor]) -> bool:
        """Log, on rank 0, which of these do not have the same bytes on all ranks, of those that
        several ranks have. It reads each once. Returns whether any rank knows a model.
        """
        if self._group.size == 1:
            return False
        sums = {name: _sum(tensor) for name, tensor in sorted(tensors.items())}
        digest = int.from_bytes(hashlib.sha256(repr(sums).encode()).digest()[:7], "big")
        words = [digest, -digest, int(bool(self._models))]
        highest, negated, has_models = largest_of_ranks(self._group, words, "digests of what is not trained")
        if highest != -negated:
            by_rank = self._group.all_gather_object(sums, "sums of what is not trained")
            self._tell(
                [
                    name
                    for name in by_rank[0]
                    if any(one.get(name, by_rank[0][name]) != by_rank[0][name] for one in by_rank)
                ]
            )
        return bool(has_models)

    def _tell(self, names: Sequence[str]) -> None:
        self._told.update(names)
        if names and self._group.rank == 0:
            logger.warning(
                "%d parameters and buffers that this optimizer does not train have other values on other ranks, among them %s: "
                "only trained ones begin as on rank 0 and stay alike. Load or seed the others alike on all ranks, and give the "
                "optimizer the parameters that are to be trained",
                len(names),
                ", ".join(names[:SHOWN]),
            )


@torch.no_grad()
def _sum(tensor: Tensor) -> int:
    """The sum of the bytes; zero for a tensor without bytes that can be read."""
    held = tensor.rowwise_data if isinstance(tensor, QuantizedWeight) else tensor.detach()
    if type(held) is not Tensor or held.is_meta or not held.numel():
        return 0
    return int(held.contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64))
