"""A prepared master is found again by other libraries as a plain parameter is: by its address, its storage, or itself."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zerocast
from tests.fsdp2 import models
from tests.workers import on_ranks


def local(parameter: Any) -> Tensor:
    """The master shard of a parameter."""
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


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed: make readers")
@on_ranks(2)
def test_accelerate_finds_the_parameters_of_an_optimizer_again() -> None:
    """By its own functions, one after the other: its Accelerator chooses FSDP on GPUs alone."""
    from accelerate import Accelerator
    from accelerate.utils.fsdp_utils import fsdp2_canonicalize_names, fsdp2_switch_optimizer_parameters

    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    zerocast.fsdp2.prepare(model, zerocast.Recipe({"*.weight": "fp8_block"}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    settings: Any = SimpleNamespace(fp8_backend=None)
    before = fsdp2_canonicalize_names(Accelerator._get_named_parameters(settings, model, drop_refs=True))
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            placeholder: Any = torch.empty(1)
            placeholder.data_ptr = parameter.data_ptr()
            group["params"][index] = placeholder
    fully_shard(model, mesh=models.mesh())
    after = fsdp2_canonicalize_names(Accelerator._get_named_parameters(settings, model))
    fsdp2_switch_optimizer_parameters(optimizer, {address: after[name] for name, address in before.items()})
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    initial = {name: local(parameter).detach().clone() for name, parameter in model.named_parameters()}
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    changed = [name for name, parameter in model.named_parameters() if not torch.equal(local(parameter), initial[name])]
    assert held == changed == [f"{number}.weight" for number in range(4)]
