"""Masters of FSDP2 that become NaN or Inf on one rank: all ranks are told at the next cast or look at the state, once."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import FEW, Net
from tests.workers import error_of, on_ranks
from zerocast import VerificationError, fsdp2, verify
from zerocast.fsdp2 import TrainingState

VALUES = (float("nan"), float("inf"), -float("inf"))
WHAT = ("gradient", "master")
THEN = ("another step", "an evaluation", "the state", "the state at once")
TOLD = f"InvalidWeights: the masters of {len(FEW)} weights were NaN or Inf in the last cast: blocks.0.1.weight, "


class Run:
    """A model with two weights of each format and its optimizer; the first weight of each block is poisoned."""

    def __init__(self, optimizer: str, keep_codes: bool) -> None:
        self.model = models.sharded(Net(FEW, 64, 96), keep_codes=keep_codes)
        self.optimizer = models.OPTIMIZERS[optimizer](self.model)
        self.state = TrainingState(self.model, self.optimizer)

    def forward(self) -> None:
        models.forward(self.model, 1)

    def step(self, what: str = "", value: float = 0.0, culprit: int = -1) -> None:
        """A step, with one element of a gradient or a master of one rank that is `value`."""
        self.model(models.batch(0, 64)).float().square().mean().backward()
        for name, (parameter, _) in models.masters(self.model).items():
            if what and name.endswith(".1.weight") and dist.get_rank() == culprit:
                poisoned = parameter.grad if what == "gradient" else parameter
                with torch.no_grad():
                    poisoned.to_local()[-1, 3] = value
        self.optimizer.step()
        self.optimizer.zero_grad()

    def repair(self) -> None:
        """All masters are finite again, and moments are forgotten."""
        with torch.no_grad():
            for parameter in models.held(self.model):
                parameter.to_local().nan_to_num_(0.0, 0.0, 0.0)
        self.optimizer.state.clear()
        fsdp2.refresh(self.model)

    def told(self, then: str) -> str:
        """The error of what comes after a step with a master that is not finite."""
        if then == "the state at once":
            return error_of(self.state.state_dict)
        if then == "the state":
            self.model(models.batch(0, 64))  # gathers
            return error_of(self.state.state_dict)
        if then == "another step":
            self.step()
        return error_of(self.forward)


@pytest.mark.notices(
    "a master becomes NaN or Inf, by its gradient or by hand",
    where="FSDP2",
    answer="raises on all ranks at the next cast, evaluation or read of the state, names the weights",
)
@pytest.mark.parametrize(
    ("optimizer", "keep_codes"),
    [
        ("AdamW", False),
        models.slow("FusedAdamW", False),
        ("FusedAdamW", True),
        models.slow("8-bit moments", False),
        models.slow("8-bit moments", True),
    ],
)
@on_ranks(2)
def test_all_ranks_are_told(optimizer: str, keep_codes: bool) -> None:
    """Each case is told of, once."""
    run = Run(optimizer, keep_codes)
    run.step()
    for number, (what, then) in enumerate(itertools.product(WHAT, THEN)):
        value = VALUES[number % len(VALUES)]
        run.step(what, value, 1)
        said = run.told(then)
        again = "" if then == "another step" else error_of(run.forward)  # of the same cast
        run.repair()
        again += error_of(run.forward)
        assert said.startswith(TOLD), (what, value, then)
        assert again == "", (what, value, then)


@on_ranks(2)
def test_a_load_and_verify_go_on() -> None:
    """A load is what mends it, and `verify` counts it; neither is refused."""
    run = Run("FusedAdamW", keep_codes=False)
    run.step()
    saved = {name: p.detach().full_tensor() for name, p in run.model.named_parameters()}
    run.step("master", VALUES[0], 1)
    report = verify(run.model, allow_nonfinite=True)
    run.step()
    state = run.state.state_to_overwrite()
    state["model"] = saved
    for moments in state["optim"]["state"].values():
        for moment in moments.values():
            getattr(moment, "_local_tensor", moment).nan_to_num_(0.0)
    loaded = error_of(lambda: run.state.load_state_dict(state))
    assert (loaded, report.ok, len(report.not_finite), [error_of(run.forward), error_of(run.step)]) == (
        "",
        True,
        len(FEW),
        ["", ""],
    )


# -- zerocast.verify every so many steps. What it finds: tests/hosts/test_verify.py


def kept_codes(model: Any, weight: Any) -> torch.Tensor:
    """The codes that this rank keeps of a weight and sends."""
    (group,) = models.manager(model).plan.cast_groups
    return group.kept_codes(weight.name).view(-1)


def _break_the_cast(model: Any) -> None:
    _, weight = models.masters(model)["blocks.1.3.weight"]
    plan = models.manager(model).plan
    launch = plan.launch

    def broken(**options: Any) -> None:
        launch(**options)
        kept_codes(model, weight)[0] ^= 1

    plan.launch = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(("every", "wanted"), [(1, [0, 0, 0, 1, 1, 1]), (2, [0, 0, 0, 1, 0, 1])])
@on_ranks(2)
def test_verify_every(every: int, wanted: list[int]) -> None:
    net = Net(("nvfp4", models.DELAYED), 64, 96)
    model = models.sharded(net, prepared={"verify_every": every}, keep_codes=True)
    optimizer, raised = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(6):
        if step == 3 and dist.get_rank() == 1:
            _break_the_cast(model)
        try:
            models.train(model, optimizer, range(step, step + 1), 64)
        except VerificationError as error:
            raised.append("blocks.1.3.weight" in str(error))
            models.train(model, optimizer, range(step, step + 1), 64)  # says it once a cast
        else:
            raised.append(False)
    assert raised == [bool(value) for value in wanted]


def test_every_is_checked() -> None:
    with pytest.raises(ValueError, match="verify_every is None or at least 1, got 0"):
        zerocast.fsdp2.prepare(nn.Linear(32, 32), zerocast.Recipe({"weight": "nvfp4"}), verify_every=0)
