"""A prepared model starts from high-precision weights: the same masters and bytes, on any mesh."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import zerocast
from tests.checkpoint.sources.source_files import KINDS, values
from tests.fsdp2 import models
from tests.fsdp2.models import Net
from tests.fsdp2.test_checkpoints import FORMATS, HIDDEN, WIDTH, build
from tests.workers import on_ranks


def wanted(formats: tuple[str, ...]) -> dict[str, Tensor]:
    shapes = {name: tuple(tensor.shape) for name, tensor in Net(formats, WIDTH, HIDDEN).state_dict().items()}
    return values(shapes, torch.float32)


@pytest.mark.filterwarnings("ignore:no state of delayed scaling")
@pytest.mark.parametrize(
    ("world", "where", "kind", "trained"),
    [
        pytest.param(1, "fsdp", "safetensors", True, marks=pytest.mark.slow),
        (3, "fsdp", "safetensors_folder", True),
        pytest.param(2, "fsdp", "dcp", False, marks=pytest.mark.slow),
        pytest.param(4, "hsdp", "file", False, marks=pytest.mark.slow),
        (4, "tp", "safetensors", False),
    ],
)
@on_ranks()
def test_any_mesh(tmp_path: Path, where: str, kind: str, trained: bool) -> None:
    source = KINDS[kind](wanted(("nvfp4",) if where == "tp" else FORMATS), tmp_path)
    formats = ("nvfp4",) if where == "tp" else FORMATS
    model, optimizer = build(where, formats)
    if trained:
        models.train(model, optimizer, range(2), WIDTH)
    zerocast.fsdp2.load_masters(model, source)
    found = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}
    different = [name for name, value in wanted(formats).items() if not torch.equal(found[name], value)]
    assert different + ([] if where == "tp" else models.complaints(model, where)) == []
