"""add_param_group of ZeroAdamW and ZeroMuon: the bits of one process whose parameters are added at the same step, and torch's AdamW
within its own differences; what follows masters follows added ones; what is refused, with nothing changed."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerocast
from tests import casts
from tests.optim import test_muon
from tests.optim.probe import BF16
from tests.optim.runs import (
    ADAM,
    DETERMINISTIC,
    EIGHT_BIT_MOMENTS,
    Compared,
    Run,
    Trainer,
    assert_equals,
    boxes,
    rank,
    refused,
    repeated,
    snapshot,
)
from tests.optim.undistributed import UndistributedMuon
from tests.selection import some, worlds
from tests.workers import Ranks, error_of, on_ranks
from zerocast import ZeroConfig, ZeroMuon, optim, verify
from zerocast.optim import EMA

# Parameters that are added before these steps, each time one group.
ADDED_BEFORE = {2: ("nv", "delayed", "fp16", "norm"), 4: ("embedding", "nv_late", "bias")}
# The third and fourth group, of other hyperparameters than the first two.
ADDED_OPTIONS = ({**ADAM, "lr": 5e-3, "betas": (0.7, 0.9)}, {**ADAM, "weight_decay": 0.0})
MUON_ADDED_OPTIONS = ({**test_muon.MUON, "lr": 5e-3}, {**ADAM, "use_muon": False})
MUON_ADDED = {2: ("nv", "delayed"), 4: ("embedding", "mx")}
MUON_NAMES = ("embedding", "norm", "cut", "delayed", "mx", "nv", "stack")
MUON_RUN = dataclasses.replace(test_muon.RUN, specs=tuple(spec for spec in test_muon.SPECS if spec.name in MUON_NAMES))
CONFIGS: dict[str, Run] = {
    "plain": Run(),
    "clipped, stage 1": Run(stage=1, max_norm=0.1, accumulate=2, no_sync=False),
    "accumulated": Run(accumulate=2, max_norm=0.1, config=dataclasses.replace(DETERMINISTIC, bucket_size=1)),
    "overlap": Run(config=dataclasses.replace(DETERMINISTIC, overlap_all_gather=True, keep_columnwise=True)),
    "fp8 wire": Run(config=ZeroConfig(bucket_size=4096, grad_wire="fp8_1x128")),
    "moments in bf16": Run(config=dataclasses.replace(DETERMINISTIC, moment_dtype=BF16)),
    "moments in 8 bits": Run(config=EIGHT_BIT_MOMENTS, max_norm=1.0),
    "Muon": MUON_RUN,
    "Muon in 8 bits": dataclasses.replace(MUON_RUN, config=EIGHT_BIT_MOMENTS, max_norm=0.1),
}


class Growing(Compared):
    """A run whose optimizer is given some parameters later, as its reference is."""

    def __init__(self, run: Run = CONFIGS["plain"]) -> None:
        self.is_muon = run.optimizer is ZeroMuon
        self.added_before = MUON_ADDED if self.is_muon else ADDED_BEFORE
        late = [name for names in self.added_before.values() for name in names]
        super().__init__(dataclasses.replace(run, frozen=tuple(late)))

    def add(self) -> None:
        """Add the group that is next in `added_before`, with its options."""
        added = len(self.options_of_added)
        names = list(self.added_before.values())[added]
        options = (MUON_ADDED_OPTIONS if self.is_muon else ADDED_OPTIONS)[added]
        params = [(name, self.probe.get_parameter(name).requires_grad_(True)) for name in names]
        self.optimizer.add_param_group({"params": params, **options})
        number = len(self.run.options) + added
        if isinstance(self.reference, UndistributedMuon) and options["use_muon"]:
            self.reference.muon_groups.add(number)
        self.reference.add(dataclasses.replace(s, group=number) for s in self.run.specs if s.name in names)
        self.options_of_added.append(options)

    def train_step(self, step: int) -> None:
        if step in self.added_before:
            self.add()
            self.check(f"added before step {step}")
        self.go_on(step)

    def check(self, what: str) -> None:
        # A compact state holds codes, and the reference values.
        if self.run.config.state == "fp32":
            super().check(what)


def grow(run: Run, steps: int = 6) -> Growing:
    trainer = Growing(run)
    for step in range(steps):
        trainer.train_step(step)
    verify(trainer.optimizer).raise_for_differences()
    return trainer


@pytest.mark.parametrize("run", some(CONFIGS, "clipped, stage 1", "moments in 8 bits", "Muon"))
@on_ranks(*worlds(3, slow=(1, 2)))
def test_bits_of_one_process(run: Run) -> None:
    """Masters, moments, step counts and bytes are the reference's after each addition and each step."""
    assert len(grow(run).optimizer.param_groups) == 4


