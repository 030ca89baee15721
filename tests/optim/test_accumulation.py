"""Gradient accumulation, with and without no_sync, in both stages; what zero_grad forgets."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from tests.optim.probe import BF16, FP32, MIXED, Spec
from tests.optim.runs import ADAM, OVERLAP, Compared, Run, Trainer, check
from tests.selection import some, worlds
from tests.workers import error_of, on_ranks
from zerocast import ZeroAdamW, ZeroConfig
from zerocast.optim.reduced_gradient import ReducedGradient

FP32_GRADIENTS = ZeroConfig(bucket_size=3000, deterministic=True, grad_dtype=FP32)
BF16_GRADIENTS = ZeroConfig(bucket_size=3000, deterministic=True, grad_dtype=BF16)
FP8_WIRE = ZeroConfig(bucket_size=3000, grad_wire="fp8_1x128")
RUNS = {
    "no_sync": Run(accumulate=3, max_norm=0.1),
    "no_sync, fp32 gradients": Run(accumulate=3, config=FP32_GRADIENTS),
    "no_sync, bf16 gradients": Run(accumulate=2, config=BF16_GRADIENTS),
    "no_sync, stage 1": Run(accumulate=3, stage=1, max_norm=0.1),
    "every pass reduced": Run(accumulate=3, no_sync=False, max_norm=0.1),
    "every pass reduced, fp32 gradients": Run(accumulate=3, no_sync=False, config=FP32_GRADIENTS),
    "no_sync, fp8 wire": Run(accumulate=3, config=FP8_WIRE, max_norm=0.1),
    "every pass reduced, fp8 wire": Run(accumulate=3, no_sync=False, config=FP8_WIRE),
    "every pass reduced, stage 1": Run(accumulate=3, no_sync=False, stage=1, max_norm=0.1),
    "every pass reduced, overlap": Run(accumulate=2, no_sync=False, config=OVERLAP),
}


@pytest.mark.parametrize(
    "run",
    some(
        RUNS,
        "no_sync",
        "no_sync, stage 1",
        "every pass reduced",
        "every pass reduced, overlap",
        "every pass reduced, fp8 wire",
    ),
)
@on_ranks(*worlds(3, slow=(1, 2)))
def test_accumulated_gradients(run):
    check(run)


def nested(trainer: Trainer) -> None:
    """The inner context ends inside the outer one, which still holds."""
    with trainer.optimizer.no_sync():
        with trainer.optimizer.no_sync():
            pass
        trainer.probe.backward(0, trainer.rank)
    trainer.probe.backward(1, trainer.rank)


def never_synchronised(trainer: Trainer) -> None:
    """All passes under no_sync: the step reduces."""
    with trainer.optimizer.no_sync():
        trainer.probe.backward(0, trainer.rank)
        trainer.probe.backward(1, trainer.rank)


def synchronised_then_not(trainer: Trainer) -> None:
    """The last pass is under no_sync: the step reduces the rest. Stage 1 reduces the sum anew."""
    trainer.probe.backward(0, trainer.rank)
    with trainer.optimizer.no_sync():
        trainer.probe.backward(1, trainer.rank)


def synchronised_around(trainer: Trainer) -> None:
    """The pass in the middle is under no_sync: the last pass reduces it, with itself."""
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
    ids=[
        "nested",
        "never synchronised",
        "synchronised, then not",
        "nested by turns",
        "synchronised by turns",
        "around",
    ],
)
@on_ranks(0, 2)
def test_no_sync(passes, stage, run):
    """Some passes and a step, beside the reference fed all of them in one round, or each in one."""
    in_one_round = passes in (nested, never_synchronised)
    count = 3 if passes is synchronised_around else 2
    compared = Compared(dataclasses.replace(run, accumulate=count, stage=stage, no_sync=in_one_round))
    passes(compared)
    compared.optimizer.step()
    compared.follow(0)
    compared.check("stepped")


@on_ranks(2)
def test_ranks_accumulate_different_numbers_of_passes():
    """As with micro-batches of uneven length. Each pass adds 1 to the gradient of its rank."""
    weight = torch.nn.Parameter(torch.zeros(64))
    optimizer = ZeroAdamW([("weight", weight)])
    for _ in range(2):
        for _ in range(1 + dist.get_rank()):
            with optimizer.no_sync():
                weight.sum().backward()
        weight.sum().backward()
        norm = optimizer.clip_grad_norm_(100.0)
        optimizer.step()
        optimizer.zero_grad()
        assert norm == 8 * (2 + 3) / 2


@on_ranks(0, 2)
def test_no_gradient_at_all():
    """A step without any backward pass decays weights, as a gradient of zero does."""
    compared = Compared()
    compared.optimizer.step()
    compared.reference.step({spec.name: [spec.initial().numpy() * 0] for spec in MIXED}, compared.run.options)
    compared.check("no gradient")


@pytest.mark.notices(
    "one rank has no backward pass in a step, as after an exception in its forward pass that the loop catches",
    where="ZeroAdamW",
    answer="its gradients count as zero in that step",
)
@on_ranks(2)
def test_one_rank_without_gradients():
    """In each step another one, the steps included before which ranks compare what they do not train."""
    check(dataclasses.replace(BY_TURNS, steps=3))


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_left_on_the_parameters(stage):
    """A reduced gradient on every parameter, those that took no part included, until zero_grad."""
    trainer = Trainer(Run(stage=stage))
    trainer.probe.backward(1, 0)
    assert {type(p.grad) for p in trainer.probe.parameters()} == {ReducedGradient}
    trainer.optimizer.zero_grad()
    assert all(p.grad is None for p in trainer.probe.parameters())


def test_closure():
    compared = Compared()

    def closure() -> torch.Tensor:
        compared.optimizer.zero_grad()
        loss = compared.probe.loss({spec.name: spec.gradient(0, 0) for spec in MIXED})
        loss.backward()
        return loss.detach()

    assert isinstance(compared.optimizer.step(closure), torch.Tensor)
    compared.follow(0)
    compared.check("closure")


class Tripled(torch.autograd.Function):
    """Its backward writes into the gradient that it is given, which is also that of what was added to it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(3)


@pytest.mark.parametrize("bucket_size", [256, 2**20])
@on_ranks(1, 2)
def test_a_gradient_that_changes_after_it_arrived(bucket_size):
    """One that fills its bucket alone is sent from where it lies, while the backward pass goes on."""
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
