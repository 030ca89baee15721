"""Gradient accumulation, with and without no_sync, in both stages; what zero_grad forgets."""

import pytest
import torch
import torch.distributed as dist

from tests.optim.probe import BF16, FP32, MIXED, Spec
from tests.optim.runs import ADAM, Run, Trainer, assert_equals, check
from tests.optim.undistributed import Undistributed
from tests.selection import some, worlds
from tests.workers import error_of
from zerocast import ZeroAdamW, ZeroConfig
from zerocast.optim.reduced_gradient import ReducedGradient

FP32_GRADIENTS = ZeroConfig(bucket_size=3000, deterministic=True, grad_dtype=FP32)
BF16_GRADIENTS = ZeroConfig(bucket_size=3000, deterministic=True, grad_dtype=BF16)
FP8_WIRE = ZeroConfig(bucket_size=3000, grad_wire="fp8_1x128")
OVERLAP = ZeroConfig(bucket_size=3000, deterministic=True, overlap_all_gather=True)
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


@pytest.mark.parametrize("world", worlds(3, slow=(1, 2)))
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
def test_accumulated_gradients(ranks, world, run):
    ranks(world)(check, run)


def compare_after_one_step(trainer: Trainer, rounds: int) -> None:
    """Step, and compare with the reference fed two passes in one or two rounds."""
    run = trainer.run
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    reference = Undistributed(run.specs)
    by_rounds = Run(specs=run.specs, accumulate=2, no_sync=rounds == 1, stage=run.stage)
    reference.step({spec.name: by_rounds.rounds(spec, 0, ranks) for spec in run.specs}, run.options)
    trainer.optimizer.step()
    assert_equals(trainer, reference, f"rank {trainer.rank}")


def nested(stage: int) -> None:
    """The inner context ends inside the outer one, which still holds."""
    trainer = Trainer(Run(accumulate=2, steps=1, stage=stage))
    with trainer.optimizer.no_sync():
        with trainer.optimizer.no_sync():
            pass
        trainer.probe.backward(0, trainer.rank)
    trainer.probe.backward(1, trainer.rank)
    compare_after_one_step(trainer, rounds=1)


def never_synchronised(stage: int) -> None:
    """All passes under no_sync: the step reduces."""
    trainer = Trainer(Run(accumulate=2, steps=1, stage=stage))
    with trainer.optimizer.no_sync():
        trainer.probe.backward(0, trainer.rank)
        trainer.probe.backward(1, trainer.rank)
    compare_after_one_step(trainer, rounds=1)


def synchronised_then_not(stage: int) -> None:
    """The last pass is under no_sync: the step reduces the rest. Stage 1 reduces the sum anew."""
    trainer = Trainer(Run(accumulate=2, steps=1, stage=stage))
    trainer.probe.backward(0, trainer.rank)
    with trainer.optimizer.no_sync():
        trainer.probe.backward(1, trainer.rank)
    compare_after_one_step(trainer, rounds=2)


def nothing_arrives_on_some_ranks(stage: int) -> None:
    """In each of the two passes one rank has no gradient at all; it takes part in every collective all the same."""
    specs = (Spec("w", (32, 64), "nvfp4", used="by turns"), Spec("b", (9,), used="by turns"))
    trainer = Trainer(Run(specs, options=(ADAM,), accumulate=2, stage=stage))
    with trainer.optimizer.no_sync():
        trainer.probe.backward(0, trainer.rank)
    trainer.probe.backward(1, trainer.rank)
    compare_after_one_step(trainer, rounds=1)


CASES = [nested, never_synchronised, synchronised_then_not, nothing_arrives_on_some_ranks]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_no_sync(ranks, case, stage):
    case(stage)
    ranks(2)(case, stage)


def no_gradient_at_all() -> None:
    """A step without any backward pass decays weights, as a gradient of zero does."""
    trainer, reference = Trainer(Run(steps=1)), Undistributed(MIXED)
    trainer.optimizer.step()
    reference.step({spec.name: [spec.initial().numpy() * 0] for spec in MIXED}, trainer.run.options)
    assert_equals(trainer, reference, "no gradient")


def test_no_gradient_at_all(ranks):
    no_gradient_at_all()
    ranks(2)(no_gradient_at_all)


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_left_on_the_parameters(stage):
    """A reduced gradient on every parameter, those that took no part included, until zero_grad."""
    trainer = Trainer(Run(stage=stage))
    trainer.probe.backward(1, 0)
    assert {type(p.grad) for p in trainer.probe.parameters()} == {ReducedGradient}
    trainer.optimizer.zero_grad()
    assert all(p.grad is None for p in trainer.probe.parameters())


def test_closure():
    trainer, reference = Trainer(Run()), Undistributed(MIXED)

    def closure() -> torch.Tensor:
        trainer.optimizer.zero_grad()
        loss = trainer.probe.loss({spec.name: spec.gradient(0, 0) for spec in MIXED})
        loss.backward()
        return loss.detach()

    assert isinstance(trainer.optimizer.step(closure), torch.Tensor)
    reference.step({spec.name: trainer.run.rounds(spec, 0, 1) for spec in MIXED}, trainer.run.options)
    assert_equals(trainer, reference, "closure")


class Tripled(torch.autograd.Function):
    """Its backward writes into the gradient that it is given, which is also that of what was added to it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(3)


def test_a_gradient_that_changes_after_it_arrived():
    """A first backward pass copies a gradient that two parameters share; a second one hands over the same tensor."""
    weight, bias = (torch.nn.Parameter(torch.ones(8, 8)) for _ in range(2))
    optimizer = ZeroAdamW([("weight", weight), ("bias", bias)])
    loss = ((Tripled.apply(2 * weight) + bias) * torch.ones(8, 8)).sum()
    loss.backward(retain_graph=True)
    assert torch.equal(bias.grad.full_tensor(), torch.ones(8, 8))
    with pytest.raises(RuntimeError, match="the gradient of bias was changed in place after it had arrived"):
        loss.backward()
    optimizer.zero_grad()
    loss = (weight * bias).sum()
    loss.backward()
    assert torch.equal(bias.grad.full_tensor(), torch.ones(8, 8))


@pytest.mark.parametrize("world", worlds(2, slow=[1]))
def test_a_gradient_that_changes_on_its_way(ranks, world):
    for said in ranks(world)(changed_on_its_way):
        assert "the gradient of bias was changed in place after it had arrived" in said


def changed_on_its_way() -> str:
    """One that fills its bucket alone is sent from where it lies, while the backward pass goes on."""
    weight, bias = (torch.nn.Parameter(torch.ones(16, 16)) for _ in range(2))
    optimizer = ZeroAdamW([("weight", weight), ("bias", bias)], config=ZeroConfig(bucket_size=256))
    loss = ((Tripled.apply(2 * weight) + bias) * torch.ones(16, 16)).sum()
    loss.backward(retain_graph=True)
    said = error_of(loss.backward)
    optimizer.zero_grad()
    (weight * bias).sum().backward()
    assert torch.equal(bias.grad.full_tensor(), torch.ones(16, 16))
    return said
