"""Hybrid tensors: two directions, each a tensor with a quantizer of its own, cast from one master."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .adapters import adapter_of, hybrid, is_quantized, quantizer_of
from .host import require


def is_hybrid(tensor: Any) -> bool:
    """Whether a tensor holds its two directions as two tensors."""
    return type(quantizer_of(tensor)) is hybrid()


def directions(tensor: Any) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of the directions that are there."""
    require(tensor, ["_rowwise_storage", "_columnwise_storage"])
    for name in ("rowwise", "columnwise"):
        part = getattr(tensor, f"_{name}_storage")
        if part is not None:
            yield name, part


def check_hybrid(tensor: Any, master: Tensor | None, start: int | None, shard: Any) -> None:
    """ValueError with the reason where the directions of a Hybrid tensor are not cast."""
    held = dict(directions(tensor))
    if not held:
        raise ValueError("both directions of the Hybrid tensor were dropped: there is nothing to cast into")
    for name, part in held.items():
        reason = adapter_of(quantizer_of(part)).alone
        if reason:
            kind = type(quantizer_of(part)).__name__
            raise ValueError(f"{kind} is not cast as the {name} direction of a Hybrid tensor: {reason}")
    if "columnwise" in held and getattr(quantizer_of(tensor), "columnwise_source", "original") != "original":
        raise ValueError(
            "the columnwise direction of the Hybrid tensor is made from the rowwise one, which is whole only after the "
            "all-gather; keep the rowwise direction alone, or columnwise_source='original'"
        )
    if master is None or len(held) < 2 or (start == 0 and master.numel() == tensor.numel()):
        return
    if not (is_quantized(shard) and is_hybrid(shard) and len(dict(directions(shard))) == 2):
        raise ValueError(
            f"{master.numel()} of {tensor.numel()} elements are owned here, and an all-gather of one direction's codes leaves "
            "the other direction of the Hybrid tensor stale: give whole masters, a Hybrid shard, or keep one direction"
        )
