"""Untrained: the frozen parameters and buffers of a model in a checkpoint.

    model.<name>               a frozen plain parameter, in its dtype
    zerocast.<name>.<buffer>   the bytes of a frozen quantized weight, which has no master
    buffers.<name>             a persistent buffer that is equal on all ranks
    buffers_of_ranks.<rank>.<name>   one that differs between ranks, such as the statistics of a
                                     BatchNorm

The optimizer knows the frozen parameters that it was given. The rest of a model is known only if
the model is passed; otherwise the manifest and the log list it as not saved. The bytes of a
quantized weight are saved unchanged, since a cast of the dequantized values would change some
bytes.
"""

import logging
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zerocast.checkpoint import extras
from zerocast.checkpoint.checkpointed import Checkpointed
from zerocast.checkpoint.manifest import Stored
from zerocast.distributed.group import Group
from zerocast.formats import Columnwise
from zerocast.formats.element import dtype_name
from zerocast.weight import QuantizedWeight
from zerocast.weight.buffers import StoredWeight
from zerocast.weight.owners import is_trained
from zerocast.weight.state import WeightState
from zerocast.weight.validity import Use

logger = logging.getLogger(__name__)
BUFFERS = "buffers"
UNKNOWN = (
    "buffers of the model, and parameters that the optimizer was not given: pass model= to save and load to have them in "
    "the checkpoint"
)
# The models (or optimizers that know no model) whose incomplete checkpoints were logged already.
_logged: "weakref.WeakSet[Any]" = weakref.WeakSet()


