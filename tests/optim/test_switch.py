"""zerocast.switch of a ZeroAdamW: the bytes of a run that starts in the new formats from the same masters, and what is refused."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocast
from tests import casts
from tests.optim.faults import OutOfMemory
from tests.optim.probe import FEW, PLAIN
from tests.optim.runs import CapturedCase, Compared, Run, Trainee, Trainer, refused, repeated, snapshot
from tests.optim.undistributed import Undistributed, f32, np
from tests.selection import worlds
from tests.workers import on_ranks
from zerocast import Recipe, ZeroAdamW, verify
from zerocast.optim import EMA

# matrices of the probe that are no QuantizedWeights
PLAIN_MATRICES = {spec.name: "identity" for spec in FEW if spec.fmt == PLAIN and len(spec.shape) > 1}
BF16 = Recipe({}, default="identity")
RECIPES = {
    "bf16": BF16,
    "fp8": Recipe(PLAIN_MATRICES, default="fp8_block"),
    # weights that shared a bucket part; delayed scales begin, end and go on
    "mixed": Recipe(
        {
            **PLAIN_MATRICES,
            "delayed": "fp8_delayed:amax_history_len=3",
            "block": "fp8_delayed:amax_history_len=4",
            "nv": "nvfp4",
            "nv_late": "identity",
        },
        default="fp8_block",
    ),
}


def switched(reference: Undistributed, recipe: Recipe) -> Undistributed:
    """Return the same masters and moments, in the formats of another recipe."""
    after = copy.deepcopy(reference)
    for name, spec in reference.specs.items():
        fmt = PLAIN if spec.fmt == PLAIN else str(recipe.format_of(name))
        if fmt != str(zerocast.get_format(spec.fmt) if spec.fmt != PLAIN else PLAIN):
            after.specs[name] = dataclasses.replace(spec, fmt=fmt)
            _cast_anew(after, name)
    return after


def _cast_anew(reference: Undistributed, name: str) -> None:
    spec = reference.specs[name]
    reference.scale.pop(name, None)
    reference.history.pop(name, None)
    if spec.fmt.startswith("fp8_delayed"):
        reference.scale[name] = f32(1)
        reference.history[name] = np.zeros(zerocast.get_format(spec.fmt).amax_history_len, f32)
        reference._cast(name)  # seeds the scale
        seeded = reference.scale[name], reference.history[name]
        reference._cast(name)
        reference.scale[name], reference.history[name] = seeded
        held = {"scale": seeded[0].reshape(1), "amax_history": seeded[1]}
        reference.bytes[name] |= {key: value.view(np.uint8) for key, value in held.items()}
    else:
        reference._cast(name)


def switch(compared: Compared, recipe: Recipe) -> None:
    """Switch the run and its reference."""
    zerocast.switch(compared.probe, recipe)
    compared.reference = switched(compared.reference, recipe)
    compared.check("switched")


@on_ranks(*worlds(1, 2, 3, slow=[5]))
def test_bytes_are_those_of_a_run_that_starts_with_the_recipe():
    """Masters, moments, scales and bytes are the reference's after steps and switches, by the same parameters."""
    trainer = Compared()
    parameters = {name: id(parameter) for name, parameter in trainer.probe.named_parameters()}
    for number, name in enumerate(("bf16", "mixed", "fp8")):
        trainer.go_on(3 * number, 3 * number + 1)
        switch(trainer, RECIPES[name])
        verify(trainer.optimizer).raise_for_differences()
        trainer.go_on(3 * number + 2)
    verify(trainer.optimizer).raise_for_differences()
    assert {name: id(parameter) for name, parameter in trainer.probe.named_parameters()} == parameters


def test_the_same_recipe_changes_nothing():
    trainer = Trainer(Run())
    trainer.step(0)
    before, buffers = snapshot(trainer), trainer.optimizer._weights.buffers
    zerocast.switch(trainer.optimizer, Recipe({s.name: s.fmt for s in trainer.run.specs if s.fmt != PLAIN}))
    assert trainer.optimizer._weights.buffers is buffers
    casts.assert_same_bytes(before, snapshot(trainer))


# -- what is refused


def _accumulating(trainer: Trainer) -> Any:
    trainer.backward(1)
    return trainer.optimizer.zero_grad


def _in_no_sync(trainer: Trainer) -> Any:
    context = trainer.optimizer.no_sync()
    context.__enter__()

    def leave() -> None:
        context.__exit__(None, None, None)
        trainer.optimizer.zero_grad()

    return leave


def _after_no_sync(trainer: Trainer) -> Any:
    with trainer.optimizer.no_sync():
        trainer.backward(1)
    return trainer.optimizer.zero_grad


def _averaged(trainer: Trainer) -> Any:
    context = EMA(trainer.optimizer).swapped()
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


