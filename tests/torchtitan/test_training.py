"""torchtitan's Trainer learns with quantized weights, and every gathered byte is that of an unsharded cast of the masters."""

from pathlib import Path

import pytest

from tests.torchtitan.host_on_cpu import needs_torchtitan
from tests.torchtitan.training import EXPERTS, MIXED, SLICED, TENSOR, Case, amaxes_are_measured, train
from tests.workers import Ranks

pytestmark = needs_torchtitan
slow = pytest.mark.slow


def experts(fmt: str, *options: str) -> Case:
    """Return a case of a mixture of experts. Its optimizers, which balance load, are torchtitan's."""
    return Case(EXPERTS % fmt, "foreach", options=("--model.name=corpus_experts", *options))


CASES = {
    "nvfp4": (2, Case("nvfp4")),
    "fp8_block, AdamW of torch": (2, Case("fp8_block", "foreach")),
    "formats side by side": (2, Case(MIXED)),
    "fp8_current": (2, Case("fp8_current")),
    "fp8_delayed": (2, Case("fp8_delayed")),
    "mxfp8": (2, Case("mxfp8")),
    "three ranks": (3, Case(MIXED)),
    "replicas": (4, Case(MIXED, options=("--parallelism.data_parallel_replicate_degree=2",))),
    "context": (2, Case(MIXED, options=("--parallelism.context_parallel_degree=2",))),
    "data and context": (4, Case(MIXED, options=("--parallelism.context_parallel_degree=2",))),
    "tensor": (4, Case(SLICED, options=TENSOR)),
    "tensor, AdamW of torch": (4, Case("nvfp4", "foreach", options=("--model.name=corpus_zerocast", *TENSOR))),
    "tensor, recomputed and verified": (
        4,
        Case(
            "nvfp4", options=(*TENSOR, "--activation_checkpoint.mode=full", "--quantize.linear.zerocast.verify_every=2")
        ),
    ),
    "tensor, compiled": (4, Case("nvfp4", options=(*TENSOR, "--compile.enable", "--compile.backend=aot_eager"))),
    "tensor and context": (8, Case("nvfp4", options=(*TENSOR, "--parallelism.context_parallel_degree=2"))),
    "tensor and replicas": (8, Case("nvfp4", options=(*TENSOR, "--parallelism.data_parallel_replicate_degree=2"))),
    "experts": (2, experts("nvfp4")),
    "experts, fp8_block": (2, experts("fp8_block")),
    "experts, fp8_current on three ranks": (3, experts("fp8_current")),
    "experts, recomputed": (2, experts("nvfp4", "--activation_checkpoint.mode=full")),
    "experts, compiled": (2, experts("nvfp4", "--compile.enable", "--compile.backend=aot_eager")),
    "experts, context": (2, experts("nvfp4", "--parallelism.context_parallel_degree=2")),
    "experts, tensor": (
        4,
        Case("layers.1.*.experts.*=nvfp4", "foreach", options=("--model.name=corpus_experts", *TENSOR)),
    ),
    "accumulation": (2, Case(MIXED, options=("--training.global_batch_size=8",))),
    "never resharded": (2, Case(MIXED, options=("--parallelism.fsdp_reshard_after_forward=never",))),
    "recomputation": (2, Case(MIXED, options=("--activation_checkpoint.mode=full",))),
    "selective recomputation": (2, Case(MIXED, options=("--activation_checkpoint.mode=selective",))),
    "compiled blocks": (2, Case("nvfp4", steps=3, options=("--compile.enable", "--compile.backend=aot_eager"))),
    "verified": (2, Case(MIXED, options=("--quantize.linear.zerocast.verify_every=2",))),
}
QUICK = ("nvfp4", "fp8_block, AdamW of torch", "context", "experts")
PARALLEL = {"replicas": "data, replicas", "context": "context", "data and context": "data, context"}
PARALLEL |= {name: "data" for name in CASES if name.startswith("experts")}
PARALLEL |= {"experts, context": "context", "experts, tensor": "data, tensor"}
PARALLEL |= {name: "data, tensor" for name in CASES if name.startswith("tensor")}
PARALLEL |= {"tensor and context": "context, tensor", "tensor and replicas": "data, tensor, replicas"}


@pytest.mark.shows(
    host="torchtitan",
    parallel=lambda name: PARALLEL.get(name, "data"),
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
