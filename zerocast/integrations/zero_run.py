"""zero_run: the functions by which trainers run ZeroAdamW in place of DistributedDataParallel.

Such trainers (Lightning, accelerate, transformers) only support unsharded tensors. ZeroAdamW needs
additional files in their checkpoints, and gradients that stay on the rank while they accumulate.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zerocast import QuantizedWeight
from zerocast.checkpoint.checkpoint import group_of
from zerocast.checkpoint.manifest import LOADS, SAVES, Manifest
from zerocast.checkpoint.store import Location
from zerocast.checkpoint.whole_folder import discard, is_unfinished, mark_incomplete
from zerocast.distributed.agreement import from_rank_0
from zerocast.optim import Checkpoints
from zerocast.optim.zero_optimizer import ZeroOptimizer

# Why a checkpoint of a trainer may have no masters.
NO_STATE = "the checkpoint was saved without zerocast or as weights only, or its save was interrupted"


def is_quantized(model: nn.Module) -> bool:
    """Return True if any parameter is a QuantizedWeight."""
    return any(isinstance(parameter, QuantizedWeight) for parameter in model.parameters())


def check_device(model: nn.Module, device: torch.device) -> None:
    """Raise RuntimeError if a parameter is not on the device that the process trains on; `cuda`
    without an index is the current one.
    """
    for name, parameter in model.named_parameters():
        if not is_same_device(parameter.device, device):
            raise RuntimeError(
                f"{name} is on {parameter.device}, expected {device}: move the model to {device} before zerocast.quantize_, "
                "since masters are on the device of the weights"
            )


def is_same_device(first: torch.device, second: torch.device) -> bool:
    """Return True for the same type and index. `cuda` without an index is the current device."""
    return first == second or _with_index(first) == _with_index(second)


def _with_index(device: torch.device) -> torch.device:
    index = torch.cuda.current_device() if str(device) == "cuda" else device.index or 0
    return torch.device(device.type, index)


def check_owners(optimizers: Sequence[ZeroOptimizer], models: Iterable[nn.Module]) -> None:
    """Raise RuntimeError for a parameter of a quantized model that requires a gradient and that
    none of these ZeroAdamWs has.

    Quantized models are not wrapped in DistributedDataParallel, so with several ranks the gradient
    of such a parameter would differ between them, and so would gradient norms.
    """
    owned = {
        id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    }
    for model in models:
        for name, parameter in model.named_parameters():
            if id(parameter) not in owned and parameter.requires_grad and parameter.numel():
                raise RuntimeError(
                    f"{name} requires a gradient but is in no ZeroAdamW that was set up, so its gradient would not be "
                    "averaged over the ranks: pass all trained parameters of a quantized model to ZeroAdamW and set it up too, "
                    "or call requires_grad_(False)"
                )


def check_together(optimizers: Sequence[ZeroOptimizer], models: Sequence[nn.Module]) -> None:
    """Raise ValueError for quantized models to be saved or loaded without a ZeroAdamW."""
    if models and not optimizers:
        raise ValueError("save and load a quantized model and its ZeroAdamW together: it has the masters")


@contextlib.contextmanager
def without_reduction(optimizers: Iterable[ZeroOptimizer], model: nn.Module) -> Iterator[None]:
    """Accumulate gradients of the model on this rank while the context is open.

    The next backward pass after it reduces them.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers_of_model(optimizers, model):
            stack.enter_context(optimizer.no_sync())
        yield


def optimizers_of_model(optimizers: Iterable[ZeroOptimizer], model: nn.Module) -> list[ZeroOptimizer]:
    """Return the optimizers that have any parameter of the model."""
    ids = {id(parameter) for parameter in model.parameters()}
    return [
        optimizer
        for optimizer in optimizers
        if any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"])
    ]


