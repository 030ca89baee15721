"""The precision-aware optimizer: TransformerEngine's FusedAdam with narrow moments, FP32 masters outside of it that are cast."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.host_on_cpu import needs_four_bits, needs_megatron
from tests.megatron.training import (
    ALL_LAYERS,
    MIXED,
    Case,
    Run,
    State,
    build,
    build_chunk,
    build_optimizer,
    check_loaded,
    saved,
)
from tests.transformer_engine.host_on_cpu import needs_te
from tests.workers import Ranks, on_ranks
from zerocast.integrations import megatron as integration

pytestmark = [needs_megatron, needs_te]
KINDS = ["dp_reshardable", "fully_reshardable"]


def case(dtype: torch.dtype, formats: str = MIXED, **more: Any) -> Case:
    """A case with moments of a dtype."""
    moments = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    return Case(formats, fused_adam=True, options={"use_precision_aware_optimizer": True, **moments}, **more)


@on_ranks(2)
@needs_four_bits
def test_an_optimizer_alone_inside() -> None:
    """Megatron wraps a model by itself, and the optimizer alone is built in `quantized_params()`."""
    run_case = case(torch.bfloat16, "fp8_current", te=ALL_LAYERS)
    with run_case.host():
        ddp = build_chunk(run_case)
        with integration.quantized_params():
            run = Run(ddp, build_optimizer(run_case, [ddp]), run_case)
        integration.attach(run.optimizer, ddp)
        run.step(0)
        assert not run.stale_bytes()


@pytest.mark.parametrize(
    ("dtype", "before", "after", "kind"), [(torch.bfloat16, 2, 3, KINDS[0]), (torch.float16, 3, 2, KINDS[1])], ids=str
)
def test_other_numbers_of_ranks(
    ranks: Ranks, tmp_path: Path, dtype: torch.dtype, before: int, after: int, kind: str
) -> None:
    """FP16 moments are numbers in a checkpoint, and are scaled anew: within a rounding of what they were."""
    run = case(dtype, overlap=True)
    written: State = ranks(before)(saved, run, str(tmp_path), kind)[0]
    rounding = 0.0 if dtype is torch.bfloat16 else 2.0**-10
    ranks(after)(check_loaded, run, str(tmp_path), kind, written, rounding)


@on_ranks(2)
def test_masters_inside_the_fused_adam_are_refused() -> None:
    """Megatron built the model and the optimizer by itself."""
    run_case = case(torch.bfloat16, "fp8_current", te=ALL_LAYERS)
    with run_case.host():
        run = build(run_case)
        with pytest.raises(ValueError, match=r"use_precision_aware_optimizer keeps .*inside quantized_params\(\)"):
            integration.attach(run.optimizer, run.ddp)
