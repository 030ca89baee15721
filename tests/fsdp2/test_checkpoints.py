"""Checkpoints hold FP32 masters as plain tensors, load into any other ranks and meshes, and are
continued to the bit.
"""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerocast
from tests import casts
from tests.checkpoint.storage import SOURCES, new_values
from tests.fsdp2 import models
from tests.fsdp2.models import DELAYED, Net
from tests.workers import Ranks, on_ranks

WIDTH, HIDDEN = 64, 96
FORMATS = ("nvfp4", DELAYED, "mxfp8")


def build(where: str, formats: tuple[str, ...] = FORMATS, prepare: bool = True) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model on the ranks of a case, "fsdp", "hsdp" or "tp", and its optimizer."""
    model = Net(formats, WIDTH, HIDDEN)
    if where == "tp":
        mesh = models.mesh((dist.get_world_size() // 2, 2), ("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
        zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe), weight_mesh=mesh["dp", "tp"]._flatten("all"))
        fully_shard(model, mesh=mesh["dp"], mp_policy=models.BF16)
    else:
        mesh = models.mesh((2, 2), ("replicate", "shard")) if where == "hsdp" else models.mesh()
        models.sharded(model, mesh=mesh, prepare=prepare)
    return model, models.OPTIMIZERS["AdamW"](model)


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return what a checkpoint saves, under its fixed keys."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state, "zerocast": zerocast.fsdp2.state_dict(model)}


def save(model: Any, optimizer: Any, path: str) -> None:
    dcp.save(state_of(model, optimizer), checkpoint_id=path)


def load(model: Any, optimizer: Any, path: str) -> None:
    """Load in place, then set the states."""
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    zerocast.fsdp2.load_state_dict(model, state["zerocast"])


def contents(model: Any, optimizer: Any) -> dict[str, str]:
    """Return digests of whole masters, moments and delayed state, and of all gathered bytes."""
    gathered = {
        f"{name} {key}": casts.sha(value)
        for name, weight in models.unsharded(model)
        for key, value in models.bytes_of(weight).items()
    }
    state = state_of(model, optimizer)
    state["optim"] = state["optim"]["state"]
    return gathered | models.digests(state)


def saved(where: str, path: str, formats: tuple[str, ...]) -> dict[str, str]:
    model, optimizer = build(where, formats)
    models.train(model, optimizer, range(3), WIDTH, rank=dist.get_rank() // 2 if where == "tp" else None)
    save(model, optimizer, path)
    return contents(model, optimizer)


def loaded(where: str, path: str, formats: tuple[str, ...]) -> dict[str, str]:
    """Load into a model that has trained. Return its contents."""
    model, optimizer = build(where, formats)
    models.train(model, optimizer, range(7, 8), WIDTH)
    load(model, optimizer, path)
    if where != "tp":
        models.check(model, where)
    return contents(model, optimizer)


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        ((4, "fsdp"), (4, "hsdp")),
        ((2, "fsdp"), (4, "tp")),
        ((4, "tp"), (3, "fsdp")),
    ],
)
def test_other_ranks_and_meshes(ranks: Ranks, tmp_path: Path, saver: tuple[int, str], loader: tuple[int, str]) -> None:
    """Masters, moments and delayed state are those that were saved, and so are the gathered bytes."""
    sliced = "tp" in saver + loader
    formats = ("nvfp4",) if sliced else FORMATS
    expected = ranks(saver[0])(saved, saver[1], str(tmp_path), formats)[0]
    for found in ranks(loader[0])(loaded, loader[1], str(tmp_path), formats):
        for name, digest in expected.items():
            is_state = name.startswith(("model.", "optim.", "zerocast."))
            # gathered slices are parts of the weight
            assert found[name] == digest or (sliced and not is_state), name


@pytest.mark.notices(
    "a prepared model is pickled (as an argument of a spawned process) and trained: that is in plain FP32",
    where="FSDP2",
    answer="warns at the first forward pass with gradients, unless it was prepared again",
)
def test_prepared_modules_pickle_as_plain_ones(recwarn: pytest.WarningsRecorder) -> None:
    recipe = zerocast.Recipe({"weight": "nvfp4"})
    model = zerocast.fsdp2.prepare(nn.Linear(32, 32), recipe)
    copy, again = (pickle.loads(pickle.dumps(model)) for _ in range(2))
    assert type(copy.weight.data) is Tensor
    assert torch.equal(copy.weight, model.weight.plain)
    with torch.no_grad():
        copy(torch.ones(1, 32))
    with pytest.raises(RuntimeError, match="call fully_shard"):
        zerocast.fsdp2.prepare(again, recipe)(torch.ones(1, 32))
    assert not recwarn.list
    for _ in range(2):
        copy(torch.ones(1, 32))
    (said,) = recwarn.list
    assert str(said.message).startswith("this Linear was pickled after zerocast.fsdp2.prepare")


# -- high-precision weights: the same masters and bytes, on any mesh


def wanted(formats: tuple[str, ...]) -> dict[str, Tensor]:
    shapes = {name: tuple(tensor.shape) for name, tensor in Net(formats, WIDTH, HIDDEN).state_dict().items()}
    return new_values(shapes, torch.float32)


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
    source = SOURCES[kind](wanted(("nvfp4",) if where == "tp" else FORMATS), tmp_path)
    formats = ("nvfp4",) if where == "tp" else FORMATS
    model, optimizer = build(where, formats)
    if trained:
        models.train(model, optimizer, range(2), WIDTH)
    zerocast.fsdp2.load_masters(model, source)
    found = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}
    different = [name for name, value in wanted(formats).items() if not torch.equal(found[name], value)]
    assert different + ([] if where == "tp" else models.complaints(model, where)) == []