def save(folder: Location, optimizers: Sequence[ZeroOptimizer], models: Sequence[nn.Module], save_id: str = "") -> None:
    """Save masters and moments, and the frozen parameters and persistent buffers of the models.

    Each rank writes its part. An earlier save in the folder is replaced. `save_id`, the same on all
    ranks, must also be passed to `load`, which checks that files next to the folder are from the
    same save. Collective. Raises ValueError for quantized models without a ZeroAdamW.
    """
    check_together(optimizers, models)
    group = group_of(optimizers[0]) if optimizers else None
    for index, optimizer in enumerate(optimizers):
        with Checkpoints(folder / str(index), keep=1) as checkpoints:
            model = _module_saved_with(index, optimizers, models)
            checkpoints.save(optimizer, 0, model=model, extra={"save_id": save_id})
    # An earlier save may have had more optimizers. `load` counts the folders, so theirs must go.
    if group is not None:
        from_rank_0(
            group, lambda: discard([mark_incomplete(path) for path in _saved(folder)[len(optimizers) :]]), SAVES
        )


def discard_saved(folder: Location, optimizers: Sequence[ZeroOptimizer]) -> None:
    """Delete the masters and moments that an earlier save has left in the folder. Collective.

    For a trainer that overwrites files next to the folder before it calls `save`, or does not call
    `save` at all. An interrupted save then leaves no masters that belong to other files.
    """
    if optimizers:
        from_rank_0(group_of(optimizers[0]), lambda: discard([mark_incomplete(path) for path in _saved(folder)]), SAVES)


def has_saved(folder: Location) -> bool:
    """Return True if the folder has masters and moments."""
    return bool(_saved(folder))


def load(folder: Location, optimizers: Sequence[ZeroOptimizer], models: Sequence[nn.Module], save_id: str = "") -> None:
    """Load a folder that `save` wrote, on any number of ranks. Collective.

    Raises ValueError, with nothing changed, if it is missing or does not fit, for example with a
    different number of ZeroAdamWs, and if it was written by a save with a different `save_id`.
    """
    check_together(optimizers, models)
    saved = _saved(folder)
    if optimizers and not saved:
        raise ValueError(f"{folder} holds no state of ZeroAdamW: {NO_STATE}")
    if len(saved) != len(optimizers):
        raise ValueError(f"{folder} holds the states of {len(saved)} ZeroAdamWs, but {len(optimizers)} were passed")
    if optimizers:
        from_rank_0(group_of(optimizers[0]), lambda: _check_save_id(saved, save_id), LOADS)
    for index, (state_folder, optimizer) in enumerate(zip(saved, optimizers, strict=True)):
        Checkpoints(state_folder, keep=1).load(optimizer, model=_module_saved_with(index, optimizers, models))


def _check_save_id(saved: Sequence[Location], save_id: str) -> None:
    """Raise ValueError for a folder that was written by a save with a different `save_id`."""
    for folder in saved:
        manifest = Manifest.of_step(Checkpoints(folder).path(0), 0)
        if manifest.values.get("save_id") != save_id:
            raise ValueError(
                f"{folder} and the files next to it are from two saves, the second of which was interrupted: load a "
                "different checkpoint"
            )


def _saved(folder: Location) -> list[Location]:
    """Return the folders of the saved ZeroAdamWs, in the order of the optimizers."""
    inside: list[Location] = list(folder.iterdir()) if folder.is_dir() else []
    numbered = [path for path in inside if path.name.isdecimal() and not is_unfinished(path)]
    return sorted(numbered, key=lambda path: int(path.name))


def _module_saved_with(index: int, optimizers: Sequence[ZeroOptimizer], models: Sequence[nn.Module]) -> nn.Module:
    """Return the module that is saved with the masters of an optimizer.

    For the first optimizer it has everything that no other optimizer trains. For the others it is
    empty.
    """
    if index > 0:
        return nn.Module()
    trained_by_others = {
        id(parameter)
        for optimizer in optimizers[1:]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return _Untrained(models, trained_by_others)


class _Untrained(nn.Module):
    """The models as one, without the parameters that other optimizers train."""

    def __init__(self, models: Sequence[nn.Module], trained_by_others: set[int]) -> None:
        super().__init__()
        for number, model in enumerate(models):
            self.add_module(f"model_{number}", model)
        self._trained_by_others = trained_by_others

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the remaining parameters. Their names begin with `model_<number>`."""
        named = super().named_parameters(*args, **kwargs)
        return ((name, parameter) for name, parameter in named if id(parameter) not in self._trained_by_others)
