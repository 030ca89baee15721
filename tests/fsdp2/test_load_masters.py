"""A prepared model starts from high-precision weights: the same masters and bytes, on any mesh."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import zerocast
from tests.checkpoint.sources.source_files import KINDS, values
from tests.fsdp2 import models
from tests.fsdp2.models import Net
from tests.fsdp2.test_checkpoints import FORMATS, HIDDEN, WIDTH, build
from tests.optim.out_of_memory import OutOfMemory
from tests.workers import Ranks
from zerocast.fsdp2.manager import validity_of


def wanted(formats: tuple[str, ...]) -> dict[str, Tensor]:
    shapes = {name: tuple(tensor.shape) for name, tensor in Net(formats, WIDTH, HIDDEN).state_dict().items()}
    return values(shapes, torch.float32)


def loads(where: str, source: Any, trained: bool) -> list[str]:
    """What differs from the values of the source, and complaints about gathered bytes."""
    formats = ("nvfp4",) if where == "tp" else FORMATS
    model, optimizer = build(where, formats)
    if trained:
        models.train(model, optimizer, range(2), WIDTH)
    zerocast.fsdp2.load_masters(model, source)
    found = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}
    different = [name for name, value in wanted(formats).items() if not torch.equal(found[name], value)]
    return different + ([] if where == "tp" else models.complaints(model, where))


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
def test_any_mesh(ranks: Ranks, tmp_path: Path, world: int, where: str, kind: str, trained: bool) -> None:
    source = KINDS[kind](wanted(("nvfp4",) if where == "tp" else FORMATS), tmp_path)
    assert ranks(world)(loads, where, source, trained) == [[]] * world


def refuses(source: Any) -> str:
    model, _ = build("fsdp")
    before = {name: tensor.full_tensor().clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="does not fit the masters") as caught:
        zerocast.fsdp2.load_masters(model, source)
    assert all(torch.equal(tensor.full_tensor(), before[name]) for name, tensor in model.state_dict().items())
    return str(caught.value)


def test_what_does_not_fit(ranks: Ranks, tmp_path: Path) -> None:
    state = wanted(FORMATS)
    name = "blocks.0.1.weight"
    state[name] = state[name][1:].clone()
    for said in ranks(2)(refuses, KINDS["safetensors"](state, tmp_path)):
        assert f"model.{name} has shape ({HIDDEN - 1}, {WIDTH}) there and ({HIDDEN}, {WIDTH}) here" in said


def test_a_model_that_was_not_prepared() -> None:
    with pytest.raises(ValueError, match=r"was not given to zerocast\.fsdp2\.prepare"):
        zerocast.fsdp2.load_masters(torch.nn.Linear(2, 2), {})


def breaks_off(every: int) -> tuple[int, list[str]]:
    """Memory runs out at every so manieth operator of a load: how often that left a partial model, and complaints."""
    model, _ = build("fsdp")
    left, found, at = 0, [], 0
    while True:
        memory = OutOfMemory(at)
        try:
            with memory:
                zerocast.fsdp2.load_masters(model, wanted(FORMATS))
        except RuntimeError as error:
            found += [] if "injected" in str(error) else [str(error)]
        if validity_of(model).partial:
            left += 1
            for call in (model.state_dict, lambda: model(models.batch(0, WIDTH))):
                with pytest.raises(RuntimeError, match="loading masters raised half-way"):
                    call()
            zerocast.fsdp2.load_masters(model, wanted(FORMATS))
        found += models.complaints(model, f"operator {at}")
        if memory.count <= at:
            return left, found
        at += every


@pytest.mark.filterwarnings("ignore:no state of delayed scaling")
@pytest.mark.parametrize("every", [151, pytest.param(3, marks=pytest.mark.slow)])
def test_a_load_that_breaks_off(ranks: Ranks, every: int) -> None:
    ((left, found),) = ranks(1)(breaks_off, every, timeout=300.0)
    assert left
    assert found == []
