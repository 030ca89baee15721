"""Frozen parameters: rank 0's values of trained ones become everyone's, and no call makes these
alike, so each rank would compute with its own without a word. And an optimizer lays its masters out
once, so a parameter that is unfrozen later would get gradients and never change.
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.distributed.agreement import largest_of_ranks
from zerocast.distributed.group import Group
from zerocast.weight import QuantizedWeight
from zerocast.weight.owners import is_trained

logger = logging.getLogger(__name__)
SHOWN = 4


def listed(params: Iterable[Any]) -> list[Any]:
    """The given pairs, or groups of pairs, in lists that can be gone through again."""
    return [{**item, "params": list(item.get("params", ()))} if isinstance(item, dict) else item for item in params]


def frozen(params: Sequence[Any]) -> dict[str, Tensor]:
    """The parameters by name, of pairs or of groups of pairs, that need no gradient."""
    pairs = [pair for item in params for pair in (item["params"] if isinstance(item, dict) else [item])]
    return {name: parameter for name, parameter in pairs if not parameter.requires_grad}


def warn_where_ranks_differ(group: Group, parameters: Mapping[str, Tensor]) -> None:
    """Log, on rank 0, which of these do not have the same bytes on all ranks. A collective call,
    which reads them once; several ranks may have other ones rightly, such as experts.
    """
    if group.size == 1:
        return
    sums = {name: _sum(parameter) for name, parameter in sorted(parameters.items())}
    digest = int.from_bytes(hashlib.sha256(repr(sums).encode()).digest()[:7], "big")
    highest, negated = largest_of_ranks(group, [digest, -digest], "digests of frozen parameters")
    if highest == -negated:
        return
    by_rank = group.all_gather_object(sums, "sums of frozen parameters")
    names = [name for name in by_rank[0] if any(name in other and other[name] != by_rank[0][name] for other in by_rank)]
    if names and group.rank == 0:
        logger.warning(
            "%d frozen parameters have other values on other ranks, among them %s: only trained ones begin as on rank 0, so load "
            "or seed the others alike on all ranks",
            len(names),
            ", ".join(names[:SHOWN]),
        )


class FrozenParameters:
    """The `parameters`, by name, that were frozen when the optimizer that lists them was built.

    It holds them strongly: torch's `swap_tensors`, by which `Module.to` may move a parameter,
    refuses a tensor that has weak references.
    """

    def __init__(self, parameters: Mapping[str, Tensor], optimizer: str) -> None:
        self.parameters = parameters
        self._optimizer = optimizer
        # quantized ones are looked after by `zerocast.weight.owners`
        self._plain = {name: p for name, p in parameters.items() if p.numel() and not isinstance(p, QuantizedWeight)}

    def check_still_frozen(self) -> None:
        """RuntimeError if a plain one requires a gradient now and no owner trains it. It looks at
        no gradient, which some ranks may have none of, so ranks of one program raise together.
        """
        unfrozen = [name for name, p in self._plain.items() if p.requires_grad and not is_trained(p)]
        if unfrozen:
            raise RuntimeError(
                f"{len(unfrozen)} parameters were frozen when this {self._optimizer} was built and require gradients now, among "
                f"them {', '.join(unfrozen[:SHOWN])}: it has no masters of them and would never train them. Build another one over "
                "all parameters, or call requires_grad_(False) on these"
            )


@torch.no_grad()
def _sum(parameter: Tensor) -> int:
    """The sum of the bytes; zero for a parameter without bytes that can be read."""
    held = parameter.rowwise_data if isinstance(parameter, QuantizedWeight) else parameter.detach()
    if type(held) is not Tensor or held.is_meta or not held.numel():
        return 0
    return int(held.contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64))
