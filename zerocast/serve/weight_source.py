"""WeightSource: yields the tensors of a model that is exported or served, in batches.

A model of whole weights, in one process or under ZeroAdamW, yields one tensor at a time. Under
FSDP2 a batch has the weights that one group gathers: all ranks iterate together, and a batch is
valid until the next one is asked for. An error of one rank between collectives of a batch is raised
on all; in a collective of torch's own, such as a gather of FSDP2, the others wait until it times
out. Shared tensors come once. Formats, shapes and dtypes are known before any tensor is read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerocast.checkpoint.untrained import persistent_buffers
from zerocast.distributed.agreement import together
from zerocast.distributed.group import ONE_PROCESS, Group, GroupLike
from zerocast.formats import FormatSpec
from zerocast.formats.shared_amax import SharedAmax
from zerocast.fsdp2 import torch_fsdp
from zerocast.serve.namings import unpadded
from zerocast.verification.master_views import OwnsMasters, owners_of
from zerocast.weight import QuantizedWeight
from zerocast.weight.validity import Use

Batch = Sequence[tuple[str, Tensor]]


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, shared ones once, and persistent buffers, by name. No state dict is made, which
    would hold gathered tensors.
    """
    yield from model.named_parameters()
    yield from persistent_buffers(model).items()


@dataclass(frozen=True)
class WholeWeights:
    """Tensors that are whole in this process.

    Attributes:
        tensors: yields the tensors with their names, in their current storage.
        owners: returns the owners of their masters.
        group: the ranks that have the same tensors and read them together.
    """

    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    owners: Callable[[], Sequence[OwnsMasters]]
    group: Group = ONE_PROCESS

    is_transient = False

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
        # All at once: tensors that replace others meanwhile are of a later time.
        yield from ([item] for item in list(self.tensors()))

    def watch(self) -> Callable[[], None]:
        """Return a check that raises RuntimeError once a weight has changed since this call."""
        tensors = [tensor for _, tensor in self.tensors()]
        states = [tensor.state for tensor in tensors if isinstance(tensor, QuantizedWeight)]

        def look() -> object:
            # A weight that joined another plan has another validity.
            validities = {id(state.validity): state.validity for state in states}
            return [(key, validity.casts, validity.version) for key, validity in validities.items()], _versions(tensors)

        return _check_of(look)

    def _quantized(self) -> Iterator[tuple[str, QuantizedWeight]]:
        yield from ((name, tensor) for name, tensor in self.tensors() if isinstance(tensor, QuantizedWeight))


