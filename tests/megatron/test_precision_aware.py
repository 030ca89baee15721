"""The precision-aware optimizer: TransformerEngine's FusedAdam with narrow moments, FP32 masters outside of it that are cast."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.checkpoints import State, loaded, saved
from tests.megatron.host_on_cpu import needs_four_bits, needs_megatron
from tests.megatron.te import needs_te
from tests.megatron.training import (
    ALL_LAYERS,
    MIXED,
    Case,
    Run,
    build,
    build_chunk,
    build_optimizer,
)
from tests.workers import Ranks, error_of
from zerocast.integrations import megatron as integration


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


pytestmark = [needs_megatron, needs_te]
KINDS = ["dp_reshardable", "fully_reshardable"]


def case(dtype: torch.dtype, formats: str = MIXED, **more: Any) -> Case:
    """With moments of a dtype."""
    moments = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    return Case(formats, fused_adam=True, options={"use_precision_aware_optimizer": True, **moments}, **more)


@needs_four_bits
def test_an_optimizer_alone_inside(ranks: Ranks) -> None:
    assert ranks(2)(optimizer_inside, case(torch.bfloat16, "fp8_current", te=ALL_LAYERS)) == [{}, {}]


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