# -- what follows masters


def save_grown(run: Run, folder: str) -> None:
    optim.save(grow(run, steps=5).optimizer, folder)


def resume(run: Run, folder: str, ranks: int, adds: bool) -> None:
    """Load what so many ranks have saved, by an optimizer that adds the groups first, or has all of them from the beginning, and
    take another step.
    """
    growing = Growing(run)
    for step in range(5):
        if step in growing.added_before:
            growing.add()
        growing.follow(step, ranks)
    trainer: Trainer = growing
    if not adds:
        specs = tuple(growing.reference.specs.values())
        options = (*run.options, *growing.options_of_added)
        trainer = Trainer(dataclasses.replace(run, specs=specs, options=options))
    optim.load(trainer.optimizer, folder)
    assert_equals(trainer, growing.reference, "loaded")
    trainer.step(5)
    growing.follow(5)
    assert_equals(trainer, growing.reference, "a step later")
    verify(trainer.optimizer).raise_for_differences()


CHECKPOINTS = {
    "plain": (Run(), "fp32"),
    "moments in 8 bits": (Run(config=EIGHT_BIT_MOMENTS), "fp32"),
    "compact": (Run(config=EIGHT_BIT_MOMENTS), "compact"),
    "Muon": (MUON_RUN, "fp32"),
    "Muon, compact": (dataclasses.replace(MUON_RUN, config=EIGHT_BIT_MOMENTS), "compact"),
}


@pytest.mark.parametrize("case", some(CHECKPOINTS, "plain", "Muon, compact"))
def test_resumes_on_other_ranks(ranks: Ranks, tmp_path: Any, case: tuple[Run, Any]) -> None:
    (run, state), folder = case, str(tmp_path / "checkpoint")
    ranks(2)(save_grown, dataclasses.replace(run, config=dataclasses.replace(run.config, state=state)), folder)
    for count, adds in ((1, True), (3, False)):
        ranks(count)(resume, run, folder, 2, adds)


def test_parameters_that_were_added_need_a_group_of_their_own(tmp_path: Any) -> None:
    trainer = grow(Run(), steps=5)
    optim.save(trainer.optimizer, tmp_path / "checkpoint")
    other = Trainer(Run())
    error = refused(other, lambda: optim.load(other.optimizer, tmp_path / "checkpoint"))
    assert "one step count is needed for all parameters of a group" in error


@pytest.mark.parametrize("config", ["plain", "Muon"])
@on_ranks(0, 2)
def test_averages(config: str) -> None:
    """The average of an added parameter begins at its master, and those of the others go on."""
    trainer = Growing(CONFIGS[config])
    average = EMA(trainer.optimizer, 0.5)
    wanted: dict[str, Tensor] = {}
    for step in range(6):
        trainer.train_step(step)
        for name, master in trainer.reference.master.items():
            now = torch.from_numpy(master.copy())
            before = wanted.get(name, torch.from_numpy(trainer.reference.specs[name].initial().numpy()))
            wanted[name] = torch.lerp(before, now, 0.5)
        found = average.state_dict()["model"]
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            for where, part in boxes(value):
                assert torch.equal(part, wanted[name][where]), f"{name} after step {step}"
    with average.swapped():
        verify(trainer.optimizer).raise_for_differences()
    trainer.check("after the swap")


@pytest.mark.parametrize("config", [DETERMINISTIC, EIGHT_BIT_MOMENTS], ids=["FP32", "8 bits"])
def test_captured_steps_are_captured_again(config: ZeroConfig) -> None:
    with repeated():
        captured, eager = (Growing(Run(config=config)) for _ in range(2))
        step = captured.optimizer.capture(0.5)
        with mock.patch.object(step, "capture", wraps=step.capture) as recorded:
            for number in range(6):
                for each in (captured, eager):
                    if number in ADDED_BEFORE:
                        each.add()
                    each.backward(number)
                step()
                eager.optimizer.clip_grad_norm_(0.5)
                eager.optimizer.step()
                casts.assert_same_bytes(snapshot(captured), snapshot(eager), f"step {number}")
            assert recorded.call_count == 2
            captured.optimizer.zero_grad()
            older = Growing(Run(config=config))
            older.add()
            older.add()
            captured.optimizer.load_state_dict(older.optimizer.state_dict())
            assert recorded.call_count == 3


