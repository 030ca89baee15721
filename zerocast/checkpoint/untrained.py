"""Untrained: what training reads beside the masters, frozen parameters and buffers.

    model.<name>               a frozen plain parameter, in its own dtype
    zerocast.<name>.<buffer>   the bytes of a frozen quantized weight, which has no master
    buffers.<name>             a persistent buffer that all ranks have alike
    buffers_of_ranks.<rank>.<name>   one that differs, such as the statistics of a BatchNorm

The optimizer knows the frozen parameters that it was given. The rest of a model is known only if
the model is given; where it is not, the manifest and the log say so. Bytes of a quantized weight
are saved as they are, since casting dequantized values again would change some.
"""

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zerocast import backends
from zerocast.backends import ops
from zerocast.checkpoint import extras
from zerocast.checkpoint.manifest import Stored
from zerocast.checkpoint.sources.source import dtype_name
from zerocast.distributed.group import Group
from zerocast.formats import Columnwise
from zerocast.weight import QuantizedWeight
from zerocast.weight.state import WeightState
from zerocast.weight.validity import Use

logger = logging.getLogger(__name__)
BUFFERS = "buffers"
UNKNOWN = (
    "buffers of the model, and parameters that the optimizer was not given: pass model= to save and load to have them in "
    "the checkpoint"
)
_told: "weakref.WeakSet[Any]" = weakref.WeakSet()  # the runs whose incomplete saves were logged


class HasParameters(Protocol):
    """What is asked of an optimizer."""

    @property
    def param_groups(self) -> Any:
        """The parameter groups, as torch.optim.Optimizer has them."""

    @property
    def frozen(self) -> Mapping[str, Tensor]:
        """The parameters that it was given and does not train, by name."""

    @property
    def model(self) -> nn.Module | None:
        """The model, where the optimizer knows it."""


