"""Ranks whose casts meet those of another call: all of them say so, without debug mode and without a collective more."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocast
from tests.workers import Ranks, error_of, on_ranks
from zerocast import CastPlan, QuantizedWeight, Recipe, ZeroAdamW
from zerocast.cast import plan
from zerocast.distributed.group import ONE_PROCESS, Group
from zerocast.distributed.rank_report import DIGESTS, CastReports

LR = 1e-2


@pytest.mark.notices(
    "ranks cast the plans of one group in different orders", where="CastPlan", answer="raises on all ranks"
)
@on_ranks(2, 3)
def test_plans_in_another_order(world: int) -> None:
    """Ranks that cast two plans in another order are told so, a read raises, and later casts in the same order work."""
    plan._built.clear()  # the numbers of plans, and so digests, are those of every run
    rank = dist.get_rank()
    weights = [QuantizedWeight.empty((32, 32), "nvfp4") for _ in range(2)]
    part = 32 * 32 // world
    plans = [CastPlan([weight], [torch.randn(part)], [rank * part]) for weight in weights]
    first = plans[::-1] if rank else plans
    with pytest.raises(RuntimeError, match="ranks make different calls: rank 0 casts by plan "):
        first[0].cast()
    with pytest.raises(RuntimeError, match="cast again"):
        first[0].weights[0].dequantize()
    for each in (*plans, *plans):
        each.cast()
    assert not any(each.validity.partial for each in plans)


class Trained:
    """A small model on this rank, with an optimizer."""

    def __init__(self) -> None:
        plan._built.clear()
        torch.manual_seed(0)
        place = "cuda" if dist.get_backend() == "nccl" else "cpu"
        self.model = nn.Sequential(nn.Linear(32, 64, dtype=torch.bfloat16), nn.Linear(64, 32, dtype=torch.bfloat16)).to(
            place
        )
        zerocast.quantize_(self.model, Recipe({"*.weight": "nvfp4"}))
        self.optimizer = ZeroAdamW(self.model.named_parameters(), lr=LR)
        self.place = place

    def backward(self) -> None:
        x: Tensor = torch.ones(4, 32, dtype=torch.bfloat16, device=self.place)
        self.model(x).float().square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def verify(self) -> None:
        zerocast.verify(self.optimizer)


def clips_alone(trained: Trained) -> None:
    trained.backward()
    trained.optimizer.clip_grad_norm_(1.0) if dist.get_rank() == 1 else trained.optimizer._reduced_square_sum()


def clips_to_another_norm(trained: Trained) -> None:
    trained.backward()
    trained.optimizer.clip_grad_norm_(1.0 + dist.get_rank())


def schedules_alone(trained: Trained) -> None:
    trained.backward()
    for group in trained.optimizer.param_groups:
        group["lr"] = LR / (1 + dist.get_rank())


def is_of_another_step(trained: Trained) -> None:
    """Set another step number on each rank, as after a load of files that differ."""
    trained.backward()
    trained.optimizer._caller.number += dist.get_rank()


def changes_gradients_alone(trained: Trained) -> None:
    trained.backward()
    if dist.get_rank() == 1:
        torch.nn.utils.clip_grad_value_(trained.model.parameters(), 1e-3)


def takes_gradients_off_alone(trained: Trained) -> None:
    trained.backward()
    if dist.get_rank() == 1:
        trained.model.zero_grad()


MISTAKES: dict[str, Callable[[Trained], None]] = {
    mistake.__name__: mistake
    for mistake in (
        clips_alone,
        clips_to_another_norm,
        schedules_alone,
        is_of_another_step,
        changes_gradients_alone,
        takes_gradients_off_alone,
    )
}
TOLD = {
    "clips_alone": ("with lr 0.01, ", "clipped to 1 with lr 0.01, "),
    "clips_to_another_norm": ("clipped to 1 with", "clipped to 2 with"),
    "schedules_alone": ("with lr 0.01, ", "with lr 0.005, "),
    "changes_gradients_alone": ("with lr 0.01, ", "after 4 changes of gradients, with lr 0.01, "),
    "takes_gradients_off_alone": ("with lr 0.01, ", "after 4 changes of gradients, with lr 0.01, "),
    "is_of_another_step": ("in step 3 of ZeroAdamW", "in step 4 of ZeroAdamW"),
}


def out_of_step(mistake: str, late: bool) -> tuple[str, list[str], bool]:
    """Make a mistake after two good steps. Return its error, those of later calls, and whether a load repairs it."""
    trained = Trained()
    for _ in range(2):
        trained.step()
    state = {name: copied(value) for name, value in trained.optimizer.state_dict().items()}
    MISTAKES[mistake](trained)
    if late:
        _travels(trained)
        trained.optimizer.step()
    with pytest.raises(RuntimeError) as caught:
        trained.optimizer.step()
    said = []
    for go_on in (trained.optimizer.step, trained.step, trained.optimizer.state_dict):
        with pytest.raises(RuntimeError) as refused:
            go_on()
        said.append(str(refused.value))
    trained.optimizer.load_state_dict(state)
    for group in trained.optimizer.param_groups:
        group["lr"] = LR
    for _ in range(3):
        trained.step()
    return str(caught.value), said, bool(trained.optimizer._weights.driver.plan.validity.partial)


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return (
        value.clone()
        if type(value) is Tensor
        else type(value).from_flat(value.flat.clone(), value.span, tuple(value.shape))
    )


def check(found: list[tuple[str, list[str], bool]], mistake: str) -> None:
    for told, said, partial in found:
        rank_0, rank_1 = told.split("rank 1 ")
        assert "ranks make different calls: rank 0 casts by plan " in rank_0
        for part, expected in zip((rank_0, rank_1), TOLD[mistake], strict=True):
            assert expected in part, told
        assert all("failed partway: masters, moments and weights may be of different steps" in text for text in said), (
            said
        )
        assert not partial


def _travels(trained: Trained) -> None:
    """Read the numbers just before the next step, on a CPU too."""
    trained.optimizer._weights.driver.plan.amaxes.reports.reads_late = True


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.notices(
    "ranks have different learning rates or steps, or clip, change or remove gradients differently",
    where="ZeroAdamW",
    answer="raises on all ranks",
)
def test_out_of_step(ranks: Ranks, mistake: str, late: bool) -> None:
    check(ranks(2)(out_of_step, mistake, late), mistake)


def one_rank_cannot_cast(late: bool) -> list[str]:
    """Return the errors of a cast while no cast takes a master of rank 1, and of casts after it is restored."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = 32 * 32 // world
    master = torch.randn(part)
    plan = CastPlan([QuantizedWeight.empty((32, 32), "nvfp4")], [master], [rank * part])
    plan.amaxes.reports.reads_late = late
    plan.cast()
    before = master.data
    if rank == 1:
        master.data = before.double()
    told = [error_of(plan.cast)]
    master.data = before
    told += [error_of(plan.cast), error_of(plan.cast)]
    return [*told, str(plan.validity.partial)]


