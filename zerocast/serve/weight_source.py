"""WeightSource: yields the tensors of a model that is exported or served, in batches.

A model of whole weights, in one process or under ZeroAdamW, yields one tensor at a time. Under
FSDP2 a batch has the weights that one group gathers: all ranks iterate together, and a batch is
valid until the next one is asked for. An error of one rank between collectives of a batch is raised
on all; in a collective of torch's own, such as a gather of FSDP2, the others wait until it times
out. Shared tensors come once. Formats, shapes and dtypes are known before any tensor is read.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerocast.distributed.group import ONE_PROCESS, Group, GroupLike
from zerocast.formats import FormatSpec
from zerocast.formats.shared_amax import SharedAmax
from zerocast.fsdp2 import torch_fsdp
from zerocast.serve.slices import joined
from zerocast.verification.master_views import OwnsMasters, owners_of
from zerocast.weight import QuantizedWeight
from zerocast.weight.validity import Use

Batch = Sequence[tuple[str, Tensor]]
Casts = tuple[tuple[int, ...], ...]


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, shared ones once, and persistent buffers, by name. No state dict is made, which
    would hold gathered tensors.
    """
    yield from model.named_parameters()
    not_saved = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name not in not_saved)


def is_sharded(model: nn.Module) -> bool:
    """Return True if FSDP2 shards parameters of the model, gathered or not, or if some are
    DTensors.
    """
    return any(True for _ in torch_fsdp.groups(model)) or any(isinstance(p, DTensor) for p in model.parameters())


class WholeWeights(ABC):
    """Tensors that are whole in this process."""

    group: Group = ONE_PROCESS
    is_transient = False

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors by name, in their current storage."""

    @abstractmethod
    def owners(self) -> Sequence[OwnsMasters]:
        """Return the owners of their masters."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The logical shape of each weight by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors()}

    @property
    def formats(self) -> Mapping[str, FormatSpec]:
        """The format of each quantized weight by name."""
        return {name: weight.format for name, weight in self._quantized() if weight.format.element}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype of each tensor by name."""
        return {name: tensor.dtype for name, tensor in self.tensors()}

    @property
    def shared_amaxes(self) -> Mapping[str, SharedAmax | None]:
        """The weights that each quantized weight shares its tensor amax with."""
        return {name: weight.state.shared_amax for name, weight in self._quantized()}

    @property
    def nominal(self) -> torch.dtype | None:
        """The nominal dtype of the quantized weights, if there is one."""
        return _only({weight.dtype for _, weight in self._quantized()})

    def dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype that a plain tensor computes in: its own."""
        return tensor.dtype

    @property
    def masters_group(self) -> Group:
        """The ranks that share the masters."""
        groups = [views.group for owner in self.owners() for views in owner.master_views()]
        ranks = {None if g.handle is None else tuple(dist.get_process_group_ranks(g.handle)) for g in groups}
        if len(ranks) > 1:
            raise ValueError(
                "the masters of these weights are sharded over several groups of ranks: say with group= which ranks share the work"
            )
        return groups[0] if groups else ONE_PROCESS

    def batches(self) -> Iterator[Batch]:
        """Yield the tensors, one at a time.

        Bytes that a host would gather in its next forward pass are gathered first.
        """
        # Iterating over the views of the masters starts and finishes these gathers.
        for owner in self.owners():
            for views in owner.master_views():
                views.check()
        yield from ([item] for item in self.tensors())

    def watch(self) -> Callable[[], Casts]:
        """Return a look at the counters of the casts and changes of all weights."""
        states = [weight.state for _, weight in self._quantized()]

        def look() -> Casts:
            # A weight that joined another plan has another validity.
            validities = {id(state.validity): state.validity for state in states}
            return tuple((key, validity.casts, validity.version) for key, validity in validities.items())

        return look

    def _quantized(self) -> Iterator[tuple[str, QuantizedWeight]]:
        yield from ((name, tensor) for name, tensor in self.tensors() if isinstance(tensor, QuantizedWeight))


class WholeModel(WholeWeights):
    """A model of whole weights, the same on all ranks of `group`."""

    def __init__(self, model: nn.Module, group: Group = ONE_PROCESS) -> None:
        self.model = model
        self.group = group

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, shared ones once, and persistent buffers."""
        yield from tensors_of(self.model)

    def owners(self) -> Sequence[OwnsMasters]:
        """Return the owners of the masters that the weights refer to."""
        return owners_of(self.model)[0]


class OwnedWeights(WholeWeights):
    """The weights that a ZeroAdamW, a CastPlan or an attachment to a host has masters of."""

    def __init__(self, owner: OwnsMasters) -> None:
        self._owner = owner
        unnamed = sum(view.name is None for views in owner.master_views() for view in views.masters)
        if unnamed:
            raise ValueError(
                f"{unnamed} weights of this {type(owner).__name__} have no names: build it with names, or pass the model"
            )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, a plain parameter as a tensor."""
        for views in self._owner.master_views():
            for name, weight in ((str(view.name), view.weight) for view in views.masters):
                yield name, weight if weight.format.element else weight.rowwise_data.view(weight.shape)

    def owners(self) -> Sequence[OwnsMasters]:
        """Return the only owner of the masters."""
        return [self._owner]


