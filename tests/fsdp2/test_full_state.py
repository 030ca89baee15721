"""Full state dicts hold plain tensors on every rank, over one rank as over several."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import Net, slow
from tests.workers import on_ranks
from zerocast.fsdp2.parameter import MasterParameter

FULL = [
    StateDictOptions(full_state_dict=True),
    StateDictOptions(full_state_dict=True, cpu_offload=True),
    StateDictOptions(full_state_dict=True, ignore_frozen_params=True),
]


def a_mesh(shape: tuple[int, ...] | None) -> DeviceMesh:
    """Return a mesh of all ranks, or of replicas of shards if `shape` is given."""
    return models.mesh(shape, shape and ("replicate", "shard"))


def a_model(width: int, hidden: int, shape: tuple[int, ...] | None) -> Any:
    """Return a sharded model in formats for any shape."""
    return models.sharded(Net(("fp8_current", "fp8_block"), width, hidden), mesh=a_mesh(shape))


@pytest.mark.parametrize(
    ("world", "width", "hidden", "shape"),
    [(1, 64, 96, None), (2, 64, 96, (2, 1)), slow(2, 64, 96, None), slow(4, 7, 2, None)],
)
@on_ranks()
def test_full_states_are_plain(tmp_path: Path, width: int, hidden: int, shape: tuple[int, ...] | None) -> None:
    """Full states hold plain tensors, also in replicas of one rank each and where ranks have no row."""
    folder = str(tmp_path)
    model = a_model(width, hidden, shape)
    optimizer = torch.optim.AdamW(model.parameters())
    models.train(model, optimizer, range(1), width)
    states = {str(options): get_model_state_dict(model, options=options) for options in FULL}
    states["with optimizer"], optim = get_state_dict(model, optimizer, options=FULL[0])
    states |= {f"moments of {name}": moments for name, moments in optim["state"].items()}
    held = dict(model.named_parameters())
    states["full_tensor"] = {name: parameter.full_tensor().detach() for name, parameter in held.items()}
    states["of state_dict"] = {name: value.full_tensor() for name, value in model.state_dict().items()}
    whole = [Replicate()] * a_mesh(shape).ndim
    states["redistribute"] = {n: p.redistribute(placements=whole).to_local().detach() for n, p in held.items()}
    for what, state in states.items():
        assert all(type(value) is Tensor for value in state.values()), what
        file = Path(folder) / f"{dist.get_rank()}.safetensors"
        save_file({name: value.contiguous() for name, value in state.items()}, file)
        for name, value in load_file(file).items():
            assert np.array_equal(value.numpy(), state[name].cpu().numpy()), (what, name)


@on_ranks(1)
def test_a_full_tensor_is_a_copy() -> None:
    """`full_tensor()` copies over one rank too. Once torch's own `redistribute` does, `replicate_as_plain` can go."""
    model = a_model(64, 96, None)
    parameter = models.masters(model)["blocks.0.1.weight"][0]
    before = parameter.detach().to_local().clone()
    full = parameter.full_tensor()
    full.square().sum().backward()
    grad = parameter.grad.full_tensor()
    with torch.no_grad():
        full.zero_()
    torchs = DTensor.redistribute.__wrapped__(parameter, placements=[Replicate()])
    assert torch.equal(parameter.detach().to_local().clone(), before)
    assert torch.equal(grad, 2 * before)
    assert isinstance(torchs._local_tensor, MasterParameter)


def test_what_is_not_sharded_yet_is_saved_plain(tmp_path: Path) -> None:
    """The parameters themselves stay what FSDP2 is to find."""
    model = Net(("fp8_current",), 64, 96)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe))
    state = model.state_dict()
    assert all(type(value) is Tensor for value in state.values())
    assert all(type(value) is Tensor for value in model.blocks[0].state_dict().values())
    save_file(state, tmp_path / "model.safetensors")
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[name], value) for name, value in before.items())
    assert state["blocks.0.1.weight"].data_ptr() == model.blocks[0][1].weight.plain.data_ptr()
    kept = model.state_dict(keep_vars=True)
    assert kept["blocks.0.1.weight"] is model.blocks[0][1].weight
    for value in state.values():
        value.mul_(2)  # what reads into it in place
    model.load_state_dict(state, assign=True)
    assert isinstance(model.blocks[0][1].weight, MasterParameter)


# -- a master is found again by other libraries as a plain parameter is: by its address, its storage, or itself


def local(parameter: Any) -> Tensor:
    """Return the master shard of a parameter."""
    held: Tensor = getattr(parameter, "_local_tensor", parameter)
    return held


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(1, 2)
def test_a_master_has_the_address_of_its_values(sharded: bool) -> None:
    model = models.Net(("fp8_block", "nvfp4"), 32, 64)
    zerocast.fsdp2.prepare(model, model.recipe)
    if sharded:
        models.sharded(model, prepare=False)
    masters = [local(parameter) for parameter in model.parameters()]
    assert len({master.data_ptr() for master in masters if master.numel()}) == sum(m.numel() > 0 for m in masters)
    checked = 0
    for master in masters:
        inside = getattr(master, "plain", None)
        if inside is None or not inside.numel():
            continue
        start = inside.untyped_storage().data_ptr() + inside.storage_offset() * inside.element_size()
        assert master.data_ptr() == start
        assert master.untyped_storage().data_ptr() + 4 * master.storage_offset() == start
        assert master.is_set_to(master.detach())
        assert master in {master}
        assert sum(master is other for other in masters) == 1
        checked += 1
    assert checked >= 2