@pytest.mark.parametrize("late", [False, True])
def test_one_rank_cannot_cast(ranks: Ranks, late: bool) -> None:
    """All ranks raise. On a GPU the rank raises alone, and all at the next cast."""
    problem = "weight 0 (nvfp4 (32, 32) torch.bfloat16): the master is torch.float64"
    for rank, told in enumerate(ranks(3)(one_rank_cannot_cast, late)):
        if late:
            at_first = told.pop(0)
            assert at_first.startswith(f"TypeError: {problem}") if rank == 1 else at_first == ""
        assert told[0].startswith(f"TypeError: rank 1: {problem}")
        assert told[1:] == [""] * (1 if late else 2) + ["None"]


@pytest.mark.parametrize(("writers", "late"), [((1,), False), ((1,), True), ((0, 1), False)])
@pytest.mark.parametrize("then", ["step", "verify"])
@on_ranks(2)
def test_a_step_for_which_ranks_are_not_ready(writers: tuple[int, ...], late: bool, then: str) -> None:
    """Other code has written a parameter: all ranks raise without waiting, and nothing changes if none was
    ready. On a GPU the others are told by their next backward pass, whose reductions wait for all ranks.
    """
    trained = Trained()
    trained.step()
    state = {name: copied(value) for name, value in trained.optimizer.state_dict().items()}
    trained.backward()
    if late:
        _travels(trained)
    if dist.get_rank() in writers:
        with torch.no_grad():
            trained.model[0].bias.add_(1)
    told = error_of(trained.optimizer.step) or error_of(getattr(trained, then))
    partial = trained.optimizer._driver.plan.validity.partial is not None
    trained.optimizer.load_state_dict(state)
    assert told.startswith("RuntimeError: rank 1: " if writers == (1,) else "RuntimeError: ")
    assert "written" in told
    assert partial == (writers == (1,))
    trained.step()


@on_ranks(2)
def test_every_digest_is_exact_in_bf16() -> None:
    slots = torch.zeros(2, dtype=torch.bfloat16)
    for digest in range(DIGESTS):
        torch.linspace(digest, -digest, 2, out=slots)
        assert slots.tolist() == [digest, -digest]
    reports = CastReports(Group.of(None), slots, [])
    for number in (*range(300), "differs", *range(300)):
        reports.announce(f"call {number} {dist.get_rank() if number == 'differs' else ''}")
        dist.all_reduce(slots, dist.ReduceOp.MAX)
        assert bool(error_of(reports.after_reduction)) == (number == "differs")


def test_a_call_is_announced_by_one_launch() -> None:
    """A step announces itself before its plan does so again; what was reduced is announced anew."""
    reports = CastReports(ONE_PROCESS, torch.zeros(2), [])
    with mock.patch("torch.linspace", wraps=torch.linspace) as launched:
        for _ in range(2):
            reports.announce("steps")
        assert launched.call_count == 1
        reports.announce("casts")
        assert launched.call_count == 2
        reports.after_reduction()
        reports.announce("casts")
        assert launched.call_count == 3
