"""The parameters of a model as names and shapes. Nothing here needs torch."""

from dataclasses import dataclass
from typing import NamedTuple

Shape = tuple[int, ...]
ROOT = -1


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model.

    `linear` marks the weight of a product inside a block, which a recipe would quantize. `unit` is
    the number of its block, or ROOT outside of all blocks.
    """

    name: str
    shape: Shape
    linear: bool
    unit: int = ROOT


class Model(NamedTuple):
    """The parameters of a model.

    Attributes:
        parameters: in the order of registration.
        not_counted: a description of the other tensors of a published checkpoint; empty if there
            are none.
    """

    parameters: list[Parameter]
    not_counted: str = ""
