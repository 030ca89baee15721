"""Whatever autograd does on the way: gradients in pieces, frozen parameters, passes that die."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerocast
from tests.optim.probe import MIXED
from tests.optim.runs import (
    DETERMINISTIC,
    EIGHT_BIT_MOMENTS,
    Compared,
    Run,
    Trainer,
    boxes,
    rank,
)
from tests.workers import on_ranks
from zerocast import ZeroAdamW, ZeroConfig

TINY = ZeroConfig(bucket_size=1, deterministic=True)
FEW = tuple(spec for spec in MIXED if spec.name in ("embedding", "norm", "delayed", "block", "nv", "nv_late", "bias"))


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
    """The masters after a step; or what was raised."""
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
    """The sum of all pieces, or an error on every rank: never a part of it."""
    wanted, found = (shared(reentrant, outer, bottom, bucket_size, stage) for reentrant in (None, True))
    if outer and (bucket_size == 1 or not bottom):
        assert "second gradient of inner.weight" in found
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)  # added in another order


class Dies(torch.autograd.Function):
    """Passes its input on, and raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("half-way")


def die(trainer: Trainer, step: int) -> None:
    """A backward pass in which the gradients of half the parameters arrive."""
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
@pytest.mark.parametrize(
    "run", [Run(FEW), Run(FEW, config=TINY), Run(FEW, config=TINY, stage=1)], ids=["2", "2 tiny", "1 tiny"]
)
@on_ranks(0, 2)
def test_recovery_from_a_pass_that_died(run, forget, accumulated):
    """It is refused to go on from half a gradient; zero_grad clears it away, in any state of the buckets."""
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
        gradients = {s.name: trainer.run.rounds(s, step, dist.get_world_size()) for s in MIXED}
        if frozen:
            gradients |= {name: [gradients[name][0] * 0] for name in ("nv", "norm")}
        trainer.reference.step(gradients, trainer.run.options)
        trainer.check(f"step {step}")


def test_create_graph_leaves_no_graph_behind():
    """First-order gradients of a pass that could be differentiated again; plain parameters give second-order ones."""
    model = nn.Linear(8, 8)
    optimizer = ZeroAdamW(model.named_parameters(), config=DETERMINISTIC)
    x = torch.ones(2, 8, requires_grad=True)
    for _ in range(2):
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        optimizer.step()
    assert not any(t.requires_grad for t in optimizer.state_dict()["model"].values())


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
