"""zerocast.switch under FSDP2: the gathered bytes of the new formats from the same masters, training that goes on, and what it
refuses.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import DELAYED, Net
from tests.selection import worlds
from tests.workers import on_ranks
from zerocast import Recipe, verify

FORMATS = ("nvfp4", DELAYED, "mxfp8")
WIDTH = 64
TARGETS = {
    "bf16": ("identity", "identity", "identity"),
    "mixed": ("fp8_block", DELAYED, "mxfp4"),
    "begun": (DELAYED, "nvfp4", "mxfp8:block=32x32"),
}


def recipe(target: tuple[str, ...]) -> Recipe:
    return Recipe({f"blocks.{i}.*.weight": fmt for i, fmt in enumerate(target)})


def started(target: tuple[str, ...] = FORMATS, optimizer: str = "AdamW") -> tuple[Any, Any]:
    model = models.sharded(Net(target, WIDTH, 96))
    return model, models.OPTIMIZERS[optimizer](model)


def outputs(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(models.batch(99, WIDTH))
    return found


@pytest.mark.parametrize("optimizer", ["FusedAdamW", *map(models.slow, ("AdamW", "8-bit moments"))])
@on_ranks(*worlds(2, slow=[1, 3, 4]))
def test_bytes_are_those_of_the_new_recipe(optimizer):
    """A switched model has the bytes and outputs of one that was prepared with the recipe from the same masters."""
    model, adam = started(optimizer=optimizer)
    step = 0
    for name in ("bf16", "mixed", "begun"):
        models.train(model, adam, range(step, step + 2), WIDTH)
        step += 2
        zerocast.switch(model, recipe(TARGETS[name]))
        models.check(model, f"switched to {name}")
        verify(model).raise_for_differences()
        fresh, _ = started(TARGETS[name])
        fresh.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
        assert torch.equal(outputs(fresh), outputs(model)), name
    models.train(model, adam, range(step, step + 2), WIDTH)
    models.check(model, "trained on")


@on_ranks(2)
def test_before_the_first_pass():
    model, adam = started()
    zerocast.switch(adam, recipe(TARGETS["mixed"]))
    models.train(model, adam, range(2), WIDTH)
    models.check(model, "from the beginning")


@on_ranks(2)
def test_compiled_blocks_are_compiled_again():
    """Blocks that were compiled before a switch compute like eager ones of a fresh model."""
    model, adam = started(("nvfp4",))
    model.blocks[0].compile(backend="aot_eager")
    models.train(model, adam, range(1), WIDTH)
    found = []
    for target in (("mxfp8",), ("identity",)):
        zerocast.switch(model, recipe(target))
        fresh, _ = started(target)
        fresh.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
        found += [] if torch.equal(outputs(fresh), outputs(model)) else [f"{target}: a stale graph"]
    assert found == []


# -- what is refused


def _loss(model: Any) -> Tensor:
    result: Tensor = model(models.batch(5, WIDTH)).float().square().mean()
    return result


def _accumulating(model: Any, adam: Any) -> Any:
    _loss(model).backward()
    return adam.zero_grad


def _unsynchronised(model: Any, adam: Any) -> Any:
    model.set_requires_gradient_sync(False)
    _loss(model).backward()

    def undo() -> None:
        model.set_requires_gradient_sync(True)
        _loss(model).backward()
        adam.zero_grad()

    return undo


MISUSES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "accumulating": (_accumulating, "in the middle of an accumulation"),
    "without a reduction": (_unsynchronised, "in the middle of an accumulation"),
}


@pytest.mark.parametrize("case", MISUSES)
@on_ranks(2)
def test_only_between_steps(case):
    model, adam = started()
    models.train(model, adam, range(2), WIDTH)
    begin, said = MISUSES[case]
    undo = begin(model, adam)
    with pytest.raises(RuntimeError, match=said):
        zerocast.switch(model, recipe(TARGETS["bf16"]))
    undo()
    models.check(model, "nothing has changed")
    zerocast.switch(model, recipe(TARGETS["bf16"]))
    models.check(model, "and afterwards it can be")


@on_ranks(2)
def test_not_within_a_pass():
    """A switch is refused in a hook of a module or a gradient, and a backward pass of an earlier forward pass
    is refused after one.
    """
    model, adam = started()
    models.train(model, adam, range(1), WIDTH)
    said: list[str] = []

    def switches(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="within a forward or backward pass") as caught:
            zerocast.switch(model, recipe(TARGETS["bf16"]))
        said.append(str(caught.value))

    handles = [model.blocks[1].register_forward_pre_hook(switches)]
    handles += [model.blocks[0][1].register_full_backward_hook(switches)]
    _loss(model).backward()
    assert len(said) == 2
    for handle in handles:
        handle.remove()
    adam.zero_grad()
    loss = _loss(model)
    zerocast.switch(model, recipe(TARGETS["mixed"]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_ranks(2)
def test_memory_that_runs_out_on_one_rank():
    model, adam = started()
    models.train(model, adam, range(2), WIDTH)
    plan = models.manager(model).plan
    bind, calls = plan.bind, []

    def dies() -> None:
        calls.append(None)
        if len(calls) == 2 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("injected")
        bind()

    plan.bind = dies  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError, match="rank 1: injected"):
            zerocast.switch(model, recipe(TARGETS["mixed"]))
    finally:
        vars(plan).pop("bind", None)
    models.check(model, "as before")
    models.train(model, adam, range(2, 4), WIDTH)
    models.check(model, "goes on")
    zerocast.switch(model, recipe(TARGETS["mixed"]))
    models.check(model, "switches later")
