"""TrainingState: checkpoints of an FSDP2 model under the keys of `zerocast.optim.state`.

    model.<name>                              f32 master, logical shape
    optim.state.<name>.{exp_avg,...,step}     states of the optimizers
    optim.state.<name>.never_stepped          bool[], in place of moments that no step has made
    optim.param_groups.<name>.{lr,...}        f64[]
    zerocast.<name>.{scale,amax_history,cast_scale}

`TrainingState` has the methods that `zerocast.optim.Checkpoints` calls on an optimizer. So FSDP2
gets its atomic, hashed checkpoints, and a ZeroAdamW loads the checkpoints of FSDP2, and vice versa.
`load_masters` begins a model from existing high-precision weights.
"""

import contextlib
import copy
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from zerocast.checkpoint.checkpointed import SavedMoments
from zerocast.checkpoint.moments import MOMENTS
from zerocast.checkpoint.sources import AnySource, read_masters
from zerocast.checkpoint.torch_checkpoint import TensorShard
from zerocast.distributed.agreement import together, validate_across_ranks
from zerocast.distributed.group import ONE_PROCESS, Group
from zerocast.formats import FormatSpec
from zerocast.formats.shared_amax import SharedAmax
from zerocast.fsdp2.fused_adamw import FusedAdamW
from zerocast.fsdp2.manager import CastManager, validity_of
from zerocast.fsdp2.prepare import formats, is_prepared, load_state_dict, managers_of, state_dict, watch_optimizers
from zerocast.optim.saved_state import (
    ADAM_STATE,
    NEVER_STEPPED,
    STEP,
    check_moments,
    check_names,
    check_not_kept,
    check_step,
    hyperparameters,
    loaded_hyperparameters,
    never_stepped,
    problem_of,
)
from zerocast.optim.update_rule import rule_of_torch
from zerocast.weight.validity import Use, Validity, transaction_together


@dataclass(frozen=True)
class Stepped:
    """A parameter that an optimizer updates, with its name in the model."""

    name: str
    parameter: Tensor
    group: dict[str, Any]
    optimizer: Optimizer

    @property
    def moments(self) -> Mapping[str, Any]:
        """The state of the parameter in its optimizer. Empty before its first step."""
        if isinstance(self.optimizer, FusedAdamW):
            return self.optimizer.moments(self.parameter)
        moments: Mapping[str, Any] = self.optimizer.state.get(self.parameter, {})
        return moments