@dataclass(frozen=True)
class Untrained:
    """The tensors of a model that its optimizer does not train.

    Attributes:
        plain: frozen plain parameters keyed by name. Empty if the optimizer knows the model, since
            its state then has them.
        quantized: frozen quantized weights keyed by name.
        buffers: persistent buffers keyed by name.
        empty: the shapes of persistent buffers without elements, keyed by name. They are not saved.
        left_out: descriptions of state that the checkpoint does not have.
    """

    plain: dict[str, Tensor] = field(default_factory=dict)
    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    empty: dict[str, torch.Size] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @staticmethod
    def collect(optimizer: Checkpointed, model: nn.Module | None, masters: Mapping[str, Any]) -> "Untrained":
        """Return the untrained tensors of `model`, or of the model that the optimizer knows.
        Parameters that another optimizer trains are left out: that one's checkpoint has them, and
        its next step would raise if a load wrote them.

        `masters` are the optimizer's entries keyed by name. Raises ValueError if a frozen parameter
        of the model has the same name as one of them.
        """
        model = optimizer.model if model is None else model
        trained_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        model_parameters = {} if model is None else dict(model.named_parameters())
        model_ids = {id(parameter) for parameter in model_parameters.values()}
        only_given = {name: parameter for name, parameter in optimizer.frozen.items() if id(parameter) not in model_ids}
        plain: dict[str, Tensor] = {}
        quantized: dict[str, QuantizedWeight] = {}
        for name, parameter in {**only_given, **model_parameters}.items():
            if id(parameter) in trained_ids or is_trained(parameter) or not parameter.numel():
                continue
            if isinstance(parameter, QuantizedWeight):
                quantized[name] = parameter
            elif optimizer.model is None:
                plain[name] = parameter
        if optimizer.model is None and (both := sorted({*plain, *quantized} & {*masters})):
            raise ValueError(
                f"the model calls a parameter {both[0]} that the optimizer does not train, and the optimizer a different one: "
                "pass the optimizer the names of this model, model.named_parameters()"
            )
        if model is None:
            return Untrained(plain, quantized, left_out=(UNKNOWN,))
        buffers = persistent_buffers(model)
        left_out = tuple(
            f"the extra state of module {name or type(module).__name__}"
            for name, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        )
        empty = {name: buffer.shape for name, buffer in buffers.items() if not buffer.numel()}
        held = {name: buffer for name, buffer in buffers.items() if name not in empty}
        return Untrained(plain, quantized, held, empty, left_out)

    def check(self) -> None:
        """Raise RuntimeError for a weight that was never cast, or whose last write did not
        finish.
        """
        for weight in self.quantized.values():
            weight.check(Use.COPY)

    def formats(self) -> dict[str, Stored]:
        """Return the formats of quantized weights, as a manifest records them."""
        return {name: Stored(str(weight.format), dtype_name(weight.dtype)) for name, weight in self.quantized.items()}

    def state(self, group: Group) -> dict[str, dict[str, Any]]:
        """Return the entries of a checkpoint. Collective."""
        weights: dict[str, Any] = {}
        for name, weight in self.quantized.items():
            weight.wait()
            weights[name] = own_buffers(weight)
        plain = {name: parameter.detach() for name, parameter in self.plain.items()}
        return {"model": plain, "zerocast": weights, **extras.state_of(self.buffers, group, BUFFERS)}

    def to_overwrite(self, saved: Mapping[str, Any], group: Group) -> dict[str, dict[str, Any]]:
        """Return the same entries, for a reader that fills them. Bytes of quantized weights are
        read into new memory, from which `take` copies them into the weights.

        `saved` are the entries of the checkpoint's metadata. If a different number of ranks saved
        it, rank r loads the buffers of rank r modulo that number.
        """
        weights = {
            name: {key: torch.empty_like(buffer) for key, buffer in own_buffers(weight).items()}
            for name, weight in self.quantized.items()
        }
        world = extras.world_of(saved, BUFFERS)
        if world not in (0, group.size) and group.rank == 0:
            logger.warning(
                "buffers of each of %d ranks are in the checkpoint, and %d ranks load it: rank r loads those of rank r modulo %d",
                world,
                group.size,
                world,
            )
        buffers = extras.to_overwrite(self.buffers, saved, BUFFERS, group.rank % max(1, world))
        plain = {name: parameter.detach() for name, parameter in self.plain.items()}
        return {"model": plain, "zerocast": weights, **buffers}

    def take(self, loaded: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy loaded bytes, keyed by name, into the quantized weights."""
        for name, weight in self.quantized.items():
            take_buffers(weight, loaded[name])

    def problems(self, saved: Mapping[str, Any], state: Mapping[str, Any], formats: Mapping[str, Stored]) -> list[str]:
        """Return the reasons why the entries of `to_overwrite` cannot be loaded: tensors of a
        different dtype, which a load would round, buffers that have elements only in the
        checkpoint, and quantized weights of a different format, in which the same bytes are
        different values. `saved` and `formats` come from the checkpoint.
        """
        # A load converts plain parameters like masters.
        problems = other_dtypes({key: entries for key, entries in state.items() if key != "model"}, saved)
        for name, shape in self.empty.items():
            # Buffers that differ between ranks are under the number of each rank.
            keys = [key for key in saved if key.startswith(BUFFERS) and key.endswith(f".{name}")]
            for key in keys[:1]:
                problems.append(f"{key} has shape {tuple(saved[key].size)} in the checkpoint, expected {tuple(shape)}")
        for name, here in self.formats().items():
            there = formats.get(name, here)
            if (there.format, there.dtype) != (here.format, here.dtype):
                problems.append(
                    f"the frozen weight {name} is {there.format} of {there.dtype} in the checkpoint, expected {here.format} of "
                    f"{here.dtype}: it has no master to cast from, so load it in the format in which it was saved"
                )
        return problems

    def log_left_out(self, optimizer: Checkpointed, rank: int) -> None:
        """Log, once for each model, which state its checkpoints do not have."""
        owner = optimizer if optimizer.model is None else optimizer.model
        if self.left_out and rank == 0 and owner not in _logged:
            _logged.add(owner)
            logger.warning("checkpoints of this run do not include %s", "; ".join(self.left_out))


def leaves(prefix: str, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested state with their names, in which dots join the keys."""
    for key, value in state.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from leaves(name, value)
        else:
            yield name, value


def other_dtypes(state: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return a problem for each tensor of `state` that has a different dtype in the checkpoint."""
    problems = []
    for name, tensor in leaves("", state):
        entry = saved.get(name)
        if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype != tensor.dtype:
            problems.append(f"{name} is {entry.properties.dtype} in the checkpoint, expected {tensor.dtype}")
    return problems


def own_buffers(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the buffers of a weight that are not derived from other buffers, as they are
    stored.
    """
    has_derived_copy = weight.format.columnwise is Columnwise.TRANSPOSE
    return {
        name: buffer.detach()
        for name, buffer in weight.state.buffers.items()
        if buffer is not None and not (has_derived_copy and name.startswith("columnwise"))
    }


def take_buffers(weight: QuantizedWeight, loaded: Mapping[str, Tensor]) -> None:
    """Copy the result of `own_buffers` of a weight of the same format into this weight, and make
    its columnwise copy again if it keeps one.
    """
    state = weight.state
    weight.wait()
    buffers: dict[str, Tensor | None] = dict(loaded)
    if state.buffers["columnwise_data"] is not None and state.format.columnwise is Columnwise.TRANSPOSE:
        rowwise = loaded["rowwise_data"], loaded.get("rowwise_scale_inv")
        reader = StoredWeight(state.shape, str(state.format), state.dtype, True, *rowwise, None, None, None)
        column_data, column_scale_inv = reader.direction(columnwise=True)
        buffers["columnwise_data"] = column_data
        # A scale per tensor serves both directions.
        if state.format.block is not None:
            buffers["columnwise_scale_inv"] = column_scale_inv
    state.copy_from(WeightState(state.format, state.shape, state.dtype, buffers))
    state.validity.changed()


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of a model, each under its first name."""
    buffers: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffers.setdefault(id(buffer), (f"{prefix}.{name}" if prefix else name, buffer))
    return dict(buffers.values())
