"""What tests of checkpoints write and find: the same tensors in every kind of source, and folders of checkpoints."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from tests.optim.probe import MIXED
from tests.optim.runs import Run, Trainer
from zerocast.checkpoint.writer import LEASE
from zerocast.optim import Checkpoints

State = Mapping[str, Tensor]


def as_mapping(state: State, folder: Path) -> Any:
    return dict(state)


def as_file(state: State, folder: Path) -> Any:
    torch.save(dict(state), folder / "weights.pt")
    return folder / "weights.pt"


def as_old_file(state: State, folder: Path) -> Any:
    """In the format before zip archives, which cannot be mapped; with things beside the tensors."""
    content = {"state_dict": dict(state), "epoch": 3, "name": "run"}
    torch.save(content, folder / "weights.pth", _use_new_zipfile_serialization=False)
    return folder / "weights.pth"


def as_safetensors(state: State, folder: Path) -> Any:
    save_file({f"model.{name}": tensor.contiguous() for name, tensor in state.items()}, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def as_safetensors_folder(state: State, folder: Path) -> Any:
    """Two files and an index, which leaves out what else a file holds."""
    halves = [dict(list(state.items())[::2]), dict(list(state.items())[1::2])]
    places = {}
    for number, half in enumerate(halves, 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({**{n: t.contiguous() for n, t in half.items()}, "unlisted": torch.zeros(3)}, folder / file)
        places |= dict.fromkeys(half, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def as_dcp(state: State, folder: Path) -> Any:
    dcp.save({"model": dict(state), "steps": 3}, checkpoint_id=folder, no_dist=True)
    return folder


SOURCES: Mapping[str, Callable[[State, Path], Any]] = {
    write.__name__[3:]: write
    for write in (as_mapping, as_file, as_old_file, as_safetensors, as_safetensors_folder, as_dcp)
}


def new_values(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Fresh values that are none of a model's initial ones."""
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


# Formats with delayed scales, with blocks and without any.
FEW = Run(tuple(spec for spec in MIXED if spec.name in ("norm", "delayed", "nv", "bias")))


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, without the lease of its writer."""
    return sorted(path.name for path in folder.iterdir() if path.name != LEASE)


def save_few(folder: str, steps: range = range(1, 3)) -> None:
    """Save checkpoints of these steps of `FEW`."""
    trainer, checkpoints = Trainer(FEW), Checkpoints(folder)
    for step in steps:
        trainer.step(step)
        checkpoints.save(trainer.optimizer, step)
