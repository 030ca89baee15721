"""Backward passes: accumulation, with and without no_sync, in both stages; what zero_grad forgets; what autograd may do."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerocast
from tests.optim.probe import Spec
from tests.optim.runs import ADAM, DETERMINISTIC, EIGHT_BIT_MOMENTS, Compared, Run, Trainer, boxes, check, rank
from tests.workers import error_of, on_ranks
from zerocast import ZeroAdamW, ZeroConfig
from zerocast.optim.reduced_gradient import ReducedGradient


def nested(trainer: Trainer) -> None:
    """End an inner context inside the outer one, which still holds."""
    with trainer.optimizer.no_sync():
        with trainer.optimizer.no_sync():
            pass
        trainer.probe.backward(0, trainer.rank)
    trainer.probe.backward(1, trainer.rank)


def never_synchronised(trainer: Trainer) -> None:
    """Run all passes under no_sync, so that the step reduces."""
    with trainer.optimizer.no_sync():
        trainer.probe.backward(0, trainer.rank)
        trainer.probe.backward(1, trainer.rank)


def synchronised_then_not(trainer: Trainer) -> None:
    """Run the last pass under no_sync. The step reduces the rest, and stage 1 reduces the sum again."""
    trainer.probe.backward(0, trainer.rank)
    with trainer.optimizer.no_sync():
        trainer.probe.backward(1, trainer.rank)


def synchronised_around(trainer: Trainer) -> None:
    """Run the pass in the middle under no_sync. The last pass reduces it with itself."""
    synchronised_then_not(trainer)
    trainer.probe.backward(2, trainer.rank)


# In each pass one rank has no gradient at all; it takes part in every collective all the same.
BY_TURNS = Run((Spec("w", (32, 64), "nvfp4", used="by turns"), Spec("b", (9,), used="by turns")), options=(ADAM,))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("passes", "run"),
    [
        (nested, Run()),
        (never_synchronised, Run()),
        (synchronised_then_not, Run()),
        (nested, BY_TURNS),
        (synchronised_then_not, BY_TURNS),
        (synchronised_around, BY_TURNS),
    ],
    ids=lambda value: getattr(value, "__name__", "by turns" if value is BY_TURNS else "mixed"),
)
@on_ranks(0, 2)
def test_no_sync(passes, stage, run):
    """Passes and a step agree with the reference, which gets all of them in one round, or each in one."""
    in_one_round = passes in (nested, never_synchronised)
    count = 3 if passes is synchronised_around else 2
    compared = Compared(dataclasses.replace(run, accumulate=count, stage=stage, no_sync=in_one_round))
    passes(compared)
    compared.optimizer.step()
    compared.follow(0)
    compared.check("stepped")


@on_ranks(2)
def test_ranks_accumulate_different_numbers_of_passes():
    """Ranks may accumulate different numbers of micro-batches, and none at all. Each pass adds 1 to the gradient of
    its rank.
    """
    weight = torch.nn.Parameter(torch.zeros(64))
    optimizer = ZeroAdamW([("weight", weight)])
    for fewest in (1, 0):
        with optimizer.no_sync():
            pass
        for _ in range(fewest + dist.get_rank()):
            with optimizer.no_sync():
                weight.sum().backward()
        weight.sum().backward()
        norm = optimizer.clip_grad_norm_(100.0)
        optimizer.step()
        optimizer.zero_grad()
        assert norm == 8 * (fewest + 1 + fewest + 2) / 2


@on_ranks(0, 2)
def test_no_gradient_at_all():
    """A step without any backward pass decays weights, as a gradient of zero does."""
    compared = Compared()
    compared.optimizer.step()
    compared.reference.step(
        {spec.name: [spec.initial().numpy() * 0] for spec in compared.run.specs}, compared.run.options
    )
    compared.check("no gradient")


@pytest.mark.notices(
    "one rank has no backward pass in a step, for example since the loop has caught an exception",
    where="ZeroAdamW",
    answer="its gradients count as zero in that step",
)
@on_ranks(2)
def test_one_rank_without_gradients():
    """Another rank has no gradients in each step, also in those before which ranks compare what they do not train."""
    check(dataclasses.replace(BY_TURNS, steps=3))


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_left_on_the_parameters(stage):
    """Every parameter has a reduced gradient until zero_grad, even those that took no part."""
    trainer = Trainer(Run(stage=stage))
    trainer.probe.backward(1, 0)
    assert {type(p.grad) for p in trainer.probe.parameters()} == {ReducedGradient}
    trainer.optimizer.zero_grad()
    assert all(p.grad is None for p in trainer.probe.parameters())


def test_closure():
    compared = Compared()

    def closure() -> torch.Tensor:
        compared.optimizer.zero_grad()
        loss = compared.probe.loss({spec.name: spec.gradient(0, 0) for spec in compared.run.specs})
        loss.backward()
        return loss.detach()

    assert isinstance(compared.optimizer.step(closure), torch.Tensor)
    compared.follow(0)
    compared.check("closure")


class Tripled(torch.autograd.Function):
    """A function whose backward writes into the incoming gradient, a tensor that autograd also passes to the
    other operand of an addition.
    """

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(3)


@pytest.mark.parametrize("bucket_size", [256, 2**20])
@on_ranks(1, 2)
def test_a_gradient_that_changes_after_it_arrived(bucket_size):
    """A change of a gradient that has arrived is refused, also of one that fills its bucket and is sent in place."""
    weight, bias = (torch.nn.Parameter(torch.ones(16, 16)) for _ in range(2))
    optimizer = ZeroAdamW([("weight", weight), ("bias", bias)], config=ZeroConfig(bucket_size=bucket_size))
    loss = ((Tripled.apply(2 * weight) + bias) * torch.ones(16, 16)).sum()
    loss.backward(retain_graph=True)
    assert torch.equal(bias.grad.full_tensor(), torch.ones(16, 16))
    said = error_of(loss.backward)
    optimizer.zero_grad()
    (weight * bias).sum().backward()
    assert torch.equal(bias.grad.full_tensor(), torch.ones(16, 16))
    assert "the gradient of bias was changed in place after it had arrived" in said


# -- what autograd can do on the way: gradients in pieces, frozen parameters, passes that die

TINY = ZeroConfig(bucket_size=1, deterministic=True)


class SharedBlocks(nn.Module):
    """One weight in every checkpointed segment: with reentrant checkpointing its gradient arrives piece by piece.

    With `outer` another gradient arrives before these, so that all are one pass; with `bottom` one arrives after them.
    """

    def __init__(self, reentrant: bool | None, outer: bool, bottom: bool) -> None:
        super().__init__()
        self.bottom = nn.Linear(32, 32, bias=False)
        self.inner = nn.Linear(32, 32, bias=False)
        self.outer = nn.Linear(32, 32, bias=False)
        with torch.no_grad():
            for index, p in enumerate(self.parameters()):
                p.copy_(torch.linspace(-0.2, 0.3 + index, p.numel()).view_as(p).sin())
        zerocast.quantize_(self, zerocast.Recipe({"*": "fp8_current"}))
        self.bottom.requires_grad_(bottom)
        self.outer.requires_grad_(outer)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.bottom(x)
        for _ in range(3):
            x = (
                checkpoint(self._segment, x, use_reentrant=self.reentrant)
                if self.reentrant is not None
                else self._segment(x)
            )
        return self.outer(x).square().sum()

    def _segment(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def shared(reentrant: bool | None, outer: bool, bottom: bool, bucket_size: int, stage: int) -> Any:
    """Return the masters after a step, or the error."""
    model = SharedBlocks(reentrant, outer, bottom)
    config = ZeroConfig(bucket_size, deterministic=True)
    optimizer = ZeroAdamW(model.named_parameters(), lr=1e-3, eps=1.0, stage=stage, config=config)
    x = torch.linspace(-1, 1, 64).view(2, 32) * (1 + rank())
    try:
        model(x.requires_grad_()).backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    state = optimizer.state_dict()["optim"]["state"]
    return [part.clone() for held in state.values() for _, part in boxes(held["exp_avg"])]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("bucket_size", [1, 2**20])
@pytest.mark.parametrize(("outer", "bottom"), [(False, False), (False, True), (True, False), (True, True)])
@on_ranks(2)
def test_a_gradient_in_pieces(outer, bottom, bucket_size, stage):
    """A gradient that arrives in pieces is the sum of all pieces, or an error on every rank, and never a part of it."""
    wanted, found = (shared(reentrant, outer, bottom, bucket_size, stage) for reentrant in (None, True))
    if outer and (bucket_size == 1 or not bottom):
        assert "second gradient of inner.weight" in found
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)  # added in another order


class Dies(torch.autograd.Function):
    """A function that passes its input on, and raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("half-way")


