"""WeightSource: where the tensors of a served model come from, one batch after another.

A model of whole weights, in one process or under ZeroAdamW, gives one tensor at a time. Under FSDP2
a batch is what one group gathers: all ranks iterate together, and what one of them does with a
batch is done before the next is gathered.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerocast.distributed.group import ONE_PROCESS, Group
from zerocast.formats import FormatSpec
from zerocast.verification.master_views import owners_of
from zerocast.weight import QuantizedWeight

Batch = Sequence[tuple[str, Tensor]]


class WeightSource(Protocol):
    """The tensors of a model by name, shared ones once; `formats` are those of quantized weights.

    Ranks of `group` call `batches` together and agree after each of them.
    """

    @property
    def group(self) -> Group:
        """The ranks that read together; the first of them writes."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The logical shape of each weight by name."""
        ...

    @property
    def formats(self) -> Mapping[str, FormatSpec]:
        """Formats of quantized weights, so that what cannot be expressed is known before any
        tensor is read.
        """
        ...

    @property
    def nominal(self) -> torch.dtype | None:
        """The nominal dtype of the quantized weights; None if they have several, or there are
        none.
        """
        ...

    def batches(self) -> Iterator[Batch]:
        """The tensors; a batch is valid until the next one is asked for."""
        ...


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, shared ones once, and persistent buffers, by name."""
    saved = model.state_dict(keep_vars=True).keys() if not is_sharded(model) else _saved_names(model)
    yield from ((name, parameter) for name, parameter in model.named_parameters() if name in saved)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def is_sharded(model: nn.Module) -> bool:
    """True if some parameters are DTensors, as under FSDP2."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def source_of(model: nn.Module) -> WeightSource:
    """The weights of a model, sharded by FSDP2 or whole."""
    return ShardedModel(model) if is_sharded(model) else WholeModel(model)


def _saved_names(model: nn.Module) -> set[str]:
    """Names of parameters and persistent buffers, without a state dict of gathered tensors."""
    names = {name for name, _ in model.named_parameters()}
    for prefix, module in model.named_modules():
        left_out = module._non_persistent_buffers_set
        front = f"{prefix}." if prefix else ""
        names |= {front + name for name, _ in module.named_buffers(recurse=False) if name not in left_out}
    return names


@dataclass(frozen=True)
class WholeModel:
    """A model whose tensors are whole in this process."""

    model: nn.Module

    group = ONE_PROCESS

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The logical shape of each weight by name."""
        return {name: tuple(tensor.shape) for name, tensor in tensors_of(self.model)}

    @property
    def formats(self) -> Mapping[str, FormatSpec]:
        """The format of each quantized weight by name."""
        return {name: tensor.format for name, tensor in tensors_of(self.model) if isinstance(tensor, QuantizedWeight)}

    @property
    def nominal(self) -> torch.dtype | None:
        """The nominal dtype of the quantized weights, if there is one."""
        return _only({tensor.dtype for _, tensor in tensors_of(self.model) if isinstance(tensor, QuantizedWeight)})

    def batches(self) -> Iterator[Batch]:
        """The tensors, one at a time."""
        yield from ([item] for item in tensors_of(self.model))


class ShardedModel:
    """A model under FSDP2, prepared by zerocast or not: groups gather one after another."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._owners = owners_of(model)[0]
        self.group = Group.of(dist.group.WORLD)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The logical shape of each weight by name."""
        return {name: tuple(tensor.shape) for name, tensor in tensors_of(self._model)}

    @property
    def formats(self) -> Mapping[str, FormatSpec]:
        """The format of each quantized weight by name."""
        prepared = {name: _prepared(tensor) for name, tensor in tensors_of(self._model)}
        return {
            name: weight.format for name, weight in prepared.items() if weight is not None and weight.format.element
        }

    @property
    def nominal(self) -> torch.dtype | None:
        """The nominal dtype of the prepared weights, if there is one."""
        prepared = [_prepared(tensor) for _, tensor in tensors_of(self._model)]
        return _only({weight.nominal for weight in prepared if weight is not None})

    def batches(self) -> Iterator[Batch]:
        """What each group gathers, then plain tensors one by one."""
        seen: set[str] = set()
        for owner in self._owners:
            for views in owner.master_views():
                for view in views.masters:
                    if view.slices is not None:
                        raise ValueError(
                            f"{view.name} is sliced by tensor parallelism: export a checkpoint of this run, whose masters "
                            "are whole"
                        )
                batch = [(str(view.name), view.weight) for view in views.masters]
                seen |= {name for name, _ in batch}
                yield batch
        for name, tensor in tensors_of(self._model):
            if name not in seen:
                yield [(name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)]


def _only(dtypes: set[torch.dtype]) -> torch.dtype | None:
    return next(iter(dtypes)) if len(dtypes) == 1 else None


def _prepared(tensor: Tensor) -> Any:
    """What a prepared parameter is a shard of, which knows its format; None for any other."""
    return getattr(getattr(tensor, "_local_tensor", None), "weight", None)


@dataclass(frozen=True)
class LazyTensors:
    """Tensors that are made one by one when they are asked for, such as those of a checkpoint."""

    shapes: Mapping[str, tuple[int, ...]]
    formats: Mapping[str, FormatSpec]
    make: Callable[[str], Tensor]
    nominal: torch.dtype | None = None

    group = ONE_PROCESS

    def batches(self) -> Iterator[Batch]:
        """The tensors, one at a time."""
        yield from ([(name, self.make(name))] for name in self.shapes)
