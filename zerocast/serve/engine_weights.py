"""EngineWeights: the interface of an inference engine's weights, by which they are refitted.

An engine has its weights in three layouts. Checkpoint: the stored tensors, complete. Model: what
the engine's own loaders make of them on one rank, fused and split for tensor parallelism. Kernel:
what its products read, possibly packed again. A `Region` leads from the first to the second. The
engine's side, one implementation for each engine, leads from the second to the third.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zerocast.serve.receiving import Layout
from zerocast.serve.refit_message import RefitError


@dataclass(frozen=True)
class Strided:
    """Elements of a contiguous tensor: sizes, strides and the first one, in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, tensor: Tensor) -> Tensor:
        """Return a view of these elements."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class Region:
    """Elements of a stored tensor, and where an engine has them on this rank.

    Attributes:
        stored: the elements of the stored tensor.
        name: the tensor in model layout that has them here.
        own: the elements of that tensor, of equal sizes.
    """

    stored: Strided
    name: str
    own: Strided


@dataclass(frozen=True)
class ModelTensor:
    """A tensor in model layout.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        padding: elements that are stored nowhere. They are zeros.
        is_uniform: True if the engine takes one element for all, so that all must be equal.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    padding: tuple[Strided, ...] = ()
    is_uniform: bool = False


def check_uniform(name: str, value: Tensor) -> None:
    """Raise RefitError unless all elements are equal."""
    if value.unique().numel() > 1:
        raise RefitError(
            f"{name} would be {value.tolist()}, one for each of the weights that the engine fuses, and it takes one for all: train "
            "with quantize_(..., serve='vllm')"
        )


def elements_taken(layout: Layout, regions: Mapping[str, Iterable[Region]]) -> dict[str, Tensor]:
    """Return u8 tensors of the stored shapes, keyed by name: 1 for each element that is on this
    rank.
    """
    taken = {name: torch.zeros(shape, dtype=torch.uint8) for name, _, shape in layout}
    for name, places in regions.items():
        for region in places:
            region.stored.view(taken[name]).fill_(1)
    return taken


def check_filled(tensors: Mapping[str, ModelTensor], regions: Iterable[Region]) -> None:
    """Raise RefitError unless regions and padding fill every element of the tensors, each of them
    once.
    """
    filled: dict[str, list[Strided]] = {}
    for region in regions:
        filled.setdefault(region.name, []).append(region.own)
    for name, own in tensors.items():
        times = torch.zeros(own.shape, dtype=torch.uint8)
        for elements in (*filled.get(name, ()), *own.padding):
            elements.view(times).add_(1)
        empty, repeated = int((times == 0).sum()), int((times > 1).sum())
        if empty or repeated:
            raise RefitError(
                f"{times.numel() - empty} of the {times.numel()} elements of {name} are filled, {repeated} of them more than once: "
                "the sender has weights that differ from this engine's, or stores them differently"
            )


class EngineWeights(Protocol):
    """The weights of one rank of an engine."""

    def regions(self, layout: Layout) -> Mapping[str, list[Region]]:
        """Return where the elements of each stored tensor of a bucket are on this rank; none for a
        tensor that other ranks have.

        Raises ValueError for tensors that the engine takes otherwise than byte by byte.
        """
        ...

    def model_tensors(self) -> Mapping[str, ModelTensor]:
        """Return the tensors in model layout by name, after `regions` of all buckets."""
        ...

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Give the engine all tensors in model layout, contiguous, on any device."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the engine's bytes in model layout, contiguous. Written to, they change; then
        `written` says so. Valid after `load`.

        Where products read a different layout these may be the bytes from which it was made.
        """
        ...

    def written(self, names: Iterable[str]) -> None:
        """Make the engine compute with tensors that were written to."""
        ...

    def check(self) -> None:
        """Compare what products read with what was made of `tensors`, where that is a different
        layout. Raises ValueError, naming a tensor, if they differ.
        """
        ...
