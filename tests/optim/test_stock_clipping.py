"""Gradients after a backward pass: clipping and scaling by torch's own functions give the global truth, and the step uses it."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from tests.fsdp2.models import slow
from tests.observed import Traffic
from tests.optim import test_muon
from tests.optim.probe import FP32, Spec
from tests.optim.runs import ADAM, Run, Trainer, boxes, rank, world
from tests.selection import some, worlds
from tests.workers import error_of, on_ranks
from zerocast import ZeroAdamW, ZeroConfig
from zerocast.optim.norm import GradientNorms
from zerocast.optim.reduction import Reduction

LIBRARY = ZeroConfig(bucket_size=4096)
# Muon's parameters are complete first and lie last.
MUON = dataclasses.replace(
    test_muon.RUN,
    specs=(Spec("norm", (300,), dtype=FP32), Spec("nv", (48, 112), "nvfp4", group=1), Spec("plain", (24, 40), group=1)),
    options=test_muon.OPTIONS[::-1],
    config=LIBRARY,
)
CASES = {
    "2 library": Run(config=LIBRARY),
    "1 logical": Run(stage=1),
    "1 library": Run(stage=1, config=LIBRARY),
    "2 logical": Run(),
    "Muon": MUON,
}
BUSY = 3  # a step whose gradients are neither tiny nor huge
INF = math.inf


def ulps(a: Tensor, b: Tensor) -> float:
    """Return the distance of two FP32 numbers, in ulp of the second."""
    b = b.double()
    return float((a.double() - b).abs() / (torch.finfo(FP32).eps * 2.0 ** b.abs().log2().floor())) if b else float(a)


def gradients(trainer: Trainer) -> list[Any]:
    return [parameter.grad for parameter in trainer.probe.parameters()]


def full(trainer: Trainer) -> Tensor:
    """Return all gradients end to end, in f64."""
    return torch.cat([gradient.full_tensor().reshape(-1) for gradient in gradients(trainer)]).double()


def masters(trainer: Trainer) -> list[Tensor]:
    return [box.clone() for held in trainer.optimizer.state_dict()["model"].values() for _, box in boxes(held)]


def differ(ours: Trainer, theirs: Trainer) -> float:
    """Return the largest difference of masters. A step moves them by up to the learning rate of 1e-2."""
    pairs = zip(masters(ours), masters(theirs), strict=True)
    return max([float((a - b).abs().max()) for a, b in pairs if a.numel()])


def expected(trainer: Trainer, step: int) -> Tensor:
    """Compute the averaged gradient of one backward pass, end to end in the order of `full`."""
    sums = []
    for spec in trainer.run.specs:
        (mean,) = trainer.run.rounds(spec, step, world())
        sums.append(torch.tensor(mean).reshape(-1))
    return torch.cat(sums).double()


@pytest.mark.parametrize("run", some(CASES, "2 library", "1 logical", "Muon"))
@on_ranks(*worlds(2, slow=(1, 3)))
def test_norms(run):
    """Norms of every type of torch agree with arithmetic on the whole gradient, with one collective each."""
    trainer = Trainer(run)
    trainer.probe.backward(BUSY, rank())
    whole = expected(trainer, BUSY)
    assert float((full(trainer) - whole).norm() / whole.norm()) <= (
        0.0 if run.config.deterministic else 0.01
    )  # reduced in bf16
    values = full(trainer)
    fast = trainer.optimizer.clip_grad_norm_(1e30)
    for norm_type in (2.0, INF, 1.0, 3.0):
        for foreach in (None, True, False):
            with Traffic() as traffic:
                total = get_total_norm(gradients(trainer), norm_type, foreach=foreach)
            wanted = torch.linalg.vector_norm(values, norm_type)
            assert ulps(total, wanted.float()) <= 4, (norm_type, foreach, total, wanted)
            assert len(traffic.log) == (1 if foreach is None and world() > 1 else 0), (norm_type, foreach, traffic.log)
    assert ulps(get_total_norm(gradients(trainer)), fast) <= 4
    assert gradients(trainer)[0].norm().dtype == FP32
    few = gradients(trainer)[1:5]
    of_few = torch.cat([gradient.full_tensor().reshape(-1) for gradient in few]).double().norm()
    assert ulps(get_total_norm(few), of_few.float()) <= 4
    per_parameter = [ulps(g.norm(), g.full_tensor().double().norm().float()) for g in gradients(trainer)]
    assert max(per_parameter) <= 1


@pytest.mark.parametrize("change", ["nothing", "changed", "removed", "zeroed", "another pass"])
@pytest.mark.parametrize("run", some(CASES, "2 library", "1 logical"))
@on_ranks(2)
def test_the_norm_is_begun_beside_the_last_reductions(run, change):
    """A pass adds up squares before it waits for its last buckets. What changes before the clip is not missed."""
    trainer = Trainer(run)
    reducer, order = trainer.optimizer._reducer, []

    def watched(cls: Any, name: str) -> Any:
        call = getattr(cls, name)
        return mock.patch.object(cls, name, lambda *given: (order.append(name), call(*given))[1])

    def is_complete(_: Reduction) -> bool:
        # So the last two buckets are in flight at the end of the pass, however fast they are.
        return len(reducer._in_flight) > 1

    with (
        watched(Reduction, "finish"),
        watched(GradientNorms, "begin_square_sum"),
        mock.patch.object(Reduction, "is_complete", is_complete),
    ):
        trainer.probe.backward(BUSY, rank())
    assert order[-3:] == ["begin_square_sum", "finish", "finish"] and order.count("begin_square_sum") == 1
    buckets = trainer.optimizer._layout.gradients
    assert reducer.gradients.norms._begun[0] == buckets[-2].start > 0
    early = buckets[0].slots[0].parameter
    if change == "changed":
        early.grad.mul_(2.0)
    elif change == "zeroed":
        early.grad.zero_()
    elif change == "another pass":
        trainer.probe.backward(2, rank())
    left = [p for p in trainer.probe.parameters() if p is not early or change != "removed"]
    expected = [parameter.grad.full_tensor().reshape(-1).double() for parameter in left]
    if change == "removed":
        early.grad = None
    norm = trainer.optimizer.clip_grad_norm_(1e30)
    assert ulps(norm, torch.cat(expected).norm().float()) <= 1


@pytest.mark.parametrize(("stage", "foreach"), [(1, True), (2, False), slow(1, False), slow(2, True)])
@on_ranks(*worlds(2, slow=(1, 3)))
def test_clips_in_a_row(stage, foreach):
    """Clips of both kinds in a row, and between backward passes, agree with plain arithmetic on a twin."""
    found: dict[str, float] = {}

    def run(what: str, limits: tuple[float, ...], first: tuple[bool, ...], again: bool) -> None:
        trainer = Trainer(Run(stage=stage))
        trainer.probe.backward(BUSY, rank())
        value = full(trainer)
        for limit, stock in zip(limits, first, strict=True):
            parameters = list(trainer.probe.parameters())
            by_torch = functools.partial(clip_grad_norm_, parameters, foreach=foreach)
            norm = (by_torch if stock else trainer.optimizer.clip_grad_norm_)(limit)
            found[f"{what}: norm"] = float((norm - value.norm()).abs() / value.norm())
            value = value * min(1.0, limit / (float(value.norm()) + 1e-6))
        if again:
            trainer.probe.backward(2, rank())
            fresh = Trainer(Run(stage=stage))
            fresh.probe.backward(2, rank())
            value = value + full(fresh)
        found[what] = float((full(trainer) - value).norm() / value.norm())

    run("stock, ours", (1e-2, 5e-3), (True, False), False)
    run("ours, stock", (1e-2, 5e-3), (False, True), False)
    run("ours, then a larger one", (5e-3, 1e-2), (False, False), False)
    run("stock twice", (5e-3, 1e-2), (True, True), False)
    run("stock, then another pass", (1e-2,), (True,), True)
    run("ours, then another pass", (1e-2,), (False,), True)
    assert max(found.values()) <= 1e-5, found


FLOATS = (
    Spec("norm", (300,), dtype=FP32),
    Spec("current", (13, 7), "fp8_current", FP32),
    Spec("nv", (48, 112), "nvfp4", FP32),
)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("world", "bad_rank"), [(2, 1), slow(1, 0), slow(3, 0), slow(2, None)])
@on_ranks()
def test_grad_scaler(bad_rank, stage):
    """Three steps with GradScaler give the masters of a run without it. An infinite element on one rank skips
    the second.
    """
    config = ZeroConfig(bucket_size=4096, grad_dtype=FP32)
    ours, theirs = (Trainer(Run(FLOATS, stage=stage, config=config, options=(ADAM,))) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    took = []
    for step in (BUSY, 2, 4):
        values: dict[str, Any] = {spec.name: spec.gradient(step, rank()) for spec in FLOATS}
        bad = step == 2 and bad_rank is not None
        if bad and rank() == bad_rank:
            values["norm"][299] = INF
        before = masters(ours)
        scaler.scale(ours.probe.loss(values)).backward()
        scaler.unscale_(ours.optimizer)
        norm = clip_grad_norm_(ours.probe.parameters(), 1e-2)
        scaler.step(ours.optimizer)
        scaler.update()
        ours.probe.zero_grad()
        took.append(any(not torch.equal(a, b) for a, b in zip(masters(ours), before, strict=True)))
        if not bad:
            theirs.probe.loss(values).backward()
            assert ulps(norm, theirs.optimizer.clip_grad_norm_(1e-2)) <= 4
            theirs.optimizer.step()
            theirs.optimizer.zero_grad()
    assert differ(ours, theirs) <= 1e-5
    assert scaler.get_scale() == (2.0**9 if bad_rank is not None else 2.0**10)
    assert took == [True, bad_rank is None, True]


@on_ranks(1, 2)
def test_error_if_nonfinite():
    trainer = Trainer(Run(config=LIBRARY))
    values = {spec.name: spec.gradient(BUSY, rank()) for spec in trainer.run.specs}
    if rank() == world() - 1:
        values["nv"][0, 0] = math.nan
    trainer.probe.loss(values).backward()
    found = [str(float(get_total_norm(gradients(trainer), norm_type))) for norm_type in (2.0, INF, 1.0)]
    clip = functools.partial(clip_grad_norm_, trainer.probe.parameters(), 1.0, error_if_nonfinite=True)
    assert found == ["nan"] * 3
    assert "non-finite" in error_of(clip)


CLIPS: dict[str, Callable[[Trainer], object]] = {
    "not at all": lambda trainer: None,
    "ours": lambda trainer: trainer.optimizer.clip_grad_norm_(1e-2),
    "stock": lambda trainer: clip_grad_norm_(trainer.probe.parameters(), 1e-2),
    "each parameter": lambda trainer: [clip_grad_norm_(parameter, 1e-2) for parameter in trainer.probe.parameters()],
}


@on_ranks(2)
def test_one_collective_for_all_norms():
    """A clip has one all-reduce, and ours adds none to the step's."""
    counts = {}
    for how, clip in CLIPS.items():
        trainer = Trainer(Run(config=LIBRARY))
        trainer.probe.backward(BUSY, rank())
        trainer.optimizer._reducer.finish()
        with Traffic() as traffic:
            clip(trainer)
            of_clip = len(traffic.log)
            trainer.optimizer.step()
        counts[how] = of_clip, len(traffic.sent["all-reduce"])
    least = counts["not at all"][1]
    assert counts == {
        "not at all": (0, least),
        "ours": (1, least),
        "stock": (1, least + 1),
        "each parameter": (1, least + 1),
    }


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(*worlds(2, slow=(1, 3)))
def test_no_sync(stage):
    """A stock clip raises inside no_sync. After it the clip reduces first, as a step does."""
    ours, theirs = (Trainer(Run(stage=stage)) for _ in range(2))
    said = []
    for trainer in (ours, theirs):
        with trainer.optimizer.no_sync():
            for step in (BUSY, 2):
                trainer.probe.backward(step, rank())
                if trainer is ours:
                    said.append(error_of(lambda: clip_grad_norm_(ours.probe.parameters(), 1e-2)))
    found = clip_grad_norm_(ours.probe.parameters(), 1e-2)
    assert ulps(found, theirs.optimizer.clip_grad_norm_(1e-2)) <= 4
    for trainer in (ours, theirs):
        trainer.optimizer.step()
    assert differ(ours, theirs) <= 1e-5
    assert len(said) == 2
    assert all("inside no_sync()" in text for text in said)