def _written(trainer: Trainer) -> Any:
    parameter = trainer.probe.get_parameter("embedding")
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter.add_(1)

    def undo() -> None:
        with torch.no_grad():
            parameter.copy_(before)
        trainer.optimizer._weights.gather.reclaim()

    return undo


MISUSES: dict[str, tuple[Callable[[Trainer], Any], str]] = {
    "accumulating": (_accumulating, "during gradient accumulation"),
    "in no_sync": (_in_no_sync, "during gradient accumulation"),
    "after no_sync": (_after_no_sync, "during gradient accumulation"),
    "averaged": (_averaged, "leave the context first"),
    "written": (_written, "parameters were written since the last step, among embedding"),
}


def to_bf16(optimizer: ZeroAdamW) -> None:
    zerocast.switch(optimizer, BF16)


def add(optimizer: ZeroAdamW) -> None:
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.zeros(3)))]})


@pytest.mark.parametrize("call", [to_bf16, add])
@pytest.mark.parametrize("case", MISUSES)
@on_ranks(2)
def test_only_between_steps(case, call):
    trainer = Compared()
    trainer.go_on(0)
    begin, said = MISUSES[case]
    undo = begin(trainer) if case != "written" or dist.get_rank() == 1 else lambda: None
    with pytest.raises(RuntimeError, match=said):
        call(trainer.optimizer)
    undo()
    trainer.check("nothing has changed")
    assert len(trainer.optimizer.param_groups) == 2
    call(trainer.optimizer)


REFUSED = {
    "shape": (Recipe(PLAIN_MATRICES, default="nvfp4"), "nvfp4 needs"),
    "plain": (Recipe({}, default="fp8_block"), "is a plain parameter and cannot become fp8_block"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_recipes_that_cannot_be(case):
    recipe, said = REFUSED[case]
    trainer = Trainer(Run())
    assert said in refused(trainer, lambda: zerocast.switch(trainer.optimizer, recipe))


@pytest.mark.parametrize("what", [nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.ones(1))]), 3])
def test_what_owns_no_masters(what):
    with pytest.raises(TypeError, match="owns masters"):
        zerocast.switch(what, BF16)


@pytest.mark.notices(
    "ranks `switch` to different recipes", where="ZeroAdamW", answer="raises on all ranks, nothing changed"
)
@on_ranks(2)
def test_ranks_with_other_recipes():
    trainer = Compared()
    for mine in (BF16, Recipe(PLAIN_MATRICES)) if dist.get_rank() else (RECIPES["mixed"], RECIPES["fp8"]):
        with pytest.raises(ValueError, match="to become"):
            zerocast.switch(trainer.optimizer, mine)
    trainer.check("nothing has changed")


@on_ranks(2)
def test_memory_that_runs_out_on_one_rank():
    """All ranks go back if one runs out of memory while the new buffers are made."""
    trainer = Compared()
    convert = trainer.optimizer._weights.convert

    def dies(formats: Mapping[str, Any]) -> None:
        with OutOfMemory(5):
            convert(formats)

    with mock.patch.object(trainer.optimizer._weights, "convert", dies if dist.get_rank() else convert):
        part = trainer.optimizer.switch_part()
    with (
        mock.patch.object(trainer.optimizer, "switch_part", return_value=part),
        pytest.raises(RuntimeError, match="rank 1: injected"),
    ):
        zerocast.switch(trainer.optimizer, BF16)
    trainer.check("as before")
    trainer.go_on(0)
    switch(trainer, BF16)


def test_memory_that_runs_out_anywhere():
    """A switch that runs out of memory on one rank, at any operator, changes nothing, and training goes on."""
    counting = Trainer(Run())
    with OutOfMemory(-1) as count:
        zerocast.switch(counting.optimizer, RECIPES["mixed"])
    trainer = Compared()
    for at in range(0, count.count, 7):
        with (
            OutOfMemory(at, afterwards=at % 2 == 1),
            pytest.raises((RuntimeError, torch.OutOfMemoryError), match="injected"),
        ):
            zerocast.switch(trainer.optimizer, RECIPES["mixed"])
        trainer.check(f"operator {at}")
    trainer.go_on(0)


def test_captured_steps_are_captured_again():
    trainees = [Trainee(CapturedCase()) for _ in range(2)]
    captured, eager = trainees
    with repeated():
        step = captured.optimizer.capture(captured.run.max_norm)
    unknown = captured.capture()  # of which the optimizer does not know
    for number in range(4):
        for trainee in trainees:
            trainee.backward(number)
        step()
        eager.ordinary_step()
        if number == 1:
            for trainee in trainees:
                trainee.optimizer.zero_grad()
                zerocast.switch(trainee.optimizer, RECIPES["mixed"])
            assert captured.held().keys() == eager.held().keys()
    casts.assert_same_bytes(captured.held(), eager.held())
    for trainee in trainees:
        trainee.backward(4)
    unknown()  # finds that memory moved, takes an ordinary step and records again
    eager.ordinary_step()
    casts.assert_same_bytes(captured.held(), eager.held())
