"""The cases of the CPU on GPUs over NCCL, where the host needs no stand-in; and the example, a GPU a rank."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices import gpus
from tests.megatron import attaching, muon, test_delayed
from tests.megatron.attaching import offloaded
from tests.megatron.gpt import FORMATS as GPT_FORMATS
from tests.megatron.gpt import train as train_gpt
from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.test_checkpoints import KINDS
from tests.megatron.test_one_rank import ON_GPUS, fail_on_one_rank
from tests.megatron.test_parallel import PARALLEL, said
from tests.megatron.training import FORMATS, Case, check_loaded, resume, saved, train, train_chunks
from tests.workers import Ranks

ONE, TWO = [pytest.param(1, marks=gpus(1)), pytest.param(2, marks=gpus(2))]
SECONDS = 240.0  # the first case sets the GPUs up

pytestmark = needs_megatron


@pytest.mark.shows(host="Megatron-Core", parallel="data", formats=lambda formats: FORMATS[formats].values())
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("formats", ["fp8_block", "fp8_current", "nvfp4", "mixed"])
@pytest.mark.parametrize("world", [ONE, TWO])
def test_live_bytes_are_the_cast_of_the_masters(gpu_ranks: Ranks, world: int, formats: str, overlap: bool) -> None:
    gpu_ranks(world)(train, Case(formats, overlap, bucket_size=10_000), timeout=SECONDS)


@pytest.mark.shows(host="Megatron-Core", parallel="data, buffers of experts", formats=FORMATS["mixed"].values())
@pytest.mark.parametrize("busbw", [False, True], ids=["", "padded for bandwidth"])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("world", [TWO])
def test_chained_optimizers_with_buffers_of_experts(gpu_ranks: Ranks, world: int, overlap: bool, busbw: bool) -> None:
    gpu_ranks(world)(train, Case("mixed", overlap, busbw, experts=True), timeout=SECONDS)


@pytest.mark.parametrize("name", ON_GPUS)
@pytest.mark.parametrize("world", [TWO])
def test_one_rank(gpu_ranks: Ranks, world: int, name: str) -> None:
    """All raise in the cast, before the gathers of the host."""
    gpu_ranks(world)(fail_on_one_rank, name, True, timeout=SECONDS)


@pytest.mark.skipif(bool(muon.WHY_NO_MUON), reason=muon.WHY_NO_MUON or "there is Muon")
@pytest.mark.shows(
    host="Megatron-Core", parallel="data, whole matrices", formats=lambda formats: FORMATS[formats].values()
)
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("formats", ["fp8_block", "fp8_current", "nvfp4", "mixed"])
@pytest.mark.parametrize("world", [ONE, TWO])
def test_muon(gpu_ranks: Ranks, world: int, formats: str, overlap: bool) -> None:
    """Muon is that of emerging_optimizers where it is installed, else torch's."""
    gpu_ranks(world)(muon.train, Case(formats, overlap, experts=True), timeout=SECONDS)


@pytest.mark.shows(host="Megatron-Core", parallel="data, model chunks", formats=FORMATS["mixed"].values())
@pytest.mark.parametrize("world", [TWO])
def test_model_chunks_of_one_optimizer(gpu_ranks: Ranks, world: int) -> None:
    gpu_ranks(world)(train_chunks, Case("mixed", True, bucket_size=10_000), timeout=SECONDS)


@pytest.mark.shows(host="Megatron-Core", parallel=said, formats=GPT_FORMATS.values())
@pytest.mark.parametrize("name", [name for name, (ranks, _) in PARALLEL.items() if ranks == 2])
@pytest.mark.parametrize("world", [TWO])
def test_other_parallelism(gpu_ranks: Ranks, world: int, name: str) -> None:
    gpu_ranks(world)(train_gpt, PARALLEL[name][1], timeout=SECONDS)