@pytest.mark.parametrize(
    ("how", "stage"), [("one", 2), ("zeros", 1), slow("one", 1), slow("zeros", 2), slow("all", 1), slow("all", 2)]
)
@on_ranks(*worlds(2, slow=(1, 3)))
def test_removed_gradients(stage, how):
    """A gradient that is taken off its parameter counts as zero, at the step and in the next backward pass."""
    for again in (False, True):
        ours, theirs = (Trainer(Run(stage=stage)) for _ in range(2))
        ours.probe.backward(BUSY, rank())
        if how == "one":
            ours.probe.get_parameter("nv").grad = None
            values = {s.name: s.gradient(BUSY, rank()) if s.name != "nv" else None for s in ours.run.specs}
            theirs.probe.loss(values).backward()
        else:
            ours.probe.zero_grad(set_to_none=how == "all")
        if again:
            for trainer in (ours, theirs):
                trainer.probe.backward(2, rank())
        for trainer in (ours, theirs):
            trainer.optimizer.step()
        assert differ(ours, theirs) == 0.0, again


def test_replaced_gradients():
    trainer = Trainer(Run(config=LIBRARY))
    trainer.probe.backward(BUSY, 0)
    norm = trainer.probe.get_parameter("norm")
    norm.grad = torch.ones_like(norm)
    for call in (trainer.optimizer.step, lambda: trainer.optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=r"norm was replaced .*copy_"):
            call()
    norm.grad = None
    trainer.optimizer.step()


