"""Checkpoints of an FSDP2 model under the keys of `zerocast.optim.state`.

    model.<name>                              f32 master, logical shape
    optim.state.<name>.{exp_avg,...,step}     whatever the optimizers keep
    optim.param_groups.<name>.{lr,...}        f64[]
    zerocast.<name>.{scale,amax_history,cast_scale}

`TrainingState` has what `zerocast.optim.Checkpoints` asks of an optimizer. So FSDP2 gets its
atomic, hashed checkpoints, and a ZeroAdamW loads what FSDP2 saved, and the other way about.
`load_masters` begins a model from somebody's high-precision weights.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from zerocast.checkpoint.sources import AnySource
from zerocast.checkpoint.sources.master_reader import read_masters
from zerocast.distributed.group import Group
from zerocast.formats import FormatSpec
from zerocast.formats.shared_amax import SharedAmax
from zerocast.fsdp2.manager import CastManager, guard_of
from zerocast.fsdp2.prepare import formats, is_prepared, load_state_dict, managers_of, state_dict
from zerocast.weight.write_guard import WriteGuard, transaction

HYPERPARAMETERS = ("lr", "eps", "weight_decay", "momentum")
BETAS = ("beta1", "beta2")


class TrainingState:
    """The state of a `model`, prepared or not, and its `optimizers`, as a checkpoint holds it.

    All ranks of `process_group`, the default group, save and load.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizer | Iterable[Optimizer]) -> None:
        self._model = model
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that save and load together."""
        return dist.group.WORLD if dist.is_initialized() else None

    @property
    def model(self) -> nn.Module:
        """The model, whose frozen parameters are saved with the others, and its buffers too."""
        return self._model

    @property
    def frozen(self) -> dict[str, Tensor]:
        """None beside those of the model."""
        return {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def formats(self) -> dict[str, tuple[FormatSpec, torch.dtype]]:
        """Format and nominal dtype of each quantized weight by name, once the model has
        gathered.
        """
        return formats(self._model) if is_prepared(self._model) else {}

    @property
    def shared_amaxes(self) -> dict[str, SharedAmax]:
        """The weights that share a tensor amax, by the name of each."""
        weights = [weight for manager in self._managers() for weight in manager.weights]
        return {weight.name: weight.shared_amax for weight in weights if weight.shared_amax is not None}

    def state_dict(self) -> dict[str, Any]:
        """The state as it is now. Masters and moments are those in use, step counts copies; a
        shared weight has its first name.

        RuntimeError after a step or a load that raised half-way, since that would save masters and
        moments of different steps.
        """
        for guard in self._guards():
            guard.check_complete()
        optim: Any
        model, optim = get_state_dict(self._model, self._optimizers)
        names = [name for name, _ in self._model.named_parameters()]
        state = {name: {key: _apart(value) for key, value in optim["state"][name].items()} for name in optim["state"]}
        groups = {name: _hyperparameters(group) for group in optim["param_groups"] for name in group["params"]}
        return {
            "model": {name: model[name] for name in names},
            "optim": {"state": state, "param_groups": groups},
            "zerocast": state_dict(self._model) if is_prepared(self._model) else {},
        }

    def state_to_overwrite(self) -> dict[str, Any]:
        """The tensors of `state_dict` for a reader that fills them, also after a write that
        raised half-way.
        """
        with _overlooked(self._guards(), self._managers()):
            return self.state_dict()

    @contextlib.contextmanager
    def overwriting(self) -> Iterator[None]:
        """Overwrite the state in here; what raises leaves it partial until it is loaded again."""
        guards = self._guards()
        if any(guard.is_partial for guard in guards):
            for optimizer in self._optimizers:
                optimizer.zero_grad()
        with _overwriting(self._managers(), guards, "loading a checkpoint"):
            yield

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of the same parameters; the next gather casts its masters.

        ValueError, with nothing changed, for missing names and other shapes. After a step or a load
        that raised half-way this makes model and optimizers whole again, and forgets the gradients
        of that step.
        """
        self._check(state)
        with self.overwriting():
            self._load(state)

    def _guards(self) -> list[WriteGuard]:
        """The guards of all that is written together."""
        managers = [manager.guard for manager in self._managers()]
        return [guard_of(self._model), *map(guard_of, self._optimizers), *managers]

    def _managers(self) -> list[CastManager]:
        return managers_of(self._model) if is_prepared(self._model) else []

    def _check(self, state: Mapping[str, Any]) -> None:
        """On this rank; ranks differ in nothing that is looked at."""
        saved = state["model"]
        shapes: dict[str, Any] = {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}
        missing = [name for name in shapes if name not in saved]
        if missing:
            raise ValueError(f"the state does not fit this model: it lacks {missing[:4]}")
        for name, shape in shapes.items():
            if tuple(saved[name].shape) != shape:
                raise ValueError(f"{name} has shape {tuple(saved[name].shape)} in the state and {shape} here")

    def _load(self, state: Mapping[str, Any]) -> None:
        optim: Any
        _, optim = get_state_dict(self._model, self._optimizers)
        for group in optim["param_groups"]:
            saved = state["optim"].get("param_groups", {})
            for name in [name for name in group["params"] if name in saved][:1]:
                _take_hyperparameters(group, saved[name])
        loaded = {"state": state["optim"]["state"], "param_groups": optim["param_groups"]}
        options = StateDictOptions(strict=False)  # a shared weight is there once
        set_state_dict(
            self._model,
            self._optimizers,
            model_state_dict=dict(state["model"]),
            optim_state_dict=loaded,
            options=options,
        )
        if is_prepared(self._model):
            load_state_dict(self._model, state.get("zerocast", {}))


