"""Training loops as people write them: what does not train leaves the masters as they were, to
the bit, and fresh bytes.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import FEW, Net
from tests.workers import Ranks, on_ranks
from zerocast.fsdp2 import FusedAdamW, torch_fsdp

STEPS = range(2)
CAN_RESET = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"),
    reason="FSDP2 of torch before 2.13 has no way back from a backward pass that raised",
)


def loss(model: Any, step: int) -> Tensor:
    """Return the loss of a step."""
    # After a backward pass that broke off, FSDP2 of torch 2.11 casts the inputs of no pass.
    inputs = models.batch(step, 64).bfloat16()
    return model(inputs).float().square().mean()  # type: ignore[no-any-return]


class Rooted(Net):
    """A Net with weights in the root module, before the blocks and after them."""

    def __init__(self) -> None:
        super().__init__(FEW[::2], 64, 96)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.first, self.last = (nn.Linear(64, 64, bias=False) for _ in range(2))
        self.recipe |= {"first.weight": models.DELAYED, "last.weight": "nvfp4"}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(self.first(x)))  # type: ignore[no-any-return]


def digests(model: nn.Module) -> dict[str, str]:
    """Return digests of the masters and of the delayed scaling state."""
    masters = {name: parameter for name, (parameter, _) in models.masters(model).items()}
    return models.digests({"masters": masters, "delayed": zerocast.fsdp2.state_dict(model)})


def forget(model: nn.Module) -> None:
    for parameter in models.held(model):
        parameter.grad = None


class Broken(Exception):
    """The error that a training loop catches before it goes on."""


@contextlib.contextmanager
def breaking(module: nn.Module) -> Iterator[None]:
    """While the context is open, a forward pass raises before it computes this."""

    def raises(*_: Any) -> None:
        raise Broken

    handle = module.register_forward_pre_hook(raises)
    with contextlib.suppress(Broken):
        yield
    handle.remove()


@contextlib.contextmanager
def breaking_backward(module: nn.Module) -> Iterator[None]:
    """While the context is open, a backward pass raises once it reaches what this gives, before
    FSDP2 gathers its weights.
    """

    def raises(_: Tensor) -> None:
        raise Broken

    def listen(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        output.register_hook(raises)

    handle = module.register_forward_hook(listen, prepend=True)
    with contextlib.suppress(Broken):
        yield
    handle.remove()


def gathered_by_hand(model: Any) -> None:
    """Issue gathers without waiting for their handles."""
    for block in model.blocks:
        block.unshard(async_op=True)


def awaited(model: Any) -> None:
    for handle in [block.unshard(async_op=True) for block in model.blocks]:
        handle.wait()


def evaluated(model: Any) -> None:
    model.eval()
    with torch.no_grad():
        loss(model, 100)
    with torch.inference_mode():
        loss(model, 101)
    model.train()


def by_itself(model: Any) -> None:
    """Run a forward pass of a block without the root's."""
    models.forward(model.blocks[1], 100)


def broken_forward(model: Any) -> None:
    with breaking(model.blocks[1][2]):
        loss(model, 100)


def averaged(model: Any) -> None:
    """Exchange the weights for others, evaluate, and put them back."""
    masters = [parameter.detach() for parameter in models.held(model)]
    kept = [master.clone() for master in masters]
    for master in masters:
        master.mul_(0.5)
    with torch.no_grad():
        loss(model, 100)
    for master, value in zip(masters, kept, strict=True):
        master.copy_(value)


def twice_over_one_graph(model: Any) -> None:
    out = loss(model, 100)
    out.backward(retain_graph=True)
    out.backward()
    forget(model)


def verified(model: Any) -> None:
    zerocast.verify(model).raise_for_differences()


def left_after_backward(model: Any) -> None:
    model.set_reshard_after_backward(False)
    loss(model, 100).backward()
    forget(model)
    model.set_reshard_after_backward(True)


DETOURS: dict[str, Callable[[Any], None]] = {
    detour.__name__: detour
    for detour in (
        gathered_by_hand,
        awaited,
        evaluated,
        by_itself,
        broken_forward,
        averaged,
        twice_over_one_graph,
        verified,
        left_after_backward,
    )
}


def trained(reshard: bool, detour: Callable[[Any], None] = lambda model: None) -> tuple[list[str], dict[str, str]]:
    """Train with a detour before each step and one between gradients and step. Return the complaints and what
    was learnt.
    """
    model = models.sharded(Rooted(), reshard_after_forward=reshard)
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 :])
    optimizer = models.OPTIMIZERS["AdamW"](model)
    with torch.no_grad():
        loss(model, 99)  # or FSDP2 takes whichever module runs first for the root
    found = []
    for step in STEPS:
        detour(model)
        loss(model, step).backward()
        kept = [parameter.grad for parameter in models.held(model)]
        forget(model)
        detour(model)
        for parameter, grad in zip(models.held(model), kept, strict=True):
            parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        found += models.complaints(model, f"step {step}")
    return found, digests(model)


def changes(reshard: bool, names: tuple[str, ...]) -> list[str]:
    """Return the complaints of loops with these detours, and the masters that they changed."""
    found, straight = trained(reshard)
    for name in names:
        complaints, learnt = trained(reshard, DETOURS[name])
        found += [f"{name}: {text}" for text in complaints]
        found += [f"{name} changed {key}" for key in straight if learnt[key] != straight[key]]
    return found


