"""Checks of the parameters and buffers that an optimizer does not train.

FrozenParameters raises if a parameter is unfrozen later. An optimizer lays its masters out once, so
such a parameter would get gradients and never change.

UntrainedTensors compares untrained tensors between ranks. Trained parameters begin with the values
of rank 0 and stay equal on all ranks. Nothing does that for frozen parameters, for parameters of
other optimizers, and for buffers. These may legitimately differ between ranks, as experts or batch
statistics do. So differences are logged once, and never raised.
"""

import hashlib
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast.distributed.agreement import first_of, largest_of_ranks
from zerocast.distributed.group import Group
from zerocast.formats.memory import as_bytes
from zerocast.weight import QuantizedWeight
from zerocast.weight.owners import is_trained, models_of

logger = logging.getLogger(__name__)
# The numbers of steps taken at which ranks compare. Before the first step other optimizers may not
# be built yet. After it, those whose ranks diverge have stepped as well.
COMPARED_AFTER = (1, 100)


def listed(params: Iterable[Any]) -> list[Any]:
    """Return the given parameters, (name, parameter) pairs, or groups of either, in lists that can
    be iterated over more than once.
    """
    items: list[Any] = []
    for item in params:
        if isinstance(item, dict):
            given = item.get("params", ())
            # torch takes a tensor for a group of one parameter.
            item = {**item, "params": [given] if isinstance(given, Tensor) else list(given)}
        items.append(item)
    return items


def frozen(params: Sequence[Any]) -> dict[str, Tensor]:
    """Return the parameters that need no gradient, keyed by name. `params` are (name, parameter)
    pairs or groups of them.
    """
    frozen_parameters: dict[str, Tensor] = {}
    for item in params:
        pairs = item["params"] if isinstance(item, dict) else [item]
        frozen_parameters |= {name: parameter for name, parameter in pairs if not parameter.requires_grad}
    return frozen_parameters


class FrozenParameters:
    """The parameters that were frozen when an optimizer was built over them.

    Attributes:
        parameters: the frozen parameters keyed by name. The references are strong, since torch's
            `swap_tensors`, with which `Module.to` may move a parameter, raises on a tensor that has
            weak references.
    """

    def __init__(self, parameters: Mapping[str, Tensor], optimizer: str) -> None:
        self.parameters: dict[str, Tensor] = {}
        self._optimizer = optimizer
        self.add(parameters, [])

    def add(self, frozen: Mapping[str, Tensor], trained: Sequence[Tensor]) -> None:
        """Add frozen parameters, and remove parameters that are trained now."""
        trained_ids = set(map(id, trained))
        self.parameters = {name: p for name, p in self.parameters.items() if id(p) not in trained_ids} | dict(frozen)
        # `zerocast.weight.owners` checks quantized parameters.
        self._plain = {
            name: p for name, p in self.parameters.items() if p.numel() and not isinstance(p, QuantizedWeight)
        }

    def check_still_frozen(self) -> None:
        """Raise RuntimeError if a plain parameter requires a gradient now and no owner trains it.
        Gradients are not inspected, since only some ranks may have one. So all ranks raise
        together.
        """
        unfrozen = []
        for name, p in self._plain.items():
            if p.requires_grad and not is_trained(p):
                unfrozen.append(name)
        if unfrozen:
            raise RuntimeError(
                f"{len(unfrozen)} parameters were frozen when this {self._optimizer} was built and require gradients now, among "
                f"them {first_of(unfrozen)}: the optimizer has no masters of them and would never train them. Build a new "
                "one over all parameters, or call requires_grad_(False) on these"
            )


class UntrainedTensors:
    """Compares the tensors that an optimizer does not train between ranks. Collective calls.

    These are the `frozen` parameters that it was given, and all untrained parameters and buffers of
    models that have any of its `trained` parameters. A model is known if `zerocast.quantize_` has
    changed it.
    """

    def __init__(self, group: Group, frozen: Mapping[str, Tensor], trained: Sequence[Tensor]) -> None:
        self._group = group
        # The names that were logged already.
        self._logged: set[str] = set()
        self.add(frozen, trained)

    def add(self, frozen: Mapping[str, Tensor], trained: Sequence[Tensor]) -> None:
        """Compare these frozen parameters, too. `trained` are all trained parameters."""
        self._models = list(map(weakref.ref, models_of(trained)))
        # All ranks compare again if any of them knows a model.
        self._has_models = self._compare(frozen)

    def after_steps(self, taken: int) -> None:
        """Compare all untrained tensors after some numbers of steps. Called before each step with
        the number of steps taken.
        """
        if self._has_models and taken in COMPARED_AFTER:
            self._compare(self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for model in (reference() for reference in self._models):
            if model is not None:
                parameters = {name: p for name, p in model.named_parameters() if not is_trained(p)}
                tensors = {**parameters, **dict(model.named_buffers()), **tensors}
        return {name: tensor for name, tensor in tensors.items() if name not in self._logged}

    def _compare(self, tensors: Mapping[str, Tensor]) -> bool:
        """Log, on rank 0, the names of tensors whose bytes differ between ranks. A rank that lacks
        a tensor is not compared. Each tensor is read once. Returns True if any rank knows a model.
        """
        if self._group.size == 1:
            return False
        sums = {name: _sum(tensor) for name, tensor in sorted(tensors.items())}
        digest = int.from_bytes(hashlib.sha256(repr(sums).encode()).digest()[:7], "big")
        words = [digest, -digest, int(bool(self._models))]
        highest, negated, has_models = largest_of_ranks(self._group, words, "digests of untrained tensors")
        if highest != -negated:
            by_rank = self._group.all_gather_object(sums, "sums of untrained tensors")
            differing = []
            for name, expected in by_rank[0].items():
                if any(rank_sums.get(name, expected) != expected for rank_sums in by_rank):
                    differing.append(name)
            self._log(differing)
        return bool(has_models)

    def _log(self, names: Sequence[str]) -> None:
        self._logged.update(names)
        if names and self._group.rank == 0:
            logger.warning(
                "%d parameters and buffers that this optimizer does not train have different values on different ranks, among them "
                "%s: only trained ones start from rank 0's values and stay equal. Load or seed the others identically on all "
                "ranks, and pass the parameters that are to be trained to the optimizer",
                len(names),
                first_of(names),
            )


@torch.no_grad()
def _sum(tensor: Tensor) -> int:
    """Return the sum of the bytes of a tensor; zero if they cannot be read."""
    data = tensor.rowwise_data if isinstance(tensor, QuantizedWeight) else tensor.detach()
    if type(data) is not Tensor or data.is_meta or not data.numel():
        return 0
    return int(as_bytes(data.contiguous()).sum(dtype=torch.int64))
