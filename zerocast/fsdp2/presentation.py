"""Presentation: as which tensor a module sees a gathered weight.

Bytes are gathered into a QuantizedWeight, which torch's layers compute with. A host whose layers
compute with tensors of their own gives `prepare` a function that finds a `Presentation` for each
weight: the same bytes, as its tensor. This package knows hosts by name alone.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from zerocast.formats import FormatSpec
from zerocast.weight.weight import QuantizedWeight


class Presentation(Protocol):
    """How one weight is seen by the modules that hold it."""

    def check(self, fmt: FormatSpec) -> None:
        """ValueError for a format that the modules cannot compute with; nothing is changed."""

    def attach(self, module: nn.Module, name: str) -> None:
        """`module` holds the weight as parameter `name`; called once for each, after all checks."""

    def show(self, weight: QuantizedWeight) -> Tensor:
        """A tensor over the buffers of `weight`, for the first gather; nothing is copied.

        FSDP2 makes a parameter of it, which is another object, by `as_strided` and `detach`.
        """

    def refill(self, shown: Tensor, weight: QuantizedWeight) -> None:
        """The bytes behind `shown`, that parameter, are those of another gather: what was derived
        from earlier ones is dropped.
        """

    def live(self, shown: Tensor, weight: QuantizedWeight) -> QuantizedWeight:
        """What products of `shown` would read now, for `zerocast.verify`."""


# What presents the parameter of this name and module, given the format that it is gathered in; None
# where it is a QuantizedWeight. ValueError for a parameter that it cannot present.
Present = Callable[[nn.Module, str, Tensor], Presentation | None]


class AsQuantizedWeight:
    """The presentation to all modules that nothing else is asked for."""

    def check(self, fmt: FormatSpec) -> None:
        """Every format will do."""

    def attach(self, module: nn.Module, name: str) -> None:
        """Nothing is done to the module."""

    def show(self, weight: QuantizedWeight) -> Tensor:
        """The weight itself."""
        return weight

    def refill(self, shown: Tensor, weight: QuantizedWeight) -> None:
        """Its own counters tell what is old."""

    def live(self, shown: Tensor, weight: QuantizedWeight) -> QuantizedWeight:
        """The weight that FSDP2 holds."""
        assert isinstance(shown, QuantizedWeight)
        return shown


AS_QUANTIZED_WEIGHT: Presentation = AsQuantizedWeight()
# packages whose modules give kernels the memory of their own tensors, and what presents them
OWN_TENSORS = {"transformer_engine": "zerocast.integrations.transformer_engine.present"}


def owner_of_tensors(module: nn.Module) -> str | None:
    """The package in `OWN_TENSORS` that a class of the module, its own or a base, comes from."""
    packages = (kind.__module__.partition(".")[0] for kind in type(module).__mro__)
    return next((package for package in packages if package in OWN_TENSORS), None)


def only_quantized_weights(module: nn.Module, name: str, parameter: Tensor) -> None:
    """The `Present` of a model whose modules are torch's; ValueError for one of another host."""
    package = owner_of_tensors(module)
    if package is not None:
        raise ValueError(
            f"{name} of a {type(module).__name__} is multiplied as a tensor of {package}'s own: give prepare "
            f"present={OWN_TENSORS[package]}, or leave it out of the recipe"
        )