class ShardedModel:
    """A model under FSDP2, prepared by zerocast or not.

    Its groups are gathered one at a time, so that memory has one unsharded group.
    """

    is_transient = True

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model = model
        self.group = group
        sharded = list(torch_fsdp.sharded_parameters(model))
        self._parameters = {name: parameter for name, parameter, _ in sharded}
        self._dtypes = {name: dtype for name, _, dtype in sharded}
        self._buffers = {name: t for name, t in tensors_of(model) if name not in self._parameters}
        owners = [getattr(_local(parameter), "master_owner", None) for parameter in self._parameters.values()]
        self._owners = list({id(owner): owner for owner in owners if owner is not None}.values())
        # Before the first forward pass weights do not know yet how FSDP2 shards them.
        for owner in self._owners:
            owner.plan.check_sharded()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The logical shape of each weight by name, in the order of the batches."""
        tensors = {**self._parameters, **self._buffers}
        groups = [group for owner in self._owners for group in owner.plan.param_groups.prepared]
        # Those that tensor parallelism slices come after the others of their group.
        gathered = [
            weight.name for group in groups for weight in sorted(group.weights, key=lambda weight: weight.sliced)
        ]
        return {name: tuple(tensors[name].shape) for name in dict.fromkeys([*gathered, *tensors])}

    @property
    def formats(self) -> Mapping[str, FormatSpec]:
        """The format of each quantized weight by name."""
        return {name: weight.format for name, weight in self._prepared() if weight.format.element}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype of each tensor once it is gathered, by name."""
        own = {name: tensor.dtype for name, tensor in {**self._parameters, **self._buffers}.items()}
        return own | {name: weight.nominal for name, weight in self._prepared()}

    @property
    def shared_amaxes(self) -> Mapping[str, SharedAmax | None]:
        """The weights that each quantized weight shares its tensor amax with."""
        return {name: weight.shared_amax for name, weight in self._prepared()}

    @property
    def nominal(self) -> torch.dtype | None:
        """The nominal dtype of the prepared weights, if there is one."""
        return _only({weight.nominal for _, weight in self._prepared()})

    def dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype that a plain tensor computes in: that of the mixed precision policy."""
        return self._dtypes.get(name, tensor.dtype)

    @property
    def masters_group(self) -> Group:
        """The ranks that gather together."""
        return self.group

    def batches(self) -> Iterator[Batch]:
        """Yield the weights of each group after its gather, those of tensor-parallel slices one at
        a time, then plain tensors one at a time.
        """
        seen: set[str] = set()
        prepared = dict(self._prepared())
        for owner in self._owners:
            for views in owner.master_views():
                seen |= {str(view.name) for view in views.masters}
                # The gather raises on all ranks for problems such as masters that are NaN.
                owner.check(Use.SEND)
                yield [(str(view.name), view.weight) for view in views.masters if view.slices is None]
                for view in views.masters:
                    if view.slices is not None:
                        name = str(view.name)
                        yield [(name, joined(view.weight, prepared[name].sliced_parameter, self.group))]
        for name, tensor in {**self._parameters, **self._buffers}.items():
            if name not in seen:
                yield [(name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)]

    def watch(self) -> Callable[[], Casts]:
        """Return a look at the counters of the casts of all prepared models. The first gather may
        add a cast.
        """
        return lambda: tuple((id(owner), *owner.casts) for owner in self._owners)

    def _prepared(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, FSDPWeight) of the prepared parameters."""
        for name, tensor in self._parameters.items():
            weight = getattr(_local(tensor), "weight", None)
            if weight is not None:
                yield name, weight


def _local(tensor: Tensor) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def _only(dtypes: set[torch.dtype]) -> torch.dtype | None:
    return next(iter(dtypes)) if len(dtypes) == 1 else None


@dataclass(frozen=True)
class LazyTensors:
    """Tensors of one nominal dtype that are made when they are asked for, such as those of a
    checkpoint.
    """

    shapes: Mapping[str, tuple[int, ...]]
    formats: Mapping[str, FormatSpec]
    make: Callable[[str], Tensor]
    nominal: torch.dtype

    group = ONE_PROCESS

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype of each tensor by name: nominal."""
        return dict.fromkeys(self.shapes, self.nominal)

    def batches(self) -> Iterator[Batch]:
        """Yield the tensors, one at a time."""
        yield from ([(name, self.make(name))] for name in self.shapes)


# The weights of a run that continues training; and everything that an export can read.
LiveSource = WholeWeights | ShardedModel
WeightSource = LiveSource | LazyTensors


def source_of(model: nn.Module, group: GroupLike = None) -> LiveSource:
    """Return the weights of a model, sharded by FSDP2 or unsharded.

    `group` are the ranks that read it together, by default all ranks for a model that is sharded,
    and this process only for one that is unsharded.
    """
    if is_sharded(model):
        return ShardedModel(model, Group.of(group))
    return WholeModel(model, ONE_PROCESS if group is None else Group.of(group))


def live_source_of(what: Any) -> LiveSource:
    """Return the weights of a model or of an owner of masters. Raises TypeError for anything
    else.
    """
    if isinstance(what, nn.Module):
        return source_of(what)
    if hasattr(what, "master_views"):
        return OwnedWeights(what)
    raise TypeError(
        f"live weights are those of a model, a ZeroAdamW, a CastPlan or an attachment to a host, got {type(what).__name__}; "
        "under FSDP2 pass the model"
    )