def _owned_tensors(owner: OwnsMasters) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that an owner has masters of, a plain parameter as a tensor."""
    for views in owner.master_views():
        for view in views.masters:
            weight = view.weight
            yield str(view.name), weight if weight.format.element else weight.rowwise_data.view(weight.shape)


class ShardedModel:
    """A model under FSDP2, prepared by zerocast or not.

    Its groups are gathered one at a time, so that memory has one unsharded group.
    """

    is_transient = True

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model = model
        self.group = group
        self._dtypes = {name: dtype for name, _, dtype in torch_fsdp.sharded_parameters(model)}
        owners = [getattr(_local(parameter), "master_owner", None) for parameter in self._parameters.values()]
        self._owners = list({id(owner): owner for owner in owners if owner is not None}.values())
        # Before the first forward pass weights do not know yet how FSDP2 shards them.
        for owner in self._owners:
            owner.plan.check_sharded()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The logical shape of each weight by name, in the order of the batches."""
        tensors = self._tensors
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
        own = {name: tensor.dtype for name, tensor in self._tensors.items()}
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
                        yield [(name, _joined(view.weight, prepared[name].sliced_parameter, self.group))]
        for name, tensor in self._tensors.items():
            if name not in seen:
                yield [(name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)]

    def watch(self) -> Callable[[], None]:
        """Return a check that raises RuntimeError once a weight has changed since this call. The
        first gather may add a cast, and comes before it.
        """
        tensors = list(self._tensors.values())
        return _check_of(lambda: ([owner.casts for owner in self._owners], _versions(tensors)))

    @property
    def _parameters(self) -> dict[str, Tensor]:
        """The parameters that FSDP2 shards, by name. A load may have replaced them."""
        return {name: parameter for name, parameter, _ in torch_fsdp.sharded_parameters(self._model)}

    @property
    def _tensors(self) -> dict[str, Tensor]:
        """The tensors by name, those that FSDP2 shards first. The model may get other ones."""
        parameters = self._parameters
        return {**parameters, **{name: t for name, t in tensors_of(self._model) if name not in parameters}}

    def _prepared(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, FSDPWeight) of the prepared parameters."""
        for name, tensor in self._parameters.items():
            weight = getattr(_local(tensor), "weight", None)
            if weight is not None:
                yield name, weight


def _joined(weight: QuantizedWeight, sliced: DTensor, group: Group) -> QuantizedWeight:
    """Return the unsharded weight, in separate memory, from the slices of all ranks. Collective.

    `sliced` has the shape of the whole and says how it is sliced; `weight` is this rank's slice.
    Raises RuntimeError, on all ranks of `group`, for a slice that was never cast, is partial, or
    older than its masters.
    """

    def allocated() -> tuple[QuantizedWeight, list[tuple[Tensor, Tensor]]]:
        """Allocate the unsharded weight. Return it with pairs (own slice, unsharded entries) of its
        buffers.
        """
        weight.check(Use.SEND)
        whole = QuantizedWeight.empty(sliced.shape, weight.format, weight.dtype, weight.device)
        pairs = []
        for name in ("rowwise_data", "rowwise_scale_inv", "amax"):
            own, target = weight.state.buffers[name], whole.state.buffers[name]
            if own is None or target is None:
                continue
            if target.dim() == 1:
                # Slices share the amax and the scale of a tensor.
                target.copy_(own)
            else:
                pairs.append((unpadded(weight, name, own).contiguous(), unpadded(whole, name, target)))
        return whole, pairs

    whole, pairs = together(group, allocated, "joins slices of a weight")
    for own, entries in pairs:
        slices = DTensor.from_local(
            own,
            sliced.device_mesh,
            sliced.placements,
            run_check=False,
            shape=entries.shape,
            stride=torch.empty(entries.shape, device="meta").stride(),
        )
        entries.copy_(slices.full_tensor())
    whole.state.was_cast = True
    return whole


def _local(tensor: Tensor) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def _versions(tensors: Iterable[Tensor]) -> list[tuple[int, int, int]]:
    """Return the version counters of parameters, those of their local tensors, and addresses, for
    the changes that no cast counts: writes to plain ones, and other values by `copy_` or `.data =`.
    """
    parameters = [t for t in tensors if isinstance(t, nn.Parameter | QuantizedWeight)]
    return [(t._version, _local(t)._version, _address(t)) for t in parameters if not t.is_inference()]


def _address(tensor: Tensor) -> int:
    stored = tensor.state.rowwise_data if isinstance(tensor, QuantizedWeight) else _local(tensor)
    return int(stored.data_ptr())


def _check_of(look: Callable[[], object]) -> Callable[[], None]:
    before = look()

    def check() -> None:
        if look() != before:
            raise RuntimeError(
                "weights were cast or changed while they were read, so those that were read are of two steps: read all of them "
                "between two steps, and begin again"
            )

    return check


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

    def watch(self) -> Callable[[], None]:
        """Return a check that never raises, since nothing changes these tensors."""
        return lambda: None


# The weights of a run that continues training; and everything that an export can read.
LiveSource = WholeWeights | ShardedModel
WeightSource = LiveSource | LazyTensors


def source_of(model: nn.Module, group: GroupLike = None) -> LiveSource:
    """Return the weights of a model, sharded by FSDP2 or unsharded.

    `group` are the ranks that read it together, by default all ranks for a model that is sharded,
    and this process only for one that is unsharded.
    """
    has_groups = any(True for _ in torch_fsdp.groups(model))
    if has_groups or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return ShardedModel(model, Group.of(group))
    whole_group = ONE_PROCESS if group is None else Group.of(group)
    return WholeWeights(partial(tensors_of, model), lambda: owners_of(model)[0], whole_group)


def live_source_of(what: Any) -> LiveSource:
    """Return the weights of a model or of an owner of masters. Raises TypeError for anything
    else.
    """
    if isinstance(what, nn.Module):
        return source_of(what)
    if hasattr(what, "master_views"):
        unnamed = sum(view.name is None for views in what.master_views() for view in views.masters)
        if unnamed:
            raise ValueError(
                f"{unnamed} weights of this {type(what).__name__} have no names: build it with names, or pass the model"
            )
        return WholeWeights(partial(_owned_tensors, what), lambda: [what])
    raise TypeError(
        f"live weights are those of a model, a ZeroAdamW, a CastPlan or an attachment to a host, got {type(what).__name__}; "
        "under FSDP2 pass the model"
    )
