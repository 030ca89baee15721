"""Who owns a parameter, its gradient and its storage: several optimizers, copies, moved storage."""

import gc
import weakref

import pytest
import torch
from torch import nn

import zerocast
from tests.optim.probe import FP16
from tests.optim.runs import OVERLAP, Run, Trainer, weight_bytes
from zerocast import ZeroAdamW, ZeroMuon


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


def test_a_converted_parameter_is_refused():
    trainer = Trainer(Run())
    parameter = trainer.probe.get_parameter("norm")
    parameter.data = parameter.data.to(FP16)
    with pytest.raises(RuntimeError, match="float16"):
        trainer.optimizer.step()


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
