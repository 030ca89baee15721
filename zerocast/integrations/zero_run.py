"""What ZeroAdamW needs of trainers that know whole tensors and DistributedDataParallel: its own
files in their checkpoints, and gradients that stay on a rank where they accumulate.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerocast import QuantizedWeight
from zerocast.checkpoint.checkpoint import group_of, on_rank_0
from zerocast.checkpoint.whole_folder import discard, retire
from zerocast.optim import Checkpoints
from zerocast.optim.zero_optimizer import ZeroOptimizer


def is_quantized(model: nn.Module) -> bool:
    """True if any parameter is a QuantizedWeight."""
    return any(isinstance(parameter, QuantizedWeight) for parameter in model.parameters())


def check_place(model: nn.Module, device: torch.device) -> None:
    """RuntimeError if a parameter is on another device than the process trains on; `cuda` without
    an index is the current one.
    """
    for name, parameter in model.named_parameters():
        if not is_same_device(parameter.device, device):
            raise RuntimeError(
                f"{name} is on {parameter.device} and not on {device}: move the model there before zerocast.quantize_, since "
                "masters are made where weights are"
            )


def is_same_device(one: torch.device, other: torch.device) -> bool:
    """True for one type and one index; without an index it is that of the current device."""
    return one.type == other.type and (one.index == other.index or _index(one) == _index(other))


def _index(device: torch.device) -> int:
    if str(device) == "cuda":
        return torch.cuda.current_device()
    return device.index or 0


def check_owners(optimizers: Sequence[ZeroOptimizer], models: Iterable[nn.Module]) -> None:
    """RuntimeError for a parameter of these quantized models that requires a gradient and that none
    of these ZeroAdamWs has.

    For several ranks, where such a model is not wrapped: each rank would go on with its own
    gradient of it, in its step and in norms that clip the others.
    """
    owned = {
        id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    }
    for model in models:
        for name, parameter in model.named_parameters():
            if id(parameter) not in owned and parameter.requires_grad and parameter.numel():
                raise RuntimeError(
                    f"{name} requires a gradient and no ZeroAdamW that was set up here has it, so nobody would average its "
                    "gradient over the ranks: give all trained parameters of a quantized model to ZeroAdamW and set that up too, "
                    "or call requires_grad_(False)"
                )


def check_together(optimizers: Sequence[ZeroOptimizer], models: Sequence[nn.Module]) -> None:
    """ValueError for quantized models to be saved or loaded without a ZeroAdamW."""
    if models and not optimizers:
        raise ValueError("save and load a quantized model and its ZeroAdamW together: it has the masters")


@contextlib.contextmanager
def without_reduction(optimizers: Iterable[ZeroOptimizer], model: nn.Module) -> Iterator[None]:
    """Gradients of the model's parameters stay on this rank within, and are reduced by the next
    backward pass.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in of_model(optimizers, model):
            stack.enter_context(optimizer.no_sync())
        yield


def of_model(optimizers: Iterable[ZeroOptimizer], model: nn.Module) -> list[ZeroOptimizer]:
    """Those that have any parameter of the model."""
    ids = {id(parameter) for parameter in model.parameters()}
    return [one for one in optimizers if any(id(p) in ids for group in one.param_groups for p in group["params"])]


def save(folder: Path, optimizers: Sequence[ZeroOptimizer], models: Sequence[nn.Module]) -> None:
    """Masters, moments, and what the models have beside: frozen parameters and persistent buffers.
    Each rank writes its part, also over an earlier save. ValueError for quantized models without a
    ZeroAdamW.
    """
    check_together(optimizers, models)
    group = group_of(optimizers[0]) if optimizers else None
    for index, optimizer in enumerate(optimizers):
        with Checkpoints(folder / str(index), keep=1) as checkpoints:
            checkpoints.save(optimizer, 0, model=_beside(index, optimizers, models))
    if group is not None:  # of an earlier save with more of them
        on_rank_0(group, lambda: discard(map(retire, _saved(folder)[len(optimizers) :])))


def load(folder: Path, optimizers: Sequence[ZeroOptimizer], models: Sequence[nn.Module]) -> None:
    """What `save` wrote, on any number of ranks. ValueError where it is missing or does not fit,
    such as another number of ZeroAdamWs.
    """
    check_together(optimizers, models)
    saved = _saved(folder)
    if optimizers and not saved:
        raise ValueError(f"{folder} holds no state of ZeroAdamW: the checkpoint was saved without zerocast")
    if len(saved) != len(optimizers):
        raise ValueError(
            f"{folder} holds the states of {len(saved)} ZeroAdamWs, and {len(optimizers)} were given: give as many"
        )
    for index, (one, optimizer) in enumerate(zip(saved, optimizers, strict=True)):
        Checkpoints(one, keep=1).load(optimizer, model=_beside(index, optimizers, models))


def _saved(folder: Path) -> list[Path]:
    """The folders of ZeroAdamWs in their order."""
    numbered = [path for path in folder.glob("*") if path.name.isdecimal()]
    return sorted(numbered, key=lambda path: int(path.name))


def _beside(index: int, optimizers: Sequence[ZeroOptimizer], models: Sequence[nn.Module]) -> nn.Module:
    """What the checkpoint of an optimizer holds beside its masters: of the first one, all that no
    optimizer trains.
    """
    if index > 0:
        return nn.Module()
    return _Untrained(models, {id(p) for one in optimizers[1:] for group in one.param_groups for p in group["params"]})


class _Untrained(nn.Module):
    """The models as one, without the parameters that other optimizers train."""

    def __init__(self, models: Sequence[nn.Module], trained_by_others: set[int]) -> None:
        super().__init__()
        for number, model in enumerate(models):
            self.add_module(f"model_{number}", model)
        self._trained_by_others = trained_by_others

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The others by name; those of models begin with `model_<number>`."""
        named = super().named_parameters(*args, **kwargs)
        return ((name, parameter) for name, parameter in named if id(parameter) not in self._trained_by_others)
