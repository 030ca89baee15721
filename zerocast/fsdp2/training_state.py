"""TrainingState: masters, moments and delayed scaling of an FSDP2 model under the keys of `zerocast.optim.state`.

    model.<name>                              f32 master, logical shape
    optim.state.<name>.{exp_avg,...,step}     whatever the optimizers keep
    optim.param_groups.<name>.{lr,...}        f64[]
    zerocast.<name>.{scale,amax_history,cast_scale}

It has what `zerocast.optim.Checkpoints` asks of an optimizer. So FSDP2 gets its atomic, hashed checkpoints, and a ZeroAdamW loads
what FSDP2 saved, and the other way about.
"""

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from zerocast.formats import FormatSpec
from zerocast.fsdp2.prepare import formats, is_prepared, load_state_dict, state_dict

HYPERPARAMETERS = ("lr", "eps", "weight_decay")
BETAS = ("beta1", "beta2")


class TrainingState:
    """What a checkpoint holds of `model`, prepared or not, and its `optimizers`.

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
    def formats(self) -> dict[str, tuple[FormatSpec, torch.dtype]]:
        """Format and nominal dtype of each quantized weight by name, once the model has gathered."""
        return formats(self._model) if is_prepared(self._model) else {}

    def state_dict(self) -> dict[str, Any]:
        """The state as it is now. Masters and moments are those in use, step counts copies; a shared weight has its first name."""
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
        """The state for a reader that fills it."""
        return self.state_dict()

    def overwriting(self) -> AbstractContextManager[None]:
        """Within, a reader fills masters in place; FSDP2 casts what it finds in them, so what breaks off must be loaded again."""
        return contextlib.nullcontext()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of the same parameters; the next gather casts its masters."""
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
