"""Bytes a parameter, measured and not computed: from the live buffers and from the collectives that really ran."""

from collections import Counter
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zerocast


def count_parameters(model: nn.Module) -> int:
    """Count the elements of all parameters; a tied matrix counts once."""
    return sum(p.numel() for p in model.parameters())


def forward_buffers(parameter: nn.Parameter) -> list[Tensor]:
    """List what the forward pass reads of a parameter: codes and scales of a quantized weight, else the parameter."""
    if isinstance(parameter, zerocast.QuantizedWeight):
        return [b for b in (parameter.rowwise_data, parameter.rowwise_scale_inv) if b is not None]
    return [parameter.detach()]


def resident_buffers(parameter: nn.Parameter) -> list[Tensor]:
    """List all that stays of a parameter between steps: `forward_buffers` and the copies for the backward pass."""
    if isinstance(parameter, zerocast.QuantizedWeight):
        columnwise = (parameter.columnwise_data, parameter.columnwise_scale_inv)
        return forward_buffers(parameter) + [b for b in columnwise if b is not None]
    return [parameter.detach()]


def bytes_per_parameter(model: nn.Module) -> dict[str, float]:
    """Weigh all parameters, quantized or not: bytes that the forward pass reads, and bytes that are resident."""
    count = count_parameters(model)
    return {
        "forward": sum(_nbytes(forward_buffers(p)) for p in model.parameters()) / count,
        "resident": sum(_nbytes(resident_buffers(p)) for p in model.parameters()) / count,
    }


class TrafficCounter(TorchDispatchMode):
    """While entered, adds up the bytes of the collectives that this process issues, by what they are for.

    It sees every c10d operation at the dispatcher, whoever calls it. The size of a collective is its full-size side:
    what an all-gather puts out, what a reduce-scatter takes in, this rank's own part included (a ring sends (n - 1) /
    n of it). All-gathers into the storage of a parameter are `weight_gather`, the rest goes by the name of its
    operation. It slows every operation down, so enter it for one step only.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: Counter[str] = Counter()
        self._weights = {b.untyped_storage().data_ptr() for p in model.parameters() for b in resident_buffers(p)}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run `func`, and count it if it is a collective."""
        if func.namespace == "c10d":
            self._count(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        outputs, inputs = _tensors(args[0]), _tensors(args[1])
        is_weight = "allgather" in name and any(t.untyped_storage().data_ptr() in self._weights for t in outputs)
        self.nbytes["weight_gather" if is_weight else name] += max(_nbytes(outputs), _nbytes(inputs))


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
