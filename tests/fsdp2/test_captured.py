"""Captured steps of FusedAdamW: the masters and bytes of ordinary ones, and what is refused. On the
CPU a function that runs again plays the graph; NCCL and CUDA: tests/nccl/test_captured.py.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import DELAYED, EACH, Net, digests
from tests.fsdp2.test_fused_adamw import HIDDEN, WIDTH, put_gradients
from tests.observed import NewStorages
from tests.workers import Ranks, error_of, on_ranks
from zerocast.cast.captured_step import CapturedStep, Work, cuda_graph
from zerocast.fsdp2 import FusedAdamW
from zerocast.fsdp2.fused_adamw import CapturableFusedStep
from zerocast.fsdp2.master_memory import MasterAddresses

ORDINARY, WRITTEN = 3, 4  # a step that both take with step(); one before which masters are written


class Trainee:
    """A model whose optimizer takes captured steps, or ordinary ones."""

    def __init__(
        self,
        captured: bool,
        formats: tuple[str, ...] = EACH,
        keep_codes: bool = False,
        moment_dtype: torch.dtype | Literal["8bit"] = torch.float32,
    ) -> None:
        self.model = models.sharded(Net(formats, WIDTH, HIDDEN), keep_codes=keep_codes)
        self.optimizer: Any = FusedAdamW(self.model.named_parameters(), lr=1e-2, moment_dtype=moment_dtype)
        self.recorded: list[Work] = []
        self.kept: list[str] = []  # of what was allocated for a graph
        self.captured: Any = None
        if captured:
            self.capture()

    def capture(self) -> None:
        """Capture the step as a graph, or on the CPU as something that acts like one."""
        on_cpu = models.place() == "cpu"
        self.captured = CapturedStep(CapturableFusedStep(self.optimizer)) if on_cpu else self.optimizer.capture()
        self.captured._record = self._record

    def _record(self, work: Work) -> Work:
        """Stand in for a CUDA graph where there is none. Recording launches nothing there either."""
        self.recorded.append(work)

        def watched() -> None:
            with NewStorages() as made:
                work()
            self.kept += [f"{name} outlives a graph" for name in made.kept()]

        return watched if models.place() == "cpu" else cuda_graph(watched)

    def step(self, number: int, change: "Callable[[Trainee], None] | None" = None) -> None:
        """Take a step after a change. Each step has other gradients and another learning rate."""
        self.optimizer.param_groups[0]["lr"] *= 0.7
        if number == WRITTEN:
            with torch.no_grad():
                torch._foreach_mul_([p for p, _ in models.masters(self.model).values()], 0.5)
        if change is not None:
            self.optimizer.zero_grad()
        if change is not None and change not in OF_GRADIENTS:
            change(self)
        put_gradients(self.model, number)
        if change in OF_GRADIENTS:
            change(self)
        if self.captured is None or number == ORDINARY:
            self.optimizer.step()
        else:
            self.captured()


def compared(
    keep_codes: bool,
    formats: tuple[str, ...] = EACH,
    moment_dtype: torch.dtype | Literal["8bit"] = torch.float32,
) -> list[str]:
    """Return how a captured run differs from an ordinary one, and its bytes from its masters."""
    ordinary, captured = (Trainee(captured, formats, keep_codes, moment_dtype) for captured in (False, True))
    found, addresses = [], set()
    for number in range(6):
        held = []
        for trainee in (ordinary, captured):
            trainee.step(number)
            found += models.complaints(trainee.model, f"step {number}")
            groups = models.manager(trainee.model).plan.cast_groups
            addresses.add((trainee is captured, *(group._scales.untyped_storage().data_ptr() for group in groups)))
            held.append(digests(zerocast.fsdp2.TrainingState(trainee.model, trainee.optimizer).state_dict()))
        found += [f"{name} after step {number}" for name in held[0] if held[0][name] != held[1][name]]
    cast_numbers = {models.manager(trainee.model).plan.cast_number for trainee in (ordinary, captured)}
    kept = sum(any(pointers) for is_captured, *pointers in addresses if is_captured)
    return [*found, *captured.kept, f"{len(captured.recorded)} graphs, casts {cast_numbers}, works at {kept} addresses"]


@pytest.mark.parametrize(
    ("world", "keep_codes", "moment_dtype"),
    [
        (1, True, torch.float32),
        (1, False, "8bit"),
        models.slow(1, False, torch.float32),
        models.slow(1, True, "8bit"),
        *(models.slow(3, keep_codes, dtype) for keep_codes in (False, True) for dtype in (torch.float32, "8bit")),
    ],
    ids=str,
)
def test_replaying_equals_stepping(ranks: Ranks, world: int, keep_codes: bool, moment_dtype: Any) -> None:
    """Replays equal steps, also if the step writes the codes of block rows that no rank cuts."""
    expected = ["1 graphs, casts {6}, works at 1 addresses"]
    assert ranks(world)(compared, keep_codes, EACH, moment_dtype) == [expected] * world


def switched(trainee: Trainee) -> None:
    zerocast.switch(trainee.model, zerocast.Recipe({"*.weight": "fp8_block"}))


def loaded(trainee: Trainee) -> None:
    trainee.optimizer.load_state_dict(trainee.optimizer.state_dict())


def grown(trainee: Trainee) -> None:
    other = nn.Parameter(torch.ones(4, device=models.place()))
    other.grad = torch.ones_like(other)
    trainee.optimizer.add_param_group({"params": [("other", other)]})


def without_a_gradient(trainee: Trainee) -> None:
    next(trainee.model.parameters()).grad = None


def other_moments(trainee: Trainee) -> None:
    """Replace the step counts on this rank alone. A load is a call of all ranks."""
    for moments in trainee.optimizer.state.values():
        moments["step"] = moments["step"].clone()


def without_gradients(trainee: Trainee) -> None:
    trainee.optimizer.zero_grad()


OF_GRADIENTS = (without_a_gradient, without_gradients)
CHANGES: tuple[Callable[[Trainee], None], ...] = (switched, loaded, grown, *OF_GRADIENTS)
OF_ONE_RANK = (other_moments, *OF_GRADIENTS)


def after_changes(changes: tuple[Callable[[Trainee], None], ...] = CHANGES, culprits: Any = None) -> list[Any]:
    """Return how a captured run differs from an ordinary one after each change on these ranks, and the number
    of graphs.
    """
    found: list[Any] = []
    for change in changes:
        ordinary, captured = (
            Trainee(captured, ("nvfp4", DELAYED), moment_dtype="8bit" if culprits else torch.float32)
            for captured in (False, True)
        )
        for number in range(6):
            is_changed = number == 2 and (culprits is None or dist.get_rank() in culprits)
            held = []
            for trainee in (ordinary, captured):
                trainee.step(number, change if is_changed else None)
                found += models.complaints(trainee.model, f"{change.__name__}, step {number}")
                held.append({name: p.full_tensor() for name, (p, _) in models.masters(trainee.model).items()})
            differing = [name for name, master in held[0].items() if not torch.equal(master, held[1][name])]
            found += [f"{change.__name__}: {name}, step {number}" for name in differing]
        found += [*captured.kept, len(captured.recorded)]
    return found


def test_what_has_changed_is_recorded_again(ranks: Ranks) -> None:
    assert ranks(1)(after_changes) == [[2] * len(CHANGES)]


def test_what_has_changed_on_one_rank(ranks: Ranks) -> None:
    """The other rank replays its only graph while rank 1 records another."""
    assert ranks(2)(after_changes, OF_ONE_RANK, [1]) == [[1, 1, 1], [2, 2, 2]]


def masters_gone(trainee: Trainee) -> Any:
    return mock.patch.object(MasterAddresses, "check_memory", side_effect=ValueError("their memory is gone"))


def rate_out_of_range(trainee: Trainee) -> Any:
    return mock.patch.dict(trainee.optimizer.param_groups[0], lr=float("nan"))


def other_codes(trainee: Trainee) -> Any:
    moments = next(iter(trainee.optimizer.state.values()))
    return mock.patch.dict(moments, exp_avg=moments["exp_avg"].clone())


@pytest.mark.notices(
    "one rank cannot take a captured step",
    where="FSDP2",
    answer="raises on all ranks at the next forward pass, and a load is needed",
)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("what", [masters_gone, rate_out_of_range, other_codes])
@on_ranks(2)
def test_a_rank_that_cannot_step(what: Callable[[Trainee], Any], times: int) -> None:
    """All ranks raise at the next forward pass, also after another captured step, for which rank 1 gives the reason."""
    trainee = Trainee(captured=True, formats=("nvfp4", DELAYED), moment_dtype="8bit")
    for number in range(3):
        trainee.step(number)
    state = zerocast.fsdp2.TrainingState(trainee.model, trainee.optimizer)
    saved = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), state.state_dict())
    said = []
    for _ in range(times):
        put_gradients(trainee.model, 3)
        with what(trainee) if dist.get_rank() == 1 else contextlib.nullcontext():
            said.append(error_of(trainee.captured))
    assert "failed partway" in error_of(lambda: models.forward(trainee.model, 0, WIDTH))
    assert [bool(error) for error in said[1:]] == [dist.get_rank() == 1] * (times - 1)
    trainee.optimizer.zero_grad()
    state.load_state_dict(saved)
    for number in (5, 6):
        trainee.step(number)
    models.check(trainee.model, "loaded")


@on_ranks(1)
def test_tables_live_as_long_as_a_graph() -> None:
    trainee = Trainee(captured=False, formats=("nvfp4", DELAYED))
    named = dict(trainee.model.named_parameters())
    trainee.optimizer = FusedAdamW([p for name, p in named.items() if "blocks.0" in name], lr=1e-2)
    trainee.capture()
    put_gradients(trainee.model, 0)
    FusedAdamW([p for name, p in named.items() if "blocks.1" in name]).step()
    for number in range(2):
        trainee.step(number)
    manager = models.manager(trainee.model)
    (group,) = manager.plan.cast_groups
    read = [weakref.ref(table) for names, tables in group._tables_without.held.items() if names for table in tables]
    weights = [parameter for parameter in named.values() if parameter.dim() == 2]
    for chosen in range(1, 2 ** len(weights)):
        FusedAdamW([weight for i, weight in enumerate(weights) if chosen >> i & 1]).step()
        manager.before_gather()
    assert (trainee.kept, len(read), sum(table() is not None for table in read)) == ([], 1, 1)


@on_ranks(1)
def test_not_within_a_backward_pass() -> None:
    trainee = Trainee(captured=True, formats=("nvfp4",))
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda gradient: trainee.captured())
    assert "RuntimeError: a captured step runs within a backward pass" in error_of((leaf * 2).backward)


def test_only_on_a_cuda_device() -> None:
    optimizer = FusedAdamW([nn.Parameter(torch.ones(4))])
    with pytest.raises(RuntimeError, match="parameters are on cpu"):
        optimizer.capture()
