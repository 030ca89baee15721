"""Who owns a parameter, its gradient and its storage: several optimizers, copies, moved storage."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocast
from tests import casts
from tests.optim.probe import FP16, MIXED, Probe
from tests.optim.runs import ADAM, Run, Trainer, assert_equals, weight_bytes
from tests.optim.slow_gathers import slow_gathers
from tests.optim.undistributed import Undistributed
from zerocast import QuantizedWeight, ZeroAdamW, ZeroConfig, ZeroMuon

SMALL = ZeroConfig(bucket_size=4096, deterministic=True)
OVERLAP = ZeroConfig(bucket_size=4096, deterministic=True, overlap_all_gather=True)


def ranks_here() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def go_on(trainer: Trainer, reference: Undistributed, steps: range) -> None:
    """Train both and compare after each step."""
    for step in steps:
        trainer.step(step)
        reference.step({s.name: trainer.run.rounds(s, step, ranks_here()) for s in MIXED}, trainer.run.options)
        assert_equals(trainer, reference, f"rank {trainer.rank}, step {step}")


def taken_over(config: ZeroConfig) -> None:
    """The last optimizer built over a parameter has it; the one before says so when it is asked to step."""
    trainer, other = Trainer(Run(config=config)), Trainer(Run(config=config))
    trainer.step(0)
    state = trainer.optimizer.state_dict()
    other.optimizer.load_state_dict(state)
    reference = Undistributed(MIXED)
    reference.step({s.name: trainer.run.rounds(s, 0, ranks_here()) for s in MIXED}, trainer.run.options)
    first = trainer.optimizer
    trainer.optimizer = ZeroAdamW(trainer.probe.param_groups(trainer.run.options), config=config)
    trainer.optimizer.load_state_dict(other.optimizer.state_dict())
    go_on(trainer, reference, range(1, 3))
    trainer.backward(3)
    with pytest.raises(RuntimeError, match="another optimizer"):
        first.step()
    with pytest.raises(RuntimeError, match="another optimizer"):
        first.clip_grad_norm_(1.0)
    trainer.optimizer.step()
    reference.step({s.name: trainer.run.rounds(s, 3, ranks_here()) for s in MIXED}, trainer.run.options)
    assert_equals(trainer, reference, "after the first one was refused")


@pytest.mark.parametrize("config", [SMALL, OVERLAP], ids=["eager", "overlap"])
def test_a_second_optimizer_takes_over(ranks, config):
    taken_over(config)
    ranks(2)(taken_over, config)


def test_an_optimizer_is_freed_with_its_last_reference():
    """No cycle keeps masters alive; its hooks then do nothing, and gradients stay on the parameters."""
    torch.optim.SGD(
        [torch.zeros(1)]
    )  # the first of a process imports torch's compiler, which leaves frames to the collector
    gc.disable()
    try:
        trainer = Trainer(Run(config=OVERLAP))
        trainer.step(0)
        optimizer, probe = weakref.ref(trainer.optimizer), trainer.probe
        del trainer
        assert optimizer() is None
    finally:
        gc.enable()
    probe.backward(1, 0)
    assert probe.get_parameter("nv").grad is not None
    assert weight_bytes(probe)


def moved(config: ZeroConfig) -> None:
    """Storage that a user replaced between steps is taken back with the next one; nothing goes stale."""
    trainer, reference = Trainer(Run(config=config)), Undistributed(MIXED)
    go_on(trainer, reference, range(1))
    for name in ("nv", "mx"):
        weight = trainer.probe.get_parameter(name)
        assert isinstance(weight, QuantizedWeight)
        column = torch.zeros_like(weight.columnwise_data) if name == "mx" else None
        weight.rebind(torch.zeros_like(weight.rowwise_data), column)
    for name in ("norm", "embedding"):
        parameter = trainer.probe.get_parameter(name)
        parameter.data = parameter.data.clone()
    assert_equals(trainer, reference, "moved")
    go_on(trainer, reference, range(1, 3))
    with slow_gathers():
        go_on(trainer, reference, range(3, 4))
        trainer.probe.to("cpu")
        assert_equals(trainer, reference, "to")
        go_on(trainer, reference, range(4, 6))
        trainer.probe._apply(lambda t: t.clone() if isinstance(t, QuantizedWeight) else t)  # as a change of device does
        assert_equals(trainer, reference, "new objects")
        go_on(trainer, reference, range(6, 8))


def test_a_converted_parameter_is_refused():
    trainer = Trainer(Run())
    parameter = trainer.probe.get_parameter("norm")
    parameter.data = parameter.data.to(FP16)
    with pytest.raises(RuntimeError, match="float16"):
        trainer.optimizer.step()


def two_optimizers(config: ZeroConfig) -> None:
    """Each over half of the parameters of one model, stepping at its own pace."""
    probe, rank = Probe(MIXED), dist.get_rank() if dist.is_initialized() else 0
    always = tuple(spec for spec in MIXED if spec.used == "always")
    halves = [tuple(s for i, s in enumerate(always) if i % 2 == half) for half in (0, 1)]
    optimizers, references = [], [Undistributed(half) for half in halves]
    for half in halves:
        named = [(spec.name, probe.get_parameter(spec.name)) for spec in half]
        optimizers.append(ZeroAdamW(named, **ADAM, config=config))
    for step in range(4):
        gradients = {s.name: s.gradient(step, rank) if s in always else None for s in MIXED}
        probe.loss(gradients).backward()  # type: ignore[no-untyped-call]
        for index, (half, optimizer, reference) in enumerate(zip(halves, optimizers, references, strict=True)):
            if index == 1 and step % 2 == 0:  # accumulates two passes
                continue
            passes = [step] if index == 0 else [step - 1, step]
            rounds = {s.name: [Run().rounds(s, p, ranks_here())[0] for p in passes] for s in half}
            options = [ADAM, ADAM]
            optimizer.step()
            reference.step(rounds, options)
            found = weight_bytes(probe)
            for spec in half:
                casts.assert_same_bytes(found[spec.name], reference.bytes[spec.name], f"step {step}, {spec.name}")


@pytest.mark.parametrize("config", [SMALL, OVERLAP], ids=["eager", "overlap"])
def test_two_optimizers_over_one_model(ranks, config):
    two_optimizers(config)
    ranks(2)(two_optimizers, config)


def test_an_optimizer_is_not_copied():
    trainer = Trainer(Run())
    for copying in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="load the state"):
            copying(trainer.optimizer)


def test_a_model_under_training_can_be_pickled():
    trainer = Trainer(Run(config=OVERLAP))
    trainer.step(0)
    twin = pickle.loads(pickle.dumps(trainer.probe))
    for name, wanted in weight_bytes(trainer.probe).items():
        casts.assert_same_bytes(weight_bytes(twin)[name], wanted, name)


@pytest.mark.parametrize("optimizer_class", [ZeroAdamW, ZeroMuon])
@pytest.mark.notices(
    "a frozen bias or norm is unfrozen in mid-run", where="ZeroAdamW", answer="the next step raises, names it"
)
def test_a_plain_parameter_that_is_unfrozen(optimizer_class):
    """It raises with or without a gradient on this rank, until it is frozen again or another optimizer trains it."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).bfloat16()
    zerocast.quantize_(model, {"0.weight": "nvfp4"})
    model[1].requires_grad_(False)

    def optimizer_of(pairs):
        pairs = list(pairs)
        return optimizer_class(pairs if optimizer_class is ZeroAdamW else [{"params": pairs, "use_muon": False}])

    optimizer = optimizer_of(model.named_parameters())
    for with_gradient in (False, True):
        model[1].bias.requires_grad_(True)
        if with_gradient:
            model(torch.randn(4, 64).bfloat16()).sum().backward()
        with pytest.raises(RuntimeError, match=r"1 parameters were frozen when this Zero\w+ was built .* 1\.bias:"):
            optimizer.step()
        model[1].bias.requires_grad_(False)
        model(torch.randn(4, 64).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model[1].bias.requires_grad_(True)
    other = optimizer_of([("bias", model[1].bias)])
    before = model[1].bias.detach().clone()
    model(torch.randn(4, 64).bfloat16()).sum().backward()
    optimizer.step()
    other.step()
    assert not torch.equal(before, model[1].bias)