@dataclass(frozen=True)
class Untrained:
    """Plain parameters, quantized weights and buffers by name, and in words what is not known."""

    plain: dict[str, Tensor] = field(default_factory=dict)
    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @staticmethod
    def of(optimizer: HasParameters, model: nn.Module | None, masters: Mapping[str, Any]) -> "Untrained":
        """What `optimizer` does not train of the `model`; `masters` are its entries by name.
        ValueError for a frozen parameter that has the name of a trained one.
        """
        model = optimizer.model if model is None else model
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        of_model = {} if model is None else dict(model.named_parameters())
        known = {id(parameter) for parameter in of_model.values()}
        given = {name: parameter for name, parameter in optimizer.frozen.items() if id(parameter) not in known}
        plain: dict[str, Tensor] = {}
        quantized: dict[str, QuantizedWeight] = {}
        for name, parameter in {**given, **of_model}.items():
            if id(parameter) in trained or not parameter.numel():
                continue
            if isinstance(parameter, QuantizedWeight):
                quantized[name] = parameter
            elif optimizer.model is None:  # whoever knows the model has its plain parameters
                plain[name] = parameter
        if both := sorted({*plain, *quantized} & {*masters}) if optimizer.model is None else []:
            raise ValueError(
                f"the model calls a parameter {both[0]} that the optimizer does not train, and the optimizer another one: give "
                "the optimizer the names of this model, model.named_parameters()"
            )
        buffers, left_out = ({}, (UNKNOWN,)) if model is None else _buffers(model)
        return Untrained(plain, quantized, buffers, left_out)

    def check(self) -> None:
        """RuntimeError for a weight that was never cast, or whose last write broke off."""
        for weight in self.quantized.values():
            weight.check(Use.COPY)

    def formats(self) -> dict[str, Stored]:
        """The formats of quantized weights, as a manifest records them."""
        return {name: Stored(str(one.format), dtype_name(one.dtype)) for name, one in self.quantized.items()}

    def state(self, group: Group, what: str) -> dict[str, dict[str, Any]]:
        """The entries of a checkpoint. Collective."""
        of_weights: dict[str, Any] = {}
        for name, weight in self.quantized.items():
            weight.wait()
            of_weights[name] = own_buffers(weight)
        plain = {name: one.detach() for name, one in self.plain.items()}
        return {"model": plain, "zerocast": of_weights, **extras.state_of(self.buffers, group, BUFFERS, what)}

    def to_overwrite(self, saved: Mapping[str, Any], group: Group) -> dict[str, dict[str, Any]]:
        """The same entries, for a reader that fills them. Quantized bytes go into new memory, and
        into the weight by `take`.

        On another number of ranks, rank r takes buffers of rank r modulo the number that saved.
        """
        weights = {
            name: {key: torch.empty_like(buffer) for key, buffer in own_buffers(weight).items()}
            for name, weight in self.quantized.items()
        }
        world = extras.world_of(saved, BUFFERS)
        if world not in (0, group.size) and group.rank == 0:
            logger.warning(
                "buffers of each of %d ranks are in the checkpoint, and %d ranks load it: rank r takes those of rank r modulo %d",
                world,
                group.size,
                world,
            )
        buffers = extras.to_overwrite(self.buffers, saved, BUFFERS, group.rank % max(1, world))
        return {"model": {name: one.detach() for name, one in self.plain.items()}, "zerocast": weights, **buffers}

    def take(self, loaded: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Give quantized weights the bytes that were read for them."""
        for name, weight in self.quantized.items():
            take_buffers(weight, loaded[name])

    def problems(self, saved: Mapping[str, Any], state: Mapping[str, Any], formats: Mapping[str, Stored]) -> list[str]:
        """Tensors of another dtype, which a load would round, and weights that have another format
        among the `formats` of the checkpoint, in which the same bytes are other values.
        """
        pairs = [(f"{BUFFERS}.{name}", one) for name, one in state[BUFFERS].items()]
        pairs += [
            (f"{BUFFERS}_of_ranks.{rank}.{name}", one)
            for rank, own in state[f"{BUFFERS}_of_ranks"].items()
            for name, one in own.items()
        ]
        pairs += [
            (f"zerocast.{name}.{key}", one) for name, own in state["zerocast"].items() for key, one in own.items()
        ]
        found = other_dtypes(pairs, saved)
        for name, here in self.formats().items():
            there = formats.get(name, here)
            if (there.format, there.dtype) != (here.format, here.dtype):
                found.append(
                    f"{name} is frozen, and {there.format} of {there.dtype} there and {here.format} of {here.dtype} here: it has "
                    "no master to be cast from, so load it in the format that it was saved in"
                )
        return found

    def tell_left_out(self, optimizer: HasParameters, rank: int) -> None:
        """Log once a run what its checkpoints do not hold."""
        owner = optimizer if optimizer.model is None else optimizer.model
        if self.left_out and rank == 0 and owner not in _told:
            _told.add(owner)
            logger.warning("checkpoints of this run leave out %s", "; ".join(self.left_out))


def other_dtypes(pairs: list[tuple[str, Tensor]], saved: Mapping[str, Any]) -> list[str]:
    """A problem for each tensor that has another dtype in the checkpoint."""
    found = []
    for name, tensor in pairs:
        entry = saved.get(name)
        if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype != tensor.dtype:
            found.append(f"{name} is {entry.properties.dtype} there and {tensor.dtype} here")
    return found


def own_buffers(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the buffers of a weight that do not derive from others, as they are stored."""
    derives = weight.format.columnwise is Columnwise.TRANSPOSE
    return {
        name: buffer.detach()
        for name, buffer in weight.state.buffers.items()
        if buffer is not None and not (derives and name.startswith("columnwise"))
    }


def take_buffers(weight: QuantizedWeight, loaded: Mapping[str, Tensor]) -> None:
    """Copy the bytes that `own_buffers` gave of a weight of the same format into this one."""
    state = weight.state
    weight.wait()
    buffers: dict[str, Tensor | None] = dict(loaded)
    if state.buffers["columnwise_data"] is not None and state.format.columnwise is Columnwise.TRANSPOSE:
        buffers |= _columnwise(state, loaded)
    state.take(WeightState(state.format, state.matrix_shape, state.dtype, buffers))
    state.validity.changed()


def _columnwise(state: WeightState, loaded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The columnwise copy of rowwise bytes that were loaded, for a weight that keeps one."""
    data, scale_inv = loaded["rowwise_data"], loaded.get("rowwise_scale_inv")
    backend = backends.choose(data.device)
    made = ops.transposed(backend, str(state.format), data, scale_inv, *state.matrix_shape)
    return {"columnwise_data": made[0], **({"columnwise_scale_inv": made[1]} if state.format.block else {})}


def _buffers(model: nn.Module) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Persistent buffers by their first name, and the modules whose state is more than tensors."""
    persistent, left_out = {}, []
    for prefix, module in model.named_modules():
        front = f"{prefix}." if prefix else ""
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and buffer.numel():
                persistent[front + name] = buffer
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            left_out.append(f"the extra state of module {prefix or type(module).__name__}")
    first = {id(buffer): name for name, buffer in reversed(persistent.items())}
    return {name: one for name, one in persistent.items() if first[id(one)] == name}, tuple(left_out)
