"""torchtitan's Trainer learns with quantized weights, and every gathered byte is that of an unsharded cast of the masters."""

from pathlib import Path

import pytest

from tests.torchtitan.host_on_cpu import needs_torchtitan
from tests.torchtitan.training import MIXED, Case, amaxes_are_measured, train
from tests.workers import Ranks

pytestmark = needs_torchtitan
slow = pytest.mark.slow

CASES = {
    "nvfp4": (2, Case("nvfp4")),
    "fp8_block, AdamW of torch": (2, Case("fp8_block", "foreach")),
    "formats side by side": (2, Case(MIXED)),
    "fp8_current": (2, Case("fp8_current")),
    "fp8_delayed": (2, Case("fp8_delayed")),
    "mxfp8": (2, Case("mxfp8")),
    "three ranks": (3, Case(MIXED)),
    "replicas": (4, Case(MIXED, options=("--parallelism.data_parallel_replicate_degree=2",))),
    "accumulation": (2, Case(MIXED, options=("--training.global_batch_size=8",))),
    "never resharded": (2, Case(MIXED, options=("--parallelism.fsdp_reshard_after_forward=never",))),
    "recomputation": (2, Case(MIXED, options=("--activation_checkpoint.mode=full",))),
    "selective recomputation": (2, Case(MIXED, options=("--activation_checkpoint.mode=selective",))),
    "compiled blocks": (2, Case("nvfp4", steps=3, options=("--compile.enable", "--compile.backend=aot_eager"))),
    "verified": (2, Case(MIXED, options=("--quantize.linear.zerocast.verify_every=2",))),
}
QUICK = ("nvfp4", "fp8_block, AdamW of torch")


@pytest.mark.shows(
    host="torchtitan",
    parallel=lambda name: "data, replicas" if name == "replicas" else "data",
    formats=lambda name: CASES[name][1].formats,
    ranks=lambda name: CASES[name][0],
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else slow) for name in CASES])
def test_gathered_bytes_are_the_cast_of_the_masters(ranks: Ranks, name: str, tmp_path: Path) -> None:
    world, case = CASES[name]
    for losses, complaints, differences in ranks(world)(train, case, str(tmp_path)):
        assert not complaints and not differences
        assert len(losses) == case.steps and losses[-1] < losses[0] - 0.1


def test_the_step_of_the_container_leaves_the_amaxes_that_it_measured(ranks: Ranks, tmp_path: Path) -> None:
    """Torch's hooks after a step run for torchtitan's container too, which is an optimizer."""
    for implementation, measured in (("zerocast", True), ("for-loop", False)):
        case = Case("nvfp4", implementation, steps=1)
        assert ranks(2)(amaxes_are_measured, case, str(tmp_path)) == [measured] * 2