def die(trainer: Trainer, step: int) -> None:
    """Break off a backward pass when the gradients of half the parameters have arrived."""
    gradients = {spec.name: spec.gradient(step, trainer.rank) for spec in trainer.run.specs}
    half = len(gradients) // 2
    late = {name: gradient for index, (name, gradient) in enumerate(gradients.items()) if index >= half}
    early = {name: gradient for index, (name, gradient) in enumerate(gradients.items()) if index < half}
    dying = Dies.apply(trainer.probe.loss({name: None for name in late} | early))
    living = trainer.probe.loss({name: None for name in early} | late)  # made later, so its gradients come earlier
    with pytest.raises(ArithmeticError):
        (dying + living).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("accumulated", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("forget", ["nothing", "model"])
@pytest.mark.parametrize("run", [Run(), Run(config=TINY), Run(config=TINY, stage=1)], ids=["2", "2 tiny", "1 tiny"])
@on_ranks(0, 2)
def test_recovery_from_a_pass_that_died(run, forget, accumulated):
    """A step from half a gradient is refused. zero_grad clears it away, in any state of the buckets."""
    trainer, messages = Compared(run), []
    for step in range(4):
        if step in (1, 2):
            if accumulated:
                trainer.probe.backward(50, trainer.rank)
            die(trainer, 30 + step)
            for attempt in (lambda: trainer.probe.backward(0, trainer.rank), trainer.optimizer.step):
                if forget == "model":
                    trainer.probe.zero_grad()
                try:
                    attempt()
                except RuntimeError as error:
                    messages.append(str(error))
            trainer.optimizer.zero_grad()
        trainer.go_on(step)
    assert len(messages) == 4
    assert all("zero_grad() of the optimizer" in message for message in messages)


def test_a_pass_that_dies_under_no_sync():
    trainer = Compared()
    with trainer.optimizer.no_sync():
        die(trainer, 9)
    trainer.optimizer.zero_grad()
    trainer.go_on(0)


@pytest.mark.parametrize("config", [DETERMINISTIC, EIGHT_BIT_MOMENTS], ids=["FP32 moments", "8-bit moments"])
@on_ranks(2)
def test_requires_grad_toggled(config):
    """A parameter frozen for a while counts as one without a gradient: the others go on, no rank waits."""
    trainer = Compared(Run(config=config))
    for step in range(4):
        frozen = step in (1, 2)
        for name in ("nv", "norm"):
            trainer.probe.get_parameter(name).requires_grad_(not frozen)
        trainer.step(step)
        gradients = {s.name: trainer.run.rounds(s, step, dist.get_world_size()) for s in trainer.run.specs}
        if frozen:
            gradients |= {name: [gradients[name][0] * 0] for name in ("nv", "norm")}
        trainer.reference.step(gradients, trainer.run.options)
        trainer.check(f"step {step}")


def test_a_sparse_gradient_is_named():
    table = nn.Embedding(32, 16, sparse=True)
    optimizer = ZeroAdamW(table.named_parameters())
    with pytest.raises(RuntimeError, match="the gradient of weight is sparse"):
        table(torch.tensor([1, 2])).sum().backward()
    optimizer.zero_grad()
    with optimizer.no_sync():
        table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="the gradient of weight is sparse"):
        optimizer.step()
