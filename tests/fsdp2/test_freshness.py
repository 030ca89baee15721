"""Whatever changes a master, the next gather has its bytes; a change on some ranks alone raises on all."""

import copy
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import zerocast
from tests.fsdp2 import models, test_loops
from tests.fsdp2.models import FEW, Net, slow
from tests.workers import Ranks, error_of, on_ranks
from zerocast.fsdp2.gather_status import GatherStatus


def double(tensor: Any) -> Any:
    """Return a changed copy without history for autograd."""
    return (tensor.detach().clone() * 2 + 0.125).detach()


def load(model: nn.Module) -> None:
    model.load_state_dict({name: double(tensor) for name, tensor in model.state_dict().items()})


def load_and_assign(model: nn.Module) -> None:
    state = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        state[name] = torch.distributed.tensor.distribute_tensor(double(whole), tensor.device_mesh, tensor.placements)
    model.load_state_dict(state, assign=True)


def set_full_state(model: nn.Module) -> None:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    state = {name: double(tensor) for name, tensor in state.items()}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def broadcast_state(model: nn.Module) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    set_model_state_dict(model, {name: double(tensor) for name, tensor in state.items()}, options=options)


def load_in_place(model: nn.Module) -> None:
    """Load like DCP: read into the tensors of a state dict that was made earlier."""
    folder: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save({name: double(tensor) for name, tensor in model.state_dict().items()}, checkpoint_id=folder[0])
    dcp.load(model.state_dict(), checkpoint_id=folder[0])


def write_data(model: nn.Module) -> None:
    for parameter in models.held(model):
        parameter.data.mul_(-3)


def write_local(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in models.held(model):
            parameter.to_local().add_(0.5)


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    change.__name__: change
    for change in (
        load,
        load_and_assign,
        set_full_state,
        broadcast_state,
        load_in_place,
        write_data,
        write_local,
    )
}


def changed(name: str, formats: tuple[str, ...], reshard: bool) -> None:
    """Check that a change of all masters is cast, before the first forward pass, after one, and after a step."""
    model = models.sharded(Net(formats, 64, 96), reshard_after_forward=reshard)
    for when in ("first", "later"):
        before = {key: p.full_tensor() for key, (p, _) in models.masters(model).items()}
        CHANGES[name](model)
        after = models.masters(model)
        assert not any(torch.equal(value, after[key][0].full_tensor()) for key, value in before.items())
        if when == "later":  # by a forward pass, as training does it
            models.forward(model)
        models.check(model, f"{name}, {when}")
        optimizer = models.OPTIMIZERS["AdamW"](model)  # of the parameters that a change may have replaced
        models.train(model, optimizer, range(1), 64)
        models.check(model, f"a step after {name}, {when}")
        models.forward(model)  # leaves weights gathered where nothing reshards them


LEFT_GATHERED = ("load", "write_data")


@pytest.mark.parametrize(
    ("name", "reshard"),
    [*((name, True) for name in CHANGES)]
    + [(name, False) if name in LEFT_GATHERED else slow(name, False) for name in CHANGES],
)
@on_ranks(2)
def test_changes_on_all_ranks_are_cast(name: str, reshard: bool) -> None:
    """A change on all ranks is cast, also if nothing reshards and a forward pass would not gather again."""
    changed(name, FEW[:2], reshard)


ONE_RANK: dict[str, Callable[[nn.Module], None]] = {
    change.__name__: change for change in (load, write_data, write_local)
}


AT_FIRST = [("load", True), *(slow(name, True) for name in ONE_RANK if name != "load")]


@pytest.mark.parametrize(("name", "first"), [*((name, False) for name in ONE_RANK), *AT_FIRST])
@on_ranks(3)
def test_a_change_on_one_rank_raises_on_all(name: str, first: bool) -> None:
    model = models.sharded(Net(FEW, 64, 96))
    if not first:
        models.train(model, torch.optim.AdamW(model.parameters()), range(1), 64)
        models.complaints(model, "")
    else:
        zerocast.fsdp2.refresh(model)
    if dist.get_rank() == 1:
        ONE_RANK[name](model)
    said = error_of(lambda: model(models.batch(0, 64)))
    zerocast.fsdp2.refresh(model)
    models.forward(model)  # gathers again what the other pass has left
    models.check(model, "refreshed")
    assert "was changed on ranks [1] of its shard group and not on ranks" in said
    assert "zerocast.fsdp2.refresh" in said


def refreshed_after_one_rank() -> None:
    """Change the rows of one rank and refresh on all, as a hand-written loop may do."""
    model = models.sharded(Net(FEW, 64, 96))
    models.train(model, torch.optim.AdamW(model.parameters()), range(1), 64)
    if dist.get_rank() == 1:
        write_data(model)
    zerocast.fsdp2.refresh(model)
    models.check(model, "refreshed")