# -- what it looks like to users


def test_groups_of_frozen_parameters() -> None:
    """Groups of frozen parameters keep the caller's numbers, as in the constructor."""
    trainer = Trainer(Run())
    parameter = nn.Parameter(torch.zeros(3), requires_grad=False)
    trainer.optimizer.add_param_group({"params": [("late", parameter)]})
    assert len(trainer.optimizer.param_groups) == 3
    assert trainer.optimizer.frozen["late"] is parameter
    trainer.step(0)
    parameter.requires_grad_(True)
    assert "were frozen" in error_of(lambda: trainer.step(1))


# -- what is refused


LATE_PARAMETER = ("late", nn.Parameter(torch.zeros(3)))
BAD_GROUPS: Mapping[str, tuple[Callable[[Trainer], Mapping[str, Any]], str]] = {
    "no name": (lambda _: {"params": [LATE_PARAMETER[1]]}, "parameters must have names"),
    "a name twice": (lambda _: {"params": [("nv", LATE_PARAMETER[1])]}, "two parameters have the same name"),
    "a parameter twice": (
        lambda trainer: {"params": [("late", trainer.probe.get_parameter("nv"))]},
        "appear in more than one parameter group",
    ),
    "attached": (lambda _: {"params": [("late", attached())]}, "writes weights that a ZeroAdamW is built over"),
}
_attached: list[Any] = []


def attached() -> nn.Parameter:
    """Return a weight whose plan is attached to an optimizer of masters, which are all on rank 0."""
    holder = nn.Linear(32, 32, bias=False)
    zerocast.quantize_(holder, {"weight": "nvfp4"})
    is_owner = rank() == 0
    master = nn.Parameter(holder.weight.dequantize().view(-1) if is_owner else torch.zeros(0))
    plan = zerocast.CastPlan([holder.weight], [master], [0 if is_owner else None])
    optimizer = torch.optim.SGD([master])
    plan.attach(optimizer)
    _attached.append(optimizer)
    return holder.weight


@pytest.mark.parametrize("case", BAD_GROUPS)
@on_ranks(0, 2)
def test_groups_that_cannot_be(case: str, world: int) -> None:
    """One rank adds an impossible group, and the others a valid one: nothing changes, and a valid
    group can be added later.
    """
    kind = {"no name": "TypeError", "attached": "RuntimeError"}.get(case, "ValueError")
    trainer = Compared()
    groups = [dict(group) for group in trainer.optimizer.param_groups]
    proper = nn.Parameter(torch.zeros(3))
    make, said = BAD_GROUPS[case]
    bad = make(trainer)
    group = bad if trainer.rank == max(0, world - 1) else {"params": [("late", proper)]}
    error = error_of(lambda: trainer.optimizer.add_param_group(dict(group)))
    assert [{**group} for group in trainer.optimizer.param_groups] == groups
    trainer.go_on(0)
    trainer.optimizer.add_param_group({"params": [("late", proper)]})
    assert error.startswith(f"{kind}: rank 1: " if world else f"{kind}: ")
    assert said in error


@on_ranks(2)
def test_ranks_that_add_others() -> None:
    trainer = Compared()
    late = [("late", nn.Parameter(torch.zeros(3)))]
    for other, said in (
        ({"params": late, "lr": 0.5}, "lr of group 2 is 0.25 on rank 0 and 0.5"),
        ({"params": []}, "rank 0 passes 1 weights and rank 1 0"),
    ):
        group = other if trainer.rank else {"params": late, "lr": 0.25}
        error = error_of(lambda group=group: trainer.optimizer.add_param_group(dict(group)))
        assert error.startswith("ValueError: ") and said in error
        assert len(trainer.optimizer.param_groups) == 2
    trainer.go_on(0)


def test_a_group_of_muon_says_what_updates_it() -> None:
    trainer = Growing(MUON_RUN)
    late = ("late", nn.Parameter(torch.zeros(3)))
    error = error_of(lambda: trainer.optimizer.add_param_group({"params": [late]}))
    assert error.startswith("ValueError: parameter group 2 of a ZeroMuon has use_muon=None")
    error = error_of(lambda: trainer.optimizer.add_param_group({"params": [late], "use_muon": True}))
    assert error.startswith("ValueError: late of shape (3,) is in a group with use_muon=True")
    assert len(trainer.optimizer.param_groups) == 2
