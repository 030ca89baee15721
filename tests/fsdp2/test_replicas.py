"""Replicas (HSDP) share no gather, so an error of one replica must be sent to all. Otherwise the
others would wait in the reduction of gradients, or continue with different masters.
"""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import Net
from tests.hosts.stopping import TIMEOUT, limit_collectives
from tests.optim.runs import Repeated
from tests.workers import Pool, Ranks, RanksFailed, error_of, on_ranks
from zerocast.fsdp2 import FusedAdamW
from zerocast.fsdp2.fused_adamw import CapturableFusedStep
from zerocast.fsdp2.gather_status import GatherStatus
from zerocast.fsdp2.master_memory import MasterAddresses
from zerocast.weight.validity import transaction_together

WIDTH = 64
# One format whose casts reduce amaxes, and one whose casts reduce nothing.
FORMATS = ("nvfp4", "fp8_block")


class Pass:
    """A model in replicas, and what its passes say."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.model: Any = models.sharded(
            Net(FORMATS, WIDTH, 96), mesh=models.mesh(shape, ("replicate", "shard")), keep_codes=None
        )
        self.optimizer = FusedAdamW(self.model.parameters(), lr=1e-2)
        models.train(self.model, self.optimizer, range(2), WIDTH)
        self.in_first_replica = dist.get_rank() < shape[1]

    def backward(self) -> None:
        self.model(models.batch(2, WIDTH)).float().square().mean().backward()

    def forward(self) -> str:
        return error_of(lambda: models.forward(self.model, 3))


@torch.no_grad()
def number_out_of_range(run: Pass) -> str:
    """Let rank 0 refuse to step."""
    if dist.get_rank() == 0:
        run.optimizer.param_groups[0]["lr"] = float("nan")
    run.optimizer.step()
    told = run.forward()
    # The others have stepped, so masters are of different steps until a load, of which this does what matters.
    run.optimizer.param_groups[0]["lr"] = 1e-2
    with transaction_together(run.optimizer.validities, "a load"):
        for parameter, _ in models.masters(run.model).values():
            parameter.fill_(1.0)
    return told


def masters_gone(run: Pass) -> str:
    """Let rank 0 lose its masters."""
    run.optimizer.step()
    with mock.patch.object(MasterAddresses, "check_memory", side_effect=ValueError("their memory is gone")):
        if dist.get_rank() == 0:
            return run.forward()
    return run.forward()


def masters_written(run: Pass, step: Callable[[], object] | None = None) -> str:
    """Write to a master on all ranks of one replica, cast it in a forward pass, and step on all ranks."""
    master, _ = models.masters(run.model)["blocks.1.1.weight"]
    before = master.detach().clone()
    with torch.no_grad():
        if run.in_first_replica:
            master.mul_(2.0)
        assert run.forward() == ""
        (step or run.optimizer.step)()
        told = run.forward()
        master.copy_(before)
    return told


def masters_written_before_a_captured_step(run: Pass) -> str:
    """Write masters before a captured step, whose graph does not know of it."""
    step = CapturableFusedStep(run.optimizer)
    captured = Repeated(step)
    for _ in range(2):
        captured()

    def last_step() -> None:
        assert step.must_step_without_graph == run.in_first_replica
        captured()

    return masters_written(run, last_step)


EVENTS = {
    number_out_of_range: ("failed partway on ranks [0]", "or of another replica", "lr is out of range: nan"),
    masters_gone: ("ranks [0] of its shard group could not cast", "or of another replica", "their memory is gone"),
    masters_written: ("have made casts that others have not",) * 3,
    masters_written_before_a_captured_step: ("have made casts that others have not",) * 3,
}


def told(event: Any, shape: tuple[int, int], late: bool) -> str:
    """Return what `event` reports on this rank, and check that a refresh puts the weights right."""
    reads_late = mock.patch.object(GatherStatus, "reads_late", staticmethod(lambda headers: True))
    with reads_late if late else contextlib.nullcontext():
        run = Pass(shape)
        run.backward()
        said = event(run)
        zerocast.fsdp2.refresh(run.model)
        run.optimizer.zero_grad()
        models.train(run.model, run.optimizer, range(4, 5), WIDTH)
        models.check(run.model, "put right")
        return said


def check(ranks: Ranks, event: Any, shape: tuple[int, int], late: bool, timeout: float = 60.0) -> None:
    """Check that all ranks raise after an event, and go on after a refresh."""
    in_its_replica, elsewhere, on_rank_0 = EVENTS[event]
    for rank, said in enumerate(ranks(shape[0] * shape[1])(told, event, shape, late, timeout=timeout)):
        assert (on_rank_0 if rank == 0 else in_its_replica if rank < shape[1] else elsewhere) in said


@pytest.mark.parametrize(
    ("event", "shape", "late"),
    [
        *((event, (2, 1), number % 2 == 1) for number, event in enumerate(EVENTS)),
        *((event, (2, 2), False) for event in (masters_gone, masters_written)),
        *(models.slow(event, (2, 1), number % 2 == 0) for number, event in enumerate(EVENTS)),
        *(models.slow(event, (2, 2), False) for event in (number_out_of_range, masters_written_before_a_captured_step)),
    ],
)
def test_all_replicas_raise(ranks: Ranks, event: Any, shape: tuple[int, int], late: bool) -> None:
    """All replicas raise, also if headers are read late, as on a GPU."""
    check(ranks, event, shape, late)


# What the last rank does differently, as changes of its recipe or as options of `prepare`.
DIFFERENTLY: dict[str, Callable[[Net, dict[str, Any]], object]] = {
    "other weights": lambda net, options: net.recipe.pop(
        "blocks.0.*.weight" if dist.get_rank() else "blocks.1.*.weight"
    ),
    "fewer weights": lambda net, options: dist.get_rank() and net.recipe.popitem(),
    "another format": lambda net, options: dist.get_rank() and net.recipe.update({"blocks.1.*.weight": "fp8_current"}),
    "a frozen weight": lambda net, options: net.blocks[0][1].weight.requires_grad_(dist.get_rank() == 0),
    "verify_every": lambda net, options: dist.get_rank() and options.update(verify_every=1),
}


@pytest.mark.notices(
    "ranks, also those of other replicas, prepare different weights, other formats, or freeze other weights",
    where="FSDP2",
    answer="raises on all ranks, nothing changed",
)
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=str)
@on_ranks(2)
def test_ranks_prepare_different_weights(shape: tuple[int, int]) -> None:
    mesh = models.mesh(shape, ("replicate", "shard"))
    for differently in DIFFERENTLY.values():
        net, options = Net(FORMATS, WIDTH, 96), dict[str, Any]()
        differently(net, options)
        model = models.sharded(net, mesh=mesh, prepared=options)
        said = error_of(lambda model=model: models.forward(model, 0))
        assert said.startswith("ValueError: ")
        assert "rank 1" in said


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=str)
@on_ranks(2)
def test_one_rank_prepares_nothing(shape: tuple[int, int]) -> None:
    """A FusedAdamW tells it, since ranks compare what it steps."""
    mesh = models.mesh(shape, ("replicate", "shard"))
    model = models.sharded(Net(FORMATS, WIDTH, 96), mesh=mesh, prepare=dist.get_rank() == 0)
    assert "gathered as nvfp4" in error_of(lambda: FusedAdamW(model.parameters()))


def trained_where_one_rank_prepares(shape: tuple[int, int]) -> str:
    """Return the error of two steps of torch's optimizer, of which zerocast hears nothing on the rank that prepares nothing."""
    limit_collectives(TIMEOUT)
    mesh = models.mesh(shape, ("replicate", "shard"))
    model = models.sharded(Net(FORMATS, WIDTH, 96), mesh=mesh, prepare=dist.get_rank() == 0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return error_of(lambda: models.train(model, optimizer, range(2), WIDTH))


@pytest.mark.notices(
    "`prepare` is called on some ranks and not on others, and an optimizer of torch trains",
    where="FSDP2",
    answer="FusedAdamW raises on all ranks; torch's fail in the first step, at the latest after the timeout of the group",
)
@pytest.mark.parametrize("shape", [models.slow((1, 2)), (2, 1)], ids=str)
def test_one_rank_prepares_nothing_for_torchs_optimizer(shape: tuple[int, int]) -> None:
    """Transports of collectives that do not match give an error, or end the process as gloo does."""
    pool = Pool(2)  # which this leaves broken
    try:
        errors = pool.run(trained_where_one_rank_prepares, shape)
    except RanksFailed as failure:
        errors = [str(failure)]
    finally:
        pool.close()
    assert all(errors)
    assert any("prepares a model" in error or "the process died" in error for error in errors)