@pytest.mark.shows(host="Megatron-Core", parallel="data", formats=["fp8_delayed", "fp8_current"])
@pytest.mark.parametrize("world", [ONE, TWO])
def test_delayed_scaling(gpu_ranks: Ranks, world: int) -> None:
    gpu_ranks(world)(test_delayed.train, 5, timeout=SECONDS)


RESUMED: dict[str, tuple[Any, Case, str]] = {
    "muon": (muon.resume, Case("delayed", overlap=True, experts=True), KINDS[0])
}
for kind in KINDS:
    for formats in ("mixed", "delayed"):
        RESUMED[f"{formats} {kind}"] = resume, Case(formats, overlap=True), kind
    for fraction in (1.0, 0.5):
        RESUMED[f"offloaded {fraction} {kind}"] = resume, offloaded(fraction=fraction, streams=True, overlap=True), kind


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("world", [ONE, TWO])
def test_resume_is_exact(gpu_ranks: Ranks, tmp_path: Path, world: int, name: str) -> None:
    if name == "muon" and muon.WHY_NO_MUON:
        pytest.skip(muon.WHY_NO_MUON)
    function, case, kind = RESUMED[name]
    gpu_ranks(world)(function, case, str(tmp_path), kind, timeout=SECONDS)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("world", [ONE])
def test_offloaded_masters_detached_and_attached_again(gpu_ranks: Ranks, world: int, fraction: float) -> None:
    case = offloaded(fraction=fraction, streams=True, overlap=True)
    gpu_ranks(world)(attaching.reattach, case, timeout=SECONDS)


@pytest.mark.parametrize("world", [TWO])
def test_other_numbers_of_ranks(gpu_ranks: Ranks, tmp_path: Path, world: int) -> None:
    case = Case("mixed", overlap=True, experts=True)
    written = gpu_ranks(world)(saved, case, str(tmp_path), KINDS[0], timeout=SECONDS)[0]
    gpu_ranks(1)(check_loaded, case, str(tmp_path), KINDS[0], written, timeout=SECONDS)


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_block"])
@pytest.mark.parametrize("world", [ONE, TWO])
def test_the_example(world: int, fmt: str) -> None:
    line = f"-m torch.distributed.run --standalone --nproc-per-node {world} -m examples.megatron.pretrain_gpt --overlap"
    command = [sys.executable, *line.split(), "--format", fmt, "--steps", "21"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert said.returncode == 0, said.stderr[-3000:]
    losses = [float(text.split("loss ")[1]) for text in said.stdout.splitlines() if text.startswith("step")]
    assert losses[-1] < losses[0] - 0.5, said.stdout
    assert torch.cuda.device_count() >= world


@pytest.mark.shows(host="Megatron-Core", parallel="data", formats=lambda formats: FORMATS[formats].values())
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("formats", ["fp8_block", "fp8_current", "nvfp4", "square", "delayed"])
@pytest.mark.parametrize("world", [ONE, TWO])
def test_offloaded_masters_are_cast_as_on_the_device(
    gpu_ranks: Ranks, world: int, formats: str, fraction: float
) -> None:
    """Losses, masters, moments and bytes, to the bit."""
    case = offloaded(formats, fraction, streams=True, overlap=True, in_fp32=formats == "fp8_block")
    gpu_ranks(world)(attaching.compare_with_the_device, case, timeout=SECONDS)


@pytest.mark.parametrize("formats", ["fp8_block", "nvfp4"])
@pytest.mark.parametrize("world", [ONE])
def test_the_gpu_does_not_hold_offloaded_masters(gpu_ranks: Ranks, world: int, formats: str) -> None:
    ((ours, theirs),) = gpu_ranks(world)(attaching.measure_memory, offloaded(formats, streams=True), timeout=SECONDS)
    assert ours.masters == theirs.masters > 64 << 20
    assert ours.live == pytest.approx(ours.predicted, rel=0.02)
    assert theirs.live - ours.live == pytest.approx(ours.masters, rel=0.02)
    assert ours.step < ours.masters / 4
