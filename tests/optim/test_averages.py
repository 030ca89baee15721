"""An average of the masters: FP32 arithmetic on unsharded masters, the bytes cast from it, and nothing of it in the training."""

import copy
import inspect
import itertools
import sys
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import zerocast
from tests import casts
from tests.optim.faults import slow_gathers
from tests.optim.probe import PLAIN
from tests.optim.runs import (
    DETERMINISTIC,
    EIGHT_BIT_MOMENTS,
    OVERLAP,
    Compared,
    Repeated,
    Run,
    Trainer,
    boxes,
    weight_bytes,
)
from tests.selection import worlds
from tests.workers import error_of, on_ranks
from zerocast import ZeroAdamW, ZeroConfig
from zerocast.optim import EMA, ema
from zerocast.optim.device_step import CapturableZeroStep

SKIPPED = 2  # a step whose gradients are not finite


class Averaged(Compared):
    """A run with an average, beside torch's average of the unsharded masters."""

    def __init__(self, config: ZeroConfig = DETERMINISTIC) -> None:
        super().__init__(Run(config=config))
        self.ema = EMA(self.optimizer, decay=0.9)
        self.wanted = {name: torch.from_numpy(master.copy()) for name, master in self.reference.master.items()}

    def step(self, step: int) -> None:
        """Take a step of both. A skipped one changes nothing."""
        if step == SKIPPED:
            gradients = {spec.name: spec.gradient(step, self.rank) for spec in self.run.specs}
            (self.probe.loss(gradients) * float("nan")).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.reference.skipped += 1
            return
        super().step(step)
        self.follow(step)

    def follow(self, step: int, ranks: int | None = None) -> None:
        super().follow(step, ranks)
        names = list(self.wanted)
        masters = [torch.from_numpy(self.reference.master[name].copy()) for name in names]
        get_ema_multi_avg_fn(0.9)([self.wanted[name] for name in names], masters, step)

    def check(self, what: str) -> None:
        """Check that the average is torch's, to the bit, and that training is that of a run without one."""
        super().check(what)
        for name, found in self.ema.state_dict()["model"].items():
            for where, values in boxes(found):
                casts.assert_same_bytes(
                    {"f32": casts.raw(values)}, {"f32": casts.raw(self.wanted[name][where])}, f"{what}: {name}"
                )

    def check_swapped(self) -> None:
        """Check that live bytes are the unsharded cast of the average with their own scales, and that delayed
        scaling stays.
        """
        before = weight_bytes(self.probe)
        scales = {name: float(views["cast_scale"]) for name, views in self.optimizer.state_dict()["zerocast"].items()}
        with self.ema.swapped():
            swapped = weight_bytes(self.probe)
            for spec in self.run.specs:
                found, average = swapped[spec.name], self.wanted[spec.name].view(spec.shape)
                if spec.fmt == PLAIN:
                    wanted = {"rowwise_data": casts.raw(average.to(spec.dtype))}
                else:
                    wanted = casts.unsharded(spec.fmt, average, spec.dtype, scales.get(spec.name, 1.0))
                    wanted |= {key: before[spec.name][key] for key in ("scale", "amax_history") if key in found}
                casts.assert_same_bytes(found, wanted, f"rank {self.rank}: {spec.name}")
            assert zerocast.verify(self.optimizer).ok
        afterwards = weight_bytes(self.probe)
        for name, wanted in before.items():
            casts.assert_same_bytes(afterwards[name], wanted, f"afterwards: {name}")


@pytest.mark.parametrize(
    "config",
    [DETERMINISTIC, EIGHT_BIT_MOMENTS, pytest.param(OVERLAP, marks=pytest.mark.slow)],
    ids=["eager", "8-bit moments", "overlap"],
)
@on_ranks(*worlds(1, 2, slow=(3,)))
def test_bits_on_any_number_of_ranks(config):
    with slow_gathers():
        averaged = Averaged(config)
        averaged.check("at the start")
        for step in range(5):
            averaged.step(step)
            averaged.check(f"step {step}")
            if step in (1, 3):
                averaged.check_swapped()
                averaged.check(f"swapped after step {step}")


@pytest.mark.notices(
    "a step, load or save while an average is swapped in",
    where="ZeroAdamW",
    answer="raises on all ranks, nothing changed",
)
@on_ranks(0, 2)
def test_no_training_within_a_swap():
    """Calls that train, save or load within a swap raise and leave nothing behind."""
    averaged = Averaged()
    averaged.step(0)
    optimizer, ema = averaged.optimizer, averaged.ema
    state = ema.state_dict()
    averaged.backward(1)
    calls: list[Any] = [
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(optimizer.state_to_overwrite()),
        lambda: zerocast.optim.load_masters(optimizer, averaged.wanted),
        lambda: ema.swapped().__enter__(),
        lambda: EMA(optimizer).swapped().__enter__(),
        ema.state_dict,
        ema.reset,
        lambda: ema.load_state_dict(state),
        lambda: EMA(optimizer),
    ]
    with ema.swapped():
        for call in calls:
            with pytest.raises(RuntimeError, match="leave the context first"):
                call()
    optimizer.step()
    optimizer.zero_grad()
    averaged.follow(1)
    averaged.check("after the swap")