class TrainingState:
    """The state of a `model`, prepared or not, and its `optimizers`, as a checkpoint holds it.

    All ranks of `process_group`, the default group, save and load.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizer | Iterable[Optimizer]) -> None:
        # Without a prepared model too: no optimizer may step parameters that a load left partly
        # written.
        watch_optimizers()
        self._model = model
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        # The moments that were made for a reader, which a load takes over without a copy.
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that save and load together."""
        return dist.group.WORLD if dist.is_initialized() else None

    @property
    def model(self) -> nn.Module:
        """The model. A checkpoint has its frozen parameters and its buffers too."""
        return self._model

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Always empty: frozen parameters are saved with the others of the model."""
        return {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def formats(self) -> dict[str, tuple[FormatSpec, torch.dtype]]:
        """Format and nominal dtype of each quantized weight, keyed by name, once the model has
        gathered.
        """
        return formats(self._model) if is_prepared(self._model) else {}

    @property
    def shared_amaxes(self) -> dict[str, SharedAmax]:
        """The groups of weights that share a tensor amax, keyed by the name of each weight."""
        weights = [weight for manager in self._managers() for weight in manager.weights]
        return {weight.name: weight.shared_amax for weight in weights if weight.shared_amax is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as it is now. Masters and moments are those in use, step counts copies;
        a shared weight has its first name. All ranks call it.

        Raises RuntimeError, on every rank, after a step or a load that failed partway on any, since
        that would save masters and moments of different steps.
        """
        together(self._group, self._check_save, "saves a state")
        return self._as_dict(None)

    def _check_save(self) -> None:
        for validity in self._validities():
            validity.check(Use.SAVE)

    def state_to_overwrite(self, kept: SavedMoments | None = None) -> dict[str, Any]:
        """Return the tensors of `state_dict` for a reader that fills them, also after a write that
        failed partway. Moments that no step has made yet are made as those that are `kept`.
        """
        with _ignoring_errors(self._validities(), self._managers()):
            return self._as_dict(kept)

    def _as_dict(self, kept: SavedMoments | None) -> dict[str, Any]:
        # Shards parameters that are gathered.
        model: dict[str, Any] = get_model_state_dict(self._model)
        names = [name for name, _ in self._model.named_parameters()]
        state, groups = {}, {}
        for stepped in self._stepped():
            state[stepped.name] = self._moments(stepped, (kept or {}).get(stepped.name, {}))
            groups[stepped.name] = hyperparameters(stepped.group, rule_of_torch(stepped.group))
        return {
            "model": {name: model[name] for name in names},
            "optim": {"state": state, "param_groups": groups},
            "zerocast": state_dict(self._model) if is_prepared(self._model) else {},
        }

    def _stepped(self) -> list[Stepped]:
        """Return the parameters of all optimizers. Called while the model is sharded."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        stepped = [
            Stepped(names.get(id(parameter), ""), parameter, group, optimizer)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        if unknown := [tuple(of_other.parameter.shape) for of_other in stepped if not of_other.name]:
            raise ValueError(f"an optimizer steps parameters that the model does not have, of shapes {unknown[:4]}")
        return stepped

    def _moments(self, stepped: Stepped, kept: Mapping[str, TensorStorageMetadata]) -> dict[str, Any]:
        """Return the moments of a parameter. If it has none yet, make those that a checkpoint has
        `kept`, for a reader to fill.
        """
        # Step counts are copies. All other tensors are the ones in use.
        moments = {
            key: value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value
            for key, value in stepped.moments.items()
        }
        if NEVER_STEPPED in kept or not (moments or kept):
            return never_stepped()
        if not moments:
            moments = {key: _zeros(stepped.parameter, entry) for key, entry in kept.items()}
            for tensor in moments.values():
                self._made[tensor] = None
        return moments

    @contextlib.contextmanager
    def overwriting(self) -> Iterator[None]:
        """Overwrite the state while the context is open. If that raises, the state is partial until
        it is loaded again.
        """
        validities = self._validities()
        if any(validity.partial for validity in validities):
            for optimizer in self._optimizers:
                optimizer.zero_grad()
        with _overwriting(self._managers(), validities, "loading a checkpoint"):
            yield

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of the same parameters; the next gather casts its masters.

        Raises ValueError on every rank, with nothing changed, for names, shapes, dtypes and values
        that do not fit. After a step or a load that failed partway this makes model and optimizers
        consistent again, and drops the gradients of that step.
        """
        problem = problem_of(lambda: self._check(state), "model")
        validate_across_ranks(self._group, [], problem, what="loads a state")
        with self.overwriting():
            self._load(state)

    def check_numbers(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError, on this rank only, for step counts and hyperparameters that are out of
        range.
        """
        for name, moments in state["optim"]["state"].items():
            if STEP in moments:
                check_step(name, moments[STEP])
        self._loaded_groups(state)

    @property
    def _group(self) -> Group:
        return ONE_PROCESS if self.process_group is None else Group.of(self.process_group)

    def _validities(self) -> list[Validity]:
        """Return the validities of model, optimizers and masters, which are written together."""
        of_masters = [manager.plan.validity for manager in self._managers()]
        return [validity_of(self._model), *map(validity_of, self._optimizers), *of_masters]

    def _managers(self) -> list[CastManager]:
        return managers_of(self._model) if is_prepared(self._model) else []

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError or KeyError, on this rank only, for a state that does not fit."""
        with _ignoring_errors(self._validities(), self._managers()):
            # Shards parameters that are gathered.
            self._model.state_dict()
        saved, moments = state["model"], state["optim"]["state"]
        by_name = {stepped.name: stepped for stepped in self._stepped()}
        parameters = dict(self._model.named_parameters())
        second_names = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        check_names(saved, parameters, second_names, "model")
        check_names(moments, by_name, by_name, "model")
        for name, parameter in parameters.items():
            _check_fits(name, saved[name], parameter)
        for name, stepped in by_name.items():
            check_moments(name, moments[name], self._expected(stepped, by_name, moments))
            if _share_memory(saved[name], stepped.parameter):
                check_not_kept(moments[name], float(stepped.moments.get(STEP, 0.0)))
            for key, value in moments[name].items():
                like = stepped.moments.get(key, stepped.parameter if key in MOMENTS else None)
                if isinstance(like, Tensor) and NEVER_STEPPED not in moments[name] and key != STEP:
                    _check_fits(name, value, like)
        self.check_numbers(state)

    def _expected(
        self, stepped: Stepped, by_name: Mapping[str, Stepped], saved: Mapping[str, Any]
    ) -> Collection[str] | None:
        """Return the keys of the moments that the update of a parameter keeps: those it has here,
        Adam's state, or the state of a similar parameter in its group. None if that is not known.
        """
        if stepped.moments:
            return stepped.moments.keys()
        if isinstance(stepped.optimizer, (torch.optim.Adam, FusedAdamW)):
            return ADAM_STATE | ({"max_exp_avg_sq"} if stepped.group.get("amsgrad") else set())
        dims = stepped.parameter.dim()
        of_group = [other for other in by_name.values() if other.group is stepped.group]
        similar = (saved[other.name] for other in of_group if other.parameter.dim() == dims)
        return next((moments.keys() for moments in similar if NEVER_STEPPED not in moments), None)

    def _loaded_groups(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the saved hyperparameters of each group of all optimizers. The hyperparameters of
        a group are empty if the state has none.
        """
        saved = state["optim"].get("param_groups", {})
        names: dict[int, list[str]] = {}
        for stepped in self._stepped():
            names.setdefault(id(stepped.group), []).append(stepped.name)
        if saved:
            check_names(saved, {name for of_group in names.values() for name in of_group}, saved, "model")
        return [
            loaded_hyperparameters(names.get(id(group), []), group, rule_of_torch(group), saved)
            for group in self.param_groups
        ]

    def _load(self, state: Mapping[str, Any]) -> None:
        by_id = {id(stepped.parameter): stepped for stepped in self._stepped()}
        parameters = dict(self._model.named_parameters())
        loaded_groups = iter(self._loaded_groups(state))
        for optimizer in self._optimizers:
            groups, moments, count = [], {}, itertools.count()
            for group in optimizer.param_groups:
                # Hyperparameters that are tensors stay tensors.
                loaded = {
                    name: torch.full_like(group[name], value) if isinstance(group[name], Tensor) else value
                    for name, value in next(loaded_groups).items()
                }
                numbers = {next(count): by_id[id(parameter)] for parameter in group["params"]}
                groups.append({**group, **loaded, "params": [*numbers]})
                for number, stepped in numbers.items():
                    saved = state["optim"]["state"][stepped.name]
                    if NEVER_STEPPED not in saved:
                        moments[number] = {key: self._own(stepped, key, value) for key, value in saved.items()}
            optimizer.load_state_dict({"state": moments, "param_groups": groups})
        model: dict[str, Any] = {
            name: _cut_like(state["model"][name], parameter) for name, parameter in parameters.items()
        }
        # Not strict, since a shared weight has only its first name there.
        set_model_state_dict(self._model, model, options=StateDictOptions(strict=False))
        if is_prepared(self._model):
            load_state_dict(self._model, state.get("zerocast", {}))

    def _own(self, stepped: Stepped, key: str, value: Any) -> Any:
        """Return a loaded moment as the optimizer's own: a copy, unless the optimizer has it."""
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if value is stepped.moments.get(key) or value in self._made:
            return value
        shard = _cut_like(value.detach(), stepped.parameter)
        # FusedAdamW makes the copy itself.
        return shard if isinstance(stepped.optimizer, FusedAdamW) else shard.clone()


@torch.no_grad()
def load_masters(model: nn.Module, source: AnySource, ignore: Sequence[str] = ()) -> None:
    """Load parameters and persistent buffers of a prepared model, which `fully_shard` has sharded,
    from high-precision weights.

    `source`, `ignore` and errors are as for `zerocast.optim.load_masters`. Second names of shared
    parameters need not be there. All ranks call it, before the first forward pass or between steps;
    each reads its shards. Delayed scaling is seeded again, with a warning; moments belong to the
    optimizer, which is better built afterwards. Raises ValueError for a model that was not
    prepared. If a file is truncated, every gather of the model raises until masters or a state are
    loaded.
    """
    managers = managers_of(model)
    validities = [validity_of(model), *(manager.plan.validity for manager in managers)]
    with _ignoring_errors(validities, managers):
        # Shards parameters that are gathered.
        state = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    tensors = {name: tensor.detach() for name, tensor in state.items() if first[id(tensor)] == name}
    second_names = [name for name in state if name not in tensors]
    ignored = [*ignore, *second_names, *(f"model.{name}" for name in second_names)]
    with contextlib.ExitStack() as stack:
        begin = partial(stack.enter_context, _overwriting(managers, validities, "loading masters"))
        read_masters(tensors, source, ignored, Group.of(None), begin)
        load_state_dict(model, {})


@contextlib.contextmanager
def _overwriting(managers: Sequence[CastManager], validities: Sequence[Validity], what: str) -> Iterator[None]:
    for manager in managers:
        # On all ranks, even if one is in the middle of a step.
        manager.make_due()
        manager.plan.status.forget()
    with transaction_together(validities, what):
        yield


def _ignoring_errors(validities: Iterable[Validity], managers: Iterable[CastManager]) -> contextlib.ExitStack:
    """Allow reads of masters that are partial, or that ranks disagree about. It is for a reader
    that is going to overwrite everything on all ranks, unless that raises first.
    """
    stack = contextlib.ExitStack()
    for manager in managers:
        stack.enter_context(manager.plan.status.ignoring_errors())
    for validity in validities:
        stack.enter_context(validity.reading_partial())
    return stack


def _zeros(parameter: Tensor, entry: TensorStorageMetadata) -> Tensor:
    """Return zeros, as an optimizer makes them, for a moment that a checkpoint has."""
    if not isinstance(entry, TensorStorageMetadata):
        raise ValueError("the moments of a parameter are tensors, the checkpoint holds something else")
    if not entry.size:
        return torch.zeros((), dtype=entry.properties.dtype)
    detached = parameter.detach()
    return torch.zeros_like(detached) if entry.size == parameter.shape else detached.new_zeros(entry.size)


def _check_fits(name: str, value: Any, like: Tensor) -> None:
    """Raise ValueError for a tensor that cannot replace another."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__} in the state, where a tensor belongs")
    if tuple(value.shape) != tuple(like.shape):
        raise ValueError(f"{name} has shape {tuple(value.shape)} in the state and {tuple(like.shape)} in this model")
    if value.is_floating_point() != like.is_floating_point():
        raise ValueError(f"{name} is {value.dtype} in the state and {like.dtype} in this model")
    if isinstance(value, TensorShard) or (
        isinstance(value, DTensor)
        and (
            not isinstance(like, DTensor)
            or (value.device_mesh, value.placements) != (like.device_mesh, like.placements)
        )
    ):
        raise ValueError(f"{name} is sharded differently in the state: load it with torch.distributed.checkpoint")


def _share_memory(value: Tensor, parameter: Tensor) -> bool:
    """Return True if a value of a state and a parameter have the same memory on this rank."""
    kept, own = (getattr(tensor, "_local_tensor", tensor) for tensor in (value, parameter))
    return own.numel() > 0 and kept.data_ptr() == own.data_ptr()


def _cut_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of an unsharded tensor, if the parameter is sharded."""
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)
