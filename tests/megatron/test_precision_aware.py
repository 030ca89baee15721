"""The precision-aware optimizer: TransformerEngine's FusedAdam with narrow moments, FP32 masters outside of it that are cast."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron import precise
from tests.megatron.checkpoints import State, loaded, resume, saved
from tests.megatron.host_on_cpu import needs_four_bits, needs_megatron
from tests.megatron.te import needs_te
from tests.megatron.training import ALL_LAYERS, FORMATS, MIXED, Case, train
from tests.selection import worlds
from tests.workers import Ranks

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
    for found in ranks(2)(precise.train_experts, case(torch.bfloat16, formats, experts=True)):
        assert found == ({}, True)


@pytest.mark.parametrize("first", [True, False], ids=["built before", "built after"])
def test_an_optimizer_of_the_same_configuration_elsewhere(ranks: Ranks, first: bool) -> None:
    """It keeps its masters as Megatron has them, and the configuration stays the user's."""
    assert ranks(1)(precise.one_configuration, case(torch.bfloat16, "fp8_current"), first) == [({}, True, True)]


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
    assert ranks(2)(precise.optimizer_inside, case(torch.bfloat16, "fp8_current", te=ALL_LAYERS)) == [{}, {}]


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


@pytest.mark.notices(
    "the precision-aware optimizer with masters that are not FP32, or built outside `quantized_params()`",
    where="Megatron",
    answer="raises where the host builds it, or at `attach`, and says what to set",
)
def test_masters_inside_the_fused_adam_are_refused(ranks: Ranks) -> None:
    for said in ranks(2)(precise.built_outside, case(torch.bfloat16, "fp8_current", te=ALL_LAYERS)):
        assert re.match(r"ValueError: use_precision_aware_optimizer keeps .*inside quantized_params\(\)", said), said
    for said in ranks(2)(precise.half_masters):
        assert re.match("ValueError: main_params_dtype is not supported: .* leave it at torch.float32", said), said
