"""The precision-aware optimizer: TransformerEngine's FusedAdam with narrow moments, FP32 masters outside of it that are cast."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.checkpoints import State, loaded, resume, saved
from tests.megatron.host_on_cpu import WHY_NOT, needs_four_bits, needs_megatron
from tests.megatron.te import needs_te
from tests.megatron.training import (
    ALL_LAYERS,
    FORMATS,
    MIXED,
    Case,
    Run,
    build,
    build_attached,
    build_chunk,
    build_optimizer,
    optimizer_config,
    train,
)
from tests.selection import worlds
from tests.workers import Ranks, error_of
from zerocast import verify
from zerocast.integrations import megatron as integration

if not WHY_NOT:
    from megatron.core.optimizer import get_megatron_optimizer


def train_experts(case: Case) -> tuple[dict[str, int], bool]:
    """Stale bytes after three steps, and what verify says."""
    with case.host():
        run, attached = build_attached(case)
        for number in range(3):
            run.step(number)
        return run.stale_bytes(), verify(attached).ok


def built_outside(case: Case) -> str:
    """What `attach` says of a model and an optimizer that Megatron built by itself."""
    with case.host():
        run = build(case)
        return error_of(lambda: integration.attach(run.optimizer, run.ddp))


def optimizer_inside(case: Case) -> dict[str, int]:
    """Stale bytes where Megatron wrapped a model by itself, and the optimizer alone was built in `quantized_params()`."""
    with case.host():
        ddp = build_chunk(case)
        with integration.quantized_params():
            run = Run(ddp, build_optimizer(case, [ddp]), case)
        integration.attach(run.optimizer, ddp)
        run.step(0)
        return run.stale_bytes()


def one_configuration(case: Case, first: bool) -> tuple[dict[str, int], bool, bool]:
    """A quantized model, and a plain one of the same OptimizerConfig that is built outside, `first` or last: stale bytes of the
    one, whether the FusedAdam of the other finds its gradients, and whether the configuration is as it was.
    """
    with case.host():
        config, plain = optimizer_config(case), dataclasses.replace(case, formats="plain")
        before = dict(vars(config))

        def built(case: Case) -> Run:
            ddp = build_chunk(case)
            return Run(ddp, get_megatron_optimizer(config, [ddp]), case)

        other = built(plain) if first else None
        with integration.quantized_params():
            run = built(case)
        integration.attach(run.optimizer, run.ddp)
        other = other or built(plain)
        run.step(0)
        other.forward_and_backward(0)
        other.optimizer.prepare_grads()
        shards = [
            shard
            for one in other.optimizer.chained_optimizers
            for group in one.optimizer.param_groups
            for shard in group["params"]
        ]
        return run.stale_bytes(), all(hasattr(shard, "decoupled_grad") for shard in shards), before == vars(config)


def half_masters() -> str:
    """What is said where masters are FP16."""
    options = {"use_precision_aware_optimizer": True, "main_params_dtype": torch.float16}
    case = dataclasses.replace(Case("fp8_current", fused_adam=True), options=options)
    with case.host():
        return error_of(lambda: build_attached(case))


pytestmark = [needs_megatron, needs_te]
KINDS = ["dp_reshardable", "fully_reshardable"]
SLOW = pytest.mark.slow


def case(dtype: torch.dtype, formats: str = MIXED, **more: Any) -> Case:
    """With moments of a dtype."""
    moments = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    return Case(formats, fused_adam=True, options={"use_precision_aware_optimizer": True, **moments}, **more)


@pytest.mark.shows(host="Megatron-Core", parallel="data", formats=FORMATS[MIXED].values())
@pytest.mark.parametrize("world", worlds(3, slow=[2, 4]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_live_bytes_are_the_cast_of_the_masters(ranks: Ranks, world: int, dtype: torch.dtype) -> None:
    for losses, wrong in ranks(world)(train, case(dtype, overlap=True, bucket_size=10_000)):
        assert not wrong and losses[2] < losses[0]


@pytest.mark.parametrize("formats", ["half", "other half"])
def test_beside_an_optimizer_of_plain_parameters(ranks: Ranks, formats: str) -> None:
    """Optimizers of one configuration keep their masters alike, whichever is built first."""
    for found in ranks(2)(train_experts, case(torch.bfloat16, formats, experts=True)):
        assert found == ({}, True)


@pytest.mark.parametrize("first", [True, False], ids=["built before", "built after"])
def test_an_optimizer_of_the_same_configuration_elsewhere(ranks: Ranks, first: bool) -> None:
    """It keeps its masters as Megatron has them, and the configuration stays the user's."""
    assert ranks(1)(one_configuration, case(torch.bfloat16, "fp8_current"), first) == [({}, True, True)]


@needs_four_bits
def test_tensors_of_transformer_engine(ranks: Ranks) -> None:
    for losses, wrong in ranks(2)(train, case(torch.bfloat16, "te", te=ALL_LAYERS)):
        assert not wrong and losses[2] < losses[0]


def test_in_the_configuration_for_delayed_scaling(ranks: Ranks) -> None:
    """For which Megatron leaves masters and cast to the fused Adam; megatron.training names it for models of any format."""
    run = case(torch.bfloat16)
    for losses, wrong in ranks(2)(train, dataclasses.replace(run, options={**run.options, "fp8_recipe": "delayed"})):
        assert not wrong and losses[2] < losses[0]


@needs_four_bits
def test_an_optimizer_alone_inside(ranks: Ranks) -> None:
    assert ranks(2)(optimizer_inside, case(torch.bfloat16, "fp8_current", te=ALL_LAYERS)) == [{}, {}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=SLOW)], ids=str)
def test_resume_is_exact(ranks: Ranks, dtype: torch.dtype, kind: str) -> None:
    for same, wrong in ranks(2)(resume, case(dtype, overlap=True), kind):
        assert all(same.values()), same
        assert not wrong


@pytest.mark.parametrize(("before", "after", "kind"), [(2, 3, KINDS[0]), (3, 2, KINDS[1])])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_numbers_of_ranks(
    ranks: Ranks, tmp_path: Path, dtype: torch.dtype, before: int, after: int, kind: str
) -> None:
    """FP16 moments are numbers in a checkpoint, and are scaled anew: within a rounding of what they were."""
    run = case(dtype, overlap=True)
    written: State = ranks(before)(saved, run, str(tmp_path), kind)[0]
    for state, steps, wrong in ranks(after)(loaded, run, str(tmp_path), kind):
        assert steps == {3.0} and not wrong
        for key, whole in written.items():
            for name, tensor in whole.items():
                bound = 0.0 if dtype is torch.bfloat16 or key == "master" else float(tensor.abs().max()) * 2.0**-10
                assert float((state[key][name] - tensor).abs().max()) <= bound, (key, name)


def test_masters_inside_the_fused_adam_are_refused(ranks: Ranks) -> None:
    for said in ranks(2)(built_outside, case(torch.bfloat16, "fp8_current", te=ALL_LAYERS)):
        assert re.match(r"ValueError: use_precision_aware_optimizer keeps .*inside quantized_params\(\)", said), said
    for said in ranks(2)(half_masters):
        assert re.match("ValueError: main_params_dtype is not supported: .* leave it at torch.float32", said), said
