"""On two GPUs over NCCL, started by torchrun as a user would: the bytes, and a run that is resumed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices import gpus
from tests.torchtitan.host_on_cpu import needs_torchtitan
from tests.torchtitan.training import EXPERTS, MIXED, SAVING, SLICED, TENSOR, Case

pytestmark = [needs_torchtitan, *gpus(2)]
ROOT = Path(__file__).parents[2]
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def launch(case: Case, folder: Path, world: int = 2) -> Any:
    """Run `torchrun.py` under torchrun; returns what it wrote."""
    result = folder / "result.json"
    command = [
        *LAUNCHER,
        str(world),
        "-m",
        "tests.torchtitan.torchrun",
        str(result),
        *case.arguments(str(folder)),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(result.read_text())


def check_trained(case: Case, folder: Path, world: int = 2) -> None:
    """Run it: the loss falls, and the gathered bytes are right."""
    found = launch(case, folder, world)
    assert found["losses"][-1] < found["losses"][0] - 0.1
    assert not found["complaints"] and not found["differences"]


@pytest.mark.shows(host="torchtitan", parallel="data", formats=lambda fmt: [fmt], ranks=2)
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_block", "fp8_current", "fp8_delayed", "mxfp8"])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(fmt: str, tmp_path: Path) -> None:
    """A resumed run equals the uninterrupted one, and its gathered bytes are those of the unsharded cast."""
    case = Case(fmt, options=(*SAVING, "--debug.deterministic"))
    whole = launch(case, tmp_path)
    resumed = launch(case.having("--checkpoint.load_step=2"), tmp_path)
    assert whole["device"] == "cuda:0"
    assert whole["losses"][-1] < whole["losses"][0] - 0.1
    assert resumed["losses"] == whole["losses"][2:]
    assert resumed["contents"] == whole["contents"]
    assert not any(run[key] for run in (whole, resumed) for key in ("complaints", "differences"))


@pytest.mark.parametrize(
    "options",
    [
        ("--compile.enable",),
        ("--activation_checkpoint.mode=selective",),
        ("--training.enable_cpu_offload",),
        ("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.async_mode=async_with_pinned_mem"),
    ],
    ids=lambda options: options[-1],
)
def test_options(options: tuple[str, ...], tmp_path: Path) -> None:
    check_trained(Case(MIXED, options=options), tmp_path)


@pytest.mark.shows(
    host="torchtitan", parallel="context", formats=["nvfp4", "fp8_block", "mxfp8", "fp8_current"], ranks=2
)
def test_context_parallelism(tmp_path: Path) -> None:
    """Torch's context parallelism sends keys and values round, and FSDP2 shards over the ranks of one sequence."""
    check_trained(Case(MIXED, options=("--parallelism.context_parallel_degree=2",)), tmp_path)


@pytest.mark.shows(host="torchtitan", parallel="data", formats=["nvfp4", "mxfp8", "fp8_block"], ranks=2)
@pytest.mark.parametrize("options", [(), ("--activation_checkpoint.mode=full",)], ids=["", "recomputed"])
def test_experts(options: tuple[str, ...], tmp_path: Path) -> None:
    check_trained(Case(EXPERTS % "nvfp4", "fused", options=("--model.name=corpus_experts", *options)), tmp_path)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 CUDA devices")
@pytest.mark.shows(
    host="torchtitan", parallel="data, tensor", formats=["nvfp4", "fp8_current", "mxfp8", "fp8_delayed"], ranks=4
)
@pytest.mark.parametrize("options", [(), ("--compile.enable",)], ids=["", "compiled"])
def test_tensor_parallelism(options: tuple[str, ...], tmp_path: Path) -> None:
    check_trained(Case(SLICED, options=(*TENSOR, *options)), tmp_path, world=4)


def test_the_launch_line(tmp_path: Path) -> None:
    """torchtitan's own entry runs with the module that README.md names. `tests.torchtitan.corpus` stands for a
    data set.
    """
    command = [*LAUNCHER, "2", "-m", "torchtitan.train", *Case().arguments(str(tmp_path))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    if "No module named 'datasets'" in done.stderr:
        pytest.skip("torchtitan's own entry needs the package datasets")
    assert done.returncode == 0 and "Training completed" in done.stderr + done.stdout, done.stderr[-4000:]
