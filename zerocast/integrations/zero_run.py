"""What ZeroAdamW needs of trainers that know whole tensors and DistributedDataParallel: its own
files in their checkpoints, and gradients that stay on a rank where they accumulate.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zerocast import QuantizedWeight
from zerocast.optim import Checkpoints, ZeroAdamW


def is_quantized(model: nn.Module) -> bool:
    """True if any parameter is a QuantizedWeight."""
    return any(isinstance(parameter, QuantizedWeight) for parameter in model.parameters())


def check_place(model: nn.Module, device: Any) -> None:
    """RuntimeError if a parameter is on a device of another type than the process trains on."""
    elsewhere = [name for name, parameter in model.named_parameters() if parameter.device.type != device.type]
    if elsewhere:
        raise RuntimeError(
            f"{elsewhere[0]} is not on {device}: move the model there before zerocast.quantize_, since masters are made "
            "where weights are"
        )


@contextlib.contextmanager
def without_reduction(optimizers: Iterable[ZeroAdamW], model: nn.Module) -> Iterator[None]:
    """Gradients of the model's parameters stay on this rank within, and are reduced by the next
    backward pass.
    """
    of_model = {id(parameter) for parameter in model.parameters()}
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            if any(id(parameter) in of_model for group in optimizer.param_groups for parameter in group["params"]):
                stack.enter_context(optimizer.no_sync())
        yield


def save(folder: Path, optimizers: Sequence[ZeroAdamW], models: Sequence[nn.Module]) -> None:
    """Masters, moments and persistent buffers, by rank; also over an earlier save."""
    for index, optimizer in enumerate(optimizers):
        Checkpoints(folder / str(index), keep=1).save(optimizer, 0, extra=_buffers(models))


def load(folder: Path, optimizers: Sequence[ZeroAdamW], models: Sequence[nn.Module]) -> None:
    """What `save` wrote, on any number of ranks. ValueError where it is missing or does not fit."""
    for index, optimizer in enumerate(optimizers):
        if not (folder / str(index)).is_dir():
            raise ValueError(f"{folder} holds no state of ZeroAdamW: the checkpoint was saved without zerocast")
        Checkpoints(folder / str(index), keep=1).load(optimizer, extra=_buffers(models))


def _buffers(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Persistent buffers by the model's number and their name."""
    return {
        f"{index}.{name}": tensor
        for index, model in enumerate(models)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if not isinstance(tensor, nn.Parameter | QuantizedWeight)
    }