@pytest.mark.parametrize("stage", [1, 2])
def test_stale_gradients(stage):
    trainer = Trainer(Run(stage=stage, config=LIBRARY))
    trainer.probe.backward(BUSY, 0)
    kept = trainer.probe.get_parameter("nv").grad
    alias = kept.detach()
    trainer.optimizer.step()
    for gradient in (kept, alias, trainer.probe.get_parameter("nv").grad):
        for read in (gradient.norm, gradient.full_tensor, lambda g=gradient: g.mul_(2.0)):
            with pytest.raises(RuntimeError, match="has consumed it"):
                read()
    trainer.probe.zero_grad(set_to_none=False)
    trainer.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="has consumed it"):
        kept.norm()
    trainer.probe.backward(BUSY, 0)
    assert trainer.probe.get_parameter("nv").grad.norm() > 0
    kept = trainer.probe.get_parameter("nv").grad
    successor = ZeroAdamW(trainer.probe.named_parameters(), config=LIBRARY)
    with pytest.raises(RuntimeError, match="another optimizer was built"):
        kept.norm()
    del trainer.optimizer
    with pytest.raises(RuntimeError, match="optimizer that this gradient belonged to is gone"):
        kept.norm()
    successor.step()
    widened = ZeroAdamW(trainer.probe.named_parameters(), config=ZeroConfig(grad_dtype=FP32))
    widened.step()


@pytest.mark.parametrize("stage", [1, 2])
def test_a_clip_that_is_read_is_applied_once(stage: int) -> None:
    """Reading a gradient between the clip and the step changes no bit of moments or masters."""
    states = []
    for is_read in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(16, 16)
        optimizer = ZeroAdamW(net.named_parameters(), stage=stage)
        net(torch.randn(4, 16)).square().sum().backward()
        norm = optimizer.clip_grad_norm_(1e-2)
        assert norm > 1
        if is_read:
            read = torch.stack([p.grad.full_tensor().square().sum() for p in net.parameters()])
            assert float(read.sum().sqrt()) == pytest.approx(1e-2, rel=1e-3)
        optimizer.step()
        moments = optimizer.state_dict()["optim"]["state"]["weight"]
        states.append([moments["exp_avg"].clone(), moments["exp_avg_sq"].clone(), net.weight.detach().clone()])
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))
