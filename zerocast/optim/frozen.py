"""Frozen parameters: an optimizer lays its masters out once, so a parameter that is unfrozen later
would get gradients and never change.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from zerocast.weight import QuantizedWeight
from zerocast.weight.owners import is_trained

SHOWN = 4


def listed(params: Iterable[Any]) -> list[Any]:
    """The given pairs, or groups of pairs, in lists that can be gone through again."""
    return [{**item, "params": list(item.get("params", ()))} if isinstance(item, dict) else item for item in params]


def frozen(params: Sequence[Any]) -> dict[str, Tensor]:
    """The parameters by name, of pairs or of groups of pairs, that need no gradient."""
    pairs = [pair for item in params for pair in (item["params"] if isinstance(item, dict) else [item])]
    return {name: parameter for name, parameter in pairs if not parameter.requires_grad}


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