def stepped_alone(fmt: str, hidden: int) -> tuple[str, float]:
    """Step on one rank alone. Return the error of the next forward pass and the seconds it took; collectives
    time out after three.
    """
    group = dist.new_group(timeout=timedelta(seconds=3))
    # With a name of its own: torch's caches hand the mesh of an operation to later ones on an equal mesh, and this
    # group is broken after the case.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(fmt,))
    model = models.sharded(Net((fmt,), 64, hidden), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    models.train(model, optimizer, range(1), 64)
    model(models.batch(1, 64)).float().square().mean().backward()
    if dist.get_rank() == 1:
        optimizer.step()
    began = time.monotonic()
    said = error_of(lambda: model(models.batch(2, 64)))
    return said, time.monotonic() - began


def test_a_step_on_one_rank_raises_on_all(ranks: Ranks) -> None:
    """All ranks raise at once if no amax is reduced. Otherwise the rank that stepped reduces alone, until the
    group's timeout.
    """
    for said, _ in ranks(2)(stepped_alone, "mxfp8", 64):
        assert "optimizer steps and zerocast.fsdp2.refresh must happen on all of them" in said
    found = ranks(2)(stepped_alone, "nvfp4", 96)
    # who waits a little longer may hear that the other has left
    assert any("Timed out" in said for said, _ in found)
    assert all("Timed out" in said or "closed by peer" in said for said, _ in found)
    assert all(seconds < 20 for _, seconds in found)


def test_a_prepared_parameter_is_not_copied() -> None:
    model = zerocast.fsdp2.prepare(nn.Linear(32, 32), zerocast.Recipe({"weight": "nvfp4"}))
    with pytest.raises(RuntimeError, match="copy the model before"):
        copy.deepcopy(model)


# -- masters that change while their weights are left gathered: ranks ask each other, and only then


REFRESHED = "nvfp4", "fp8_block"  # whose products a refresh does not change


def passed(forward: nn.Module) -> tuple[str, torch.Tensor | None]:
    """Return the error of a forward pass, or "nothing" and its output."""
    with torch.no_grad():
        try:
            return "nothing", forward(models.batch(0, 64))
        except RuntimeError as error:
            return str(error), None


@pytest.mark.parametrize(
    ("name", "world", "writers"),
    [
        ("write_data", 3, (1,)),
        models.slow("write_local", 3, (1,)),
        ("write_data", 2, (0, 1)),
    ],
)
@on_ranks()
def test_a_change_of_what_is_left_gathered(name: str, writers: tuple[int, ...]) -> None:
    """No gather can tell of a change of gathered weights, so a forward pass of a module alone is refused if
    its bytes are old.

    A load is not among these: `state_dict` frees what FSDP2 left gathered, with or without
    zerocast, on the rank that calls it.
    """
    model = models.sharded(models.Net(REFRESHED, 64, 96), reshard_after_forward=False)
    passed(model)
    if dist.get_rank() in writers:
        ONE_RANK[name](model)
    said, outputs = zip(*(passed(forward) for forward in (model.blocks[0], model, model)), strict=True)
    zerocast.fsdp2.refresh(model)
    _, fresh = passed(model)
    assert fresh is not None
    assert all(output is None or torch.equal(output, fresh) for output in outputs[1:])
    models.check(model, name)
    assert ("was changed after it was gathered" in said[0]) == (dist.get_rank() in writers)
    assert said[1] == said[2]
    if writers == (1,):
        assert "was changed on ranks [1] of its shard group and not on ranks" in said[1]
    else:
        assert said[1] == "nothing"


def in_flight(model: Any) -> Callable[[], object]:
    """Begin to gather the first block."""
    handle: Any = model.blocks[0].unshard(async_op=True)
    return handle.wait  # type: ignore[no-any-return]


def begun(model: Any) -> Callable[[], object]:
    """Begin to gather the first block. The next pass waits for it."""
    model.blocks[0].unshard(async_op=True)
    return lambda: None


def by_hand(model: Any) -> Callable[[], object]:
    """Gather the first block and wait for its weights."""
    model.blocks[0].unshard()
    return lambda: None


def broken_in_the_root(model: Any) -> Callable[[], object]:
    """Break off a pass that has gathered the weights of the root module."""
    model.reshard()
    with test_loops.breaking(model.first):
        models.forward(model)
    return lambda: None


def broken_backward_in_the_root(model: Any) -> Callable[[], object]:
    """Break a backward pass that has gathered the root module, which the forward pass had freed."""
    model.set_reshard_after_forward(True)
    with test_loops.breaking_backward(model.last):
        test_loops.loss(model, 0).backward()
    return lambda: None


def evaluated(model: Any) -> Callable[[], object]:
    """Leave all blocks gathered after a pass."""
    models.forward(model)
    return lambda: None


@pytest.mark.notices(
    "a master or a plain parameter is written on all ranks while it is gathered, or while its gather is on its way",
    where="FSDP2",
    answer="the next forward pass of the model gathers again; of a module in it, a quantized weight raises",
)
@pytest.mark.parametrize(
    ("gathered", "only_plain"),
    [
        (in_flight, False),
        (begun, True),
        (by_hand, False),
        (by_hand, True),
        (broken_in_the_root, False),
        (broken_backward_in_the_root, False),
        (evaluated, False),
        (evaluated, True),
    ],
)
@on_ranks(2)
def test_what_is_written_while_it_is_gathered(
    gathered: Callable[[Any], Callable[[], object]], only_plain: bool
) -> None:
    model = models.sharded(Rooted(), reshard_after_forward=gathered is not evaluated)
    models.forward(model)
    zerocast.fsdp2.refresh(model)
    wait = gathered(model)
    with torch.no_grad():
        for parameter in models.held(model):
            if not (only_plain and parameter.dim() > 1):
                parameter.mul_(3.0)
    wait()
    check_fresh(model)


@pytest.mark.parametrize("only_plain", [False, True])
@on_ranks(2)
def test_a_module_alone_refuses_what_was_written_in_flight(only_plain: bool) -> None:
    model = models.sharded(Rooted())
    models.forward(model)
    wait = in_flight(model)
    with torch.no_grad():
        for parameter in models.held(model):
            if (parameter.dim() == 1) == only_plain:
                parameter.mul_(3.0)
    wait()
    assert "was changed after it was gathered" in passed(model.blocks[0])[0]
    check_fresh(model)


@on_ranks(2)
def test_what_is_left_gathered_is_written_again_and_again() -> None:
    model = models.sharded(Rooted(), reshard_after_forward=False)
    models.forward(model)
    for _ in range(3):
        with torch.no_grad():
            for parameter in models.held(model):
                parameter.mul_(3.0)
        said, output = passed(model)
    zerocast.fsdp2.refresh(model)
    assert said == "nothing"
    assert torch.equal(output, passed(model)[1])


class Scaled(Net):
    """Its root module has no quantized weight."""

    def __init__(self, formats: tuple[str, ...], width: int, hidden: int) -> None:
        super().__init__(formats, width, hidden)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output for inputs that a plain parameter of the root scales."""
        return super().forward(x * self.scale)


@pytest.mark.parametrize("only_plain", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
@on_ranks(2)
def test_a_root_of_plain_parameters_is_left_gathered(reshard: bool, only_plain: bool) -> None:
    model = models.sharded(Scaled(REFRESHED, 64, 96), reshard_after_forward=reshard)
    model.set_reshard_after_forward(False, recurse=False)
    for _ in range(2):
        models.forward(model)
        with torch.no_grad():
            for parameter in models.held(model):
                if not (only_plain and parameter.dim() > 1):
                    parameter.mul_(3.0)
    check_fresh(model)


@on_ranks(2)
def test_another_gather_casts_what_was_written() -> None:
    """The blocks were left gathered of the cast before."""
    model = models.sharded(Rooted(), reshard_after_forward=False)
    models.forward(model)
    with torch.no_grad():
        for parameter in models.held(model):
            # Plain parameters that were written would be a reason to gather all groups again.
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    model.blocks[0].reshard()
    model.blocks[0].unshard()
    assert "was changed after it was gathered" in passed(model.blocks[1])[0]
    check_fresh(model)


def check_fresh(model: Any) -> None:
    """Check that a forward pass computes with the current masters."""
    said, output = passed(model)
    zerocast.fsdp2.refresh(model)
    _, fresh = passed(model)
    assert said == "nothing"
    assert torch.equal(output, fresh)


class Rooted(test_loops.Rooted):
    """A model with a method that gathers the weights of the root module before the hooks of the model run."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of outputs."""
        return self(x).float().square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("prefetches", [False, True])
@on_ranks(2)
def test_nobody_asks_while_it_trains(prefetches: bool) -> None:
    """Weights that are gathered again, or prefetched by the root module, are not left from an earlier pass."""
    model = models.sharded(Rooted())
    if prefetches:
        model.set_modules_to_forward_prefetch(list(model.blocks))
    register_fsdp_forward_method(model, "loss")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(GatherStatus, "exchange", side_effect=AssertionError("asked")):
        for step in range(3):
            for part in range(2):
                model.loss(models.batch(2 * step + part, 64)).backward()
            optimizer.step()