@pytest.mark.notices(
    "a backward pass through an average that is swapped in", where="ZeroAdamW", answer="raises on all ranks"
)
@on_ranks(0, 2)
def test_no_gradients_of_an_average():
    averaged = Averaged()
    averaged.step(0)
    with pytest.raises(RuntimeError, match=r"a backward pass within"), averaged.ema.swapped():
        averaged.backward(1)
    with pytest.raises(RuntimeError, match="zero_grad"):
        averaged.optimizer.step()
    averaged.optimizer.zero_grad()
    averaged.step(1)
    averaged.check("after zero_grad")


def interrupted(call: Any, at: int) -> bool:
    """Call with Ctrl-C at the beginning or end number `at` of the functions of a swap. Return False
    if there are fewer.
    """
    count = itertools.count(1)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_place = code.co_filename == ema.__file__ or code.co_name in ("transaction", "changed", "check_same_call")
        # An error as a generator yields would leave it without its `finally`, which Ctrl-C does not.
        is_end = event == "return" and not code.co_flags & inspect.CO_GENERATOR
        if is_place and (event == "call" or is_end) and next(count) == at:
            sys.setprofile(None)
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


@pytest.mark.notices(
    "Ctrl-C, or another exception, at any moment of a swap, or between a step and its average",
    where="ZeroAdamW",
    answer="the next step is right, or it raises until a state is loaded; the average misses no step",
)
def test_an_interrupted_swap():
    """An interrupted swap lets no step train from an average."""
    averaged = Averaged()
    averaged.step(0)
    optimizer = averaged.optimizer
    state, average = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(averaged.ema.state_dict())

    def evaluate() -> None:
        with averaged.ema.swapped():
            pass

    said = set()
    for at in itertools.count(1):
        if not interrupted(evaluate, at):
            break
        said.add(refused := error_of(optimizer.state_dict).partition(" failed partway")[0])
        if refused:
            assert all(
                " failed partway" in error_of(call) for call in (optimizer.step, averaged.ema.swapped().__enter__)
            )
            optimizer.load_state_dict(state)
            averaged.ema.load_state_dict(average)
        averaged.check(f"interrupted at place {at}")
    assert at > 20
    swaps = {f"InvalidWeights: swapping an average {way}" for way in ("in", "out")}
    assert said == {"", *swaps}


