"""Bytes a parameter, measured and not computed: from the live buffers and from the collectives that really ran."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zerocast


def count_parameters(model: nn.Module) -> int:
    """Count the elements of all parameters; a tied matrix counts once."""
    return sum(p.numel() for p in model.parameters())


def parameters_as_read(model: nn.Module) -> Iterator[Tensor]:
    """Give every parameter as products read it: under FSDP2 one module after another is gathered, and sharded again."""
    sharded: list[tuple[str, Any]] = [(name, m) for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    if not sharded:
        yield from model.parameters()
    owner = {name: module for prefix, module in sharded for name, _ in module.named_parameters(prefix)}  # the innermost
    for prefix, module in sharded:
        module.unshard()
        for name, parameter in module.named_parameters(prefix):
            if owner[name] is module:
                yield parameter.to_local() if isinstance(parameter, DTensor) else parameter
        module.reshard()


def forward_buffers(parameter: Tensor) -> list[Tensor]:
    """List what the forward pass reads of a parameter: codes and scales of a quantized weight, else the parameter."""
    if isinstance(parameter, zerocast.QuantizedWeight):
        return [b for b in (parameter.rowwise_data, parameter.rowwise_scale_inv) if b is not None]
    return [parameter.detach()]


def resident_buffers(parameter: Tensor) -> list[Tensor]:
    """List all that is kept of a parameter to compute with: `forward_buffers` and copies for the backward pass.

    Under FSDP2 only while it is gathered, and there copies for the backward pass are not kept.
    """
    if isinstance(parameter, zerocast.QuantizedWeight):
        columnwise = (parameter.columnwise_data, parameter.columnwise_scale_inv)
        return forward_buffers(parameter) + [b for b in columnwise if b is not None]
    return [parameter.detach()]


def bytes_per_parameter(model: nn.Module) -> dict[str, float]:
    """Weigh all parameters, quantized or not: bytes that the forward pass reads, and bytes that are resident."""
    count = forward = resident = 0
    for parameter in parameters_as_read(model):
        count += parameter.numel()
        forward += _nbytes(forward_buffers(parameter))
        resident += _nbytes(resident_buffers(parameter))
    return {"forward": forward / count, "resident": resident / count}


class TrafficCounter(TorchDispatchMode):
    """While entered, adds up the bytes of the collectives that this process issues, by what they are for.

    It sees every c10d operation at the dispatcher, whoever calls it. The size of a collective is its full-size side:
    what an all-gather puts out, what a reduce-scatter takes in, this rank's own part included (a ring sends (n - 1) /
    n of it). All-gathers into the storage of a parameter, under FSDP2 all of them, are `weight_gather`; the rest goes
    by the name of its operation. It slows every operation down, so enter it for one step only.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: Counter[str] = Counter()
        self._is_fsdp = isinstance(model, FSDPModule)
        parameters = () if self._is_fsdp else model.parameters()
        self._weights = {b.untyped_storage().data_ptr() for p in parameters for b in resident_buffers(p)}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run `func`, and count it if it is a collective."""
        if func.namespace == "c10d":
            self._count(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        outputs, inputs = _tensors(args[0]), _tensors(args[1])
        of_parameter = self._is_fsdp or any(t.untyped_storage().data_ptr() in self._weights for t in outputs)
        is_weight = "allgather" in name and of_parameter
        self.nbytes["weight_gather" if is_weight else name] += max(_nbytes(outputs), _nbytes(inputs))


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