@torch.no_grad()
def load_masters(model: nn.Module, source: AnySource, ignore: Sequence[str] = ()) -> None:
    """Take parameters and persistent buffers of a prepared model, which `fully_shard` has sharded,
    from high-precision weights.

    `source`, `ignore` and errors are those of `zerocast.optim.load_masters`. Second names of shared
    parameters need not be there. All ranks call it, before the first forward pass or between steps;
    each reads its shards. Delayed scaling is seeded anew, with a warning; moments belong to the
    optimizer, which is better built afterwards. ValueError for a model that was not prepared. After
    a file that breaks off on the way the model says so at every gather, until masters or a state
    are loaded.
    """
    managers = managers_of(model)
    guards = [guard_of(model), *(manager.guard for manager in managers)]
    with _overlooked(guards, managers):
        state_dict(model)  # casts what is due, and finds the shards
        state = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    held = {name: tensor.detach() for name, tensor in state.items() if first[id(tensor)] == name}
    again = [name for name in state if name not in held]
    with contextlib.ExitStack() as stack:
        begin = partial(stack.enter_context, _overwriting(managers, guards, "loading masters"))
        read_masters(held, source, [*ignore, *again, *(f"model.{name}" for name in again)], Group.of(None), begin)
        load_state_dict(model, {})


@contextlib.contextmanager
def _overwriting(managers: Sequence[CastManager], guards: Sequence[WriteGuard], what: str) -> Iterator[None]:
    for manager in managers:
        manager.make_due()  # on all ranks, whatever each of them was in the middle of
        manager.record.status.forget()
    with transaction(guards, what):
        yield


def _overlooked(guards: Iterable[WriteGuard], managers: Iterable[CastManager]) -> contextlib.ExitStack:
    """Let a reader that is going to overwrite everything on all ranks, unless it is refused, read
    what is partial, or what ranks disagreed about.
    """
    stack = contextlib.ExitStack()
    for manager in managers:
        stack.enter_context(manager.record.status.overlooked())
    for guard in guards:
        stack.enter_context(guard.overlooked())
    return stack


def _apart(value: Any) -> Any:
    """A step count of its own: an optimizer may keep one for many parameters."""
    return value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Tensor]:
    values = {name: float(group[name]) for name in HYPERPARAMETERS if name in group}
    values |= dict(zip(BETAS, map(float, group.get("betas", ())), strict=False))
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def _take_hyperparameters(group: dict[str, Any], saved: Mapping[str, Tensor]) -> None:
    for name in HYPERPARAMETERS:
        if name in saved and name in group:
            value = float(saved[name])
            group[name] = torch.full_like(group[name], value) if isinstance(group[name], Tensor) else value
    if "betas" in group and all(name in saved for name in BETAS):
        group["betas"] = tuple(float(saved[name]) for name in BETAS)