def test_a_step_that_is_interrupted_before_its_average():
    """Called again it would step with the same gradients."""
    averaged = Averaged()
    state, average = copy.deepcopy(averaged.optimizer.state_dict()), copy.deepcopy(averaged.ema.state_dict())
    averaged.backward(0)
    with mock.patch.object(ZeroAdamW, "_end_step", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        averaged.optimizer.step()
    assert "an optimizer step failed partway" in error_of(averaged.optimizer.step)
    averaged.optimizer.load_state_dict(state)
    averaged.ema.load_state_dict(average)
    averaged.optimizer.zero_grad()
    averaged.step(0)
    averaged.check("after a load")


def test_a_captured_step_that_is_interrupted_before_its_average():
    averaged = Averaged()
    optimizer = averaged.optimizer
    captured = Repeated(CapturableZeroStep(optimizer._parts, optimizer._prepare, optimizer._finish, None))
    averaged.backward(0)
    with mock.patch.object(ZeroAdamW, "_end_step", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        captured()
    averaged.optimizer.zero_grad()
    averaged.follow(0, ranks=1)
    averaged.step(1)
    averaged.check("a step later")


def resumed(folder: str) -> None:
    """Save on some ranks, beside the optimizer's own state, to load on others."""
    averaged = Averaged()
    averaged.step(0)
    averaged.step(1)
    zerocast.optim.save(averaged.optimizer, folder, extra=averaged.ema.state_dict()["model"])


def go_on(folder: str) -> None:
    averaged = Averaged()
    for step in range(2):
        averaged.follow(step, ranks=2)
    state = averaged.ema.state_dict()
    zerocast.optim.load(averaged.optimizer, folder, extra=state["model"])
    with pytest.raises(RuntimeError, match="the average does not belong to them"):
        averaged.optimizer.step()
    averaged.ema.load_state_dict(state)
    averaged.check("loaded")
    averaged.check_swapped()
    zerocast.optim.load_masters(averaged.optimizer, averaged.wanted)
    with pytest.raises(RuntimeError, match="the average does not belong to them"), averaged.ema.swapped():
        pass
    averaged.ema.reset()
    with averaged.ema.swapped():
        pass


def test_saved_on_two_ranks_and_loaded_on_three_and_one(ranks, tmp_path):
    ranks(2)(resumed, str(tmp_path / "saved"))
    ranks(3)(go_on, str(tmp_path / "saved"))
    go_on(str(tmp_path / "saved"))


def test_an_average_may_be_loaded_before_the_optimizer(tmp_path):
    averaged = Averaged()
    averaged.step(0)
    optimizer, state = averaged.optimizer, copy.deepcopy(averaged.ema.state_dict())
    zerocast.optim.save(optimizer, tmp_path / "saved")
    averaged.step(1)
    for load in (
        lambda: zerocast.optim.load(optimizer, tmp_path / "saved"),
        lambda: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    ):
        averaged.ema.load_state_dict(state)
        load()
        averaged.ema.state_dict()
        with averaged.ema.swapped():
            pass


def test_what_does_not_fit_is_refused():
    averaged = Averaged()
    state = averaged.ema.state_dict()
    for broken in ({k: v for k, v in state["model"].items() if k != "nv"}, {**state["model"], "nv": torch.zeros(3)}):
        with pytest.raises(ValueError, match=r"nv"):
            averaged.ema.load_state_dict({"model": broken})
    for decay in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"in \[0, 1\]"):
            EMA(averaged.optimizer, decay)
    averaged.check("refused")


def test_a_decay_by_step_is_the_equal_average():
    averaged = Averaged()
    masters = []
    for step in (0, 1, 3):
        averaged.ema.decay = 1 - 1 / (len(masters) + 1)
        averaged.step(step)
        masters.append(averaged.optimizer.state_dict()["model"]["nv"].clone())
    torch.testing.assert_close(averaged.ema.state_dict()["model"]["nv"], torch.stack(masters).mean(0))


@pytest.mark.parametrize("same", ["parameters", "storage"])
def test_a_taken_over_optimizer_swaps_nothing_in(same):
    averaged = Averaged()
    probe = averaged.probe
    nv = nn.Parameter(probe.get_parameter("nv").share())
    second = ZeroAdamW([("nv", nv)] if same == "storage" else probe.named_parameters())
    with pytest.raises(RuntimeError, match="another optimizer"), averaged.ema.swapped():
        pass
    assert zerocast.verify(second).ok


def test_an_average_without_memory_follows_no_step(monkeypatch):
    """A kept exception keeps the unfinished object alive, which must follow no step."""
    averaged = Averaged()
    optimizer = averaged.optimizer
    monkeypatch.setattr(optimizer.averages, "count", mock.Mock(clone=mock.Mock(side_effect=torch.OutOfMemoryError)))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        EMA(optimizer)
    monkeypatch.undo()
    averaged.step(0)
    averaged.check("a step later")
    assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("why", ["parameters were written", "the optimizer has loaded other masters"])
@on_ranks(2)
def test_a_swap_for_which_one_rank_is_not_ready(why, late):
    """All raise and none waits. On a GPU the other ranks are told as they leave."""
    trainer = Trainer(Run())
    optimizer = trainer.optimizer
    ema = EMA(optimizer, 0.9)
    trainer.step(0)
    state = Trainer(Run()).optimizer.state_dict()
    optimizer._driver.plan.amaxes.reports.reads_late = late  # as on a GPU
    if dist.get_rank() == 1:
        if why == "parameters were written":
            with torch.no_grad():
                next(p for p in trainer.probe.parameters() if type(p) is nn.Parameter).add_(1)
        else:
            with optimizer.overwriting():
                pass
    entered = False
    try:
        with ema.swapped():
            entered = True
    except RuntimeError as error:
        said = str(error)
    optimizer.load_state_dict(state)
    ema.reset()
    assert error_of(lambda: trainer.step(1)) == ""
    assert said.startswith(f"rank 1: {why}")
    assert entered == (late and trainer.rank == 0)


@pytest.mark.parametrize("how", ["decay", "reset"])
@on_ranks(2)
def test_ranks_that_average_otherwise(how):
    """The step after one rank averages differently raises, or the one after it, since digests of 7 bits meet
    once in 128 calls.
    """
    trainer = Trainer(Run())
    ema = EMA(trainer.optimizer, 0.9)
    trainer.step(0)
    if dist.get_rank() == 1:
        if how == "decay":
            ema.decay = 0.8
        else:
            ema.reset()
    said = error_of(lambda: trainer.step(1)) or error_of(lambda: trainer.step(2))
    assert "ranks make different calls" in said and "averaged by 0.9 since reset 0" in said