@pytest.mark.parametrize("reshard", [models.slow(True), False])
def test_detours_change_nothing(ranks: Ranks, reshard: bool) -> None:
    assert ranks(2)(changes, reshard, tuple(DETOURS)) == [[], []]


def in_backward(make: Any, reshard: bool, within: bool, breaks: bool = False) -> tuple[list[str], dict[str, str], int]:
    """Train by optimizers that step in gradient hooks (`within`), or by one optimizer. Return the
    errors, digests of the masters, and the number of casts.
    """
    model = models.sharded(Rooted(), reshard_after_forward=reshard)
    optimizers = {p: make([(name, p)], lr=1e-2) for name, p in model.named_parameters()} if within else {}
    together = None if within else make(model.named_parameters(), lr=1e-2)

    def step_one(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step_one)
    found = []
    for step in STEPS:
        if breaks:
            with breaking_backward(model.blocks[1][0]):
                loss(model, 100 + step).backward()
            with torch.no_grad():
                loss(model, 100)
            found += models.complaints(model, f"broken {step}")
            model.reset_iter_state()
        loss(model, step).backward()
        if together is not None:
            together.step()
            together.zero_grad()
        with torch.no_grad():
            loss(model, 100)
        found += models.complaints(model, f"step {step}")
    return found, digests(model), models.manager(model).plan.cast_number


MAKERS = {
    "sgd": torch.optim.SGD,
    "fused": zerocast.fsdp2.FusedAdamW,
    "8 bits": functools.partial(zerocast.fsdp2.FusedAdamW, moment_dtype="8bit"),
}


def stepped_within(maker: str, reshard: bool) -> list[str]:
    """Return how steps in gradient hooks differ from steps of one optimizer, and a wrong number of casts."""
    (_, after, _), (complaints, within, count) = (in_backward(MAKERS[maker], reshard, how) for how in (False, True))
    found = [f"{key} differs" for key in after if within[key] != after[key]]
    return [*complaints, *found] + ([f"{count} casts"] if count != 1 + len(STEPS) else [])


@pytest.mark.parametrize(
    ("maker", "reshard"),
    [
        ("sgd", False),
        models.slow("sgd", True),
        *(models.slow(name, reshard) for name in ("fused", "8 bits") for reshard in (False, True)),
    ],
)
def test_steps_within_a_backward_pass(ranks: Ranks, maker: str, reshard: bool) -> None:
    """Steps in gradient hooks give the bits of a step after the backward pass, with one cast a step."""
    assert ranks(2)(stepped_within, maker, reshard) == [[], []]


@CAN_RESET
@pytest.mark.parametrize("reshard", [False, True])
def test_a_backward_pass_that_breaks_between_steps(ranks: Ranks, reshard: bool) -> None:
    """A broken backward pass leaves gathers of the weights of its forward pass behind with `reshard`."""
    assert [found for found, *_ in ranks(2)(in_backward, torch.optim.SGD, reshard, True, True)] == [[], []]


@on_ranks(2)
def test_a_gather_that_a_broken_backward_pass_left_behind() -> None:
    """An optimizer steps all weights within the pass. The gather's bytes are of masters of before the step, and the first module
    of the next pass would take them.
    """
    model = models.sharded(Net(("nvfp4", "fp8_block", "nvfp4"), 64, 96))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model, 0).backward()
    handle = model.blocks[2][3].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with breaking_backward(model.blocks[1]):
        loss(model, 1).backward()
    handle.remove()
    assert [group._all_gather_result is not None for group in torch_fsdp.groups(model.blocks)] == [False, True, False]
    with torch.no_grad():
        after = model(models.batch(2, 64).bfloat16())
        zerocast.fsdp2.refresh(model)
        assert torch.equal(after, model(models.batch(2, 64).bfloat16()))


def after_a_broken_pass(model: Any, optimizer: Any, recovers: bool) -> dict[str, str]:
    """Train on after a backward pass that breaks off between two layers of a block, or without one. Return digests."""
    loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    if recovers:
        with breaking_backward(model.blocks[1][1]):
            loss(model, 1).backward()
        with torch.no_grad():
            loss(model, 100)
        with pytest.raises(RuntimeError, match=r"a backward pass of this model raised.* call reset_iter_state\(\)"):
            loss(model, 2)
        model.reset_iter_state()
        optimizer.zero_grad()
    for step in STEPS:
        loss(model, 2 + step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return digests(model)


@pytest.mark.notices(
    "a backward pass raises, and the loop goes on", where="FSDP2", answer="the next forward pass with gradients raises"
)
@CAN_RESET
@pytest.mark.parametrize("reshard", [False, True])
@on_ranks(2)
def test_training_goes_on_after_a_broken_backward_pass(reshard: bool) -> None:
    """Nothing of the pass is left after a reset, also the gradients that FSDP2 has not reduced yet."""
    found = []
    for recovers in (False, True):
        model = models.sharded(Rooted(), reshard_after_forward=reshard)
        found.append(after_a_broken_pass(model, FusedAdamW(model.parameters(), lr=1e-2), recovers))
    assert found[0] == found[1]
