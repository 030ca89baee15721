"""accelerate, transformers' Trainer, Lightning's Trainer and Fabric with ZeroAdamW: train, clip, accumulate, save, resume."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.workers import in_a_process

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = {"accelerate": "accelerate", "transformers": "transformers", "fabric": "lightning", "lightning": "lightning"}
WORLDS = [1, pytest.param(2, marks=pytest.mark.slow)]
pytestmark = pytest.mark.timeout(300)


# A trainer of each integration whose loop is repeated by hand; each run imports for seconds.
QUICK = ("accelerate", "lightning")


@pytest.fixture(params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PACKAGE])
def trainer(request) -> str:
    package = PACKAGE[request.param]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make hosts readers")
    return request.param


def run(trainer: str, folder: Path, steps: int, world: int, resume: Path | None = None) -> list[dict[str, Any]]:
    """Return the report of each rank of a run."""
    arguments = ["tests.trainers.runs", trainer, str(folder), str(steps), str(resume or "")]
    return launched(arguments, folder.parent / f"report-{folder.name}", world)


def as_a_module(folder: Path, module: str, *arguments: str) -> None:
    """Run a module like `python -m`."""
    os.chdir(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")


def launched(arguments: list[str], report: Path, world: int) -> list[Any]:
    """Run a module with its arguments in a process for each rank. Return the report of each."""
    if world == 1:
        status, printed = in_a_process(as_a_module, report.parent, *arguments, str(report))
        assert status == 0, printed[-4000:]
        return [json.loads(Path(f"{report}.0").read_text())]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={world}"]
    command = [sys.executable, *launcher, "-m", *arguments, str(report)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, cwd=report.parent, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(Path(f"{report}.{rank}").read_text()) for rank in range(world)]


@pytest.mark.parametrize("world", WORLDS)
def test_a_run_is_what_its_own_calls_do_and_resumes(trainer: str, world: int, tmp_path: Path) -> None:
    if trainer == "transformers":
        pytest.skip("below: its loss is not a mean of micro-batches")
    steps = 6 if world == 1 else 3
    whole = run(trainer, tmp_path / "whole", 2 * steps, world)
    assert all(rank["digest"] == rank["by hand"] and rank["verified"] for rank in whole)
    assert all(rank["count"] == 4 * steps for rank in whole)
    if trainer == "lightning":
        check_validation(whole)
    check_resumed(trainer, whole, steps, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_muon(trainer: str, world: int, tmp_path: Path) -> None:
    if trainer == "transformers":
        pytest.skip("the others show what all of them do with an optimizer")
    steps = 6 if world == 1 else 3
    whole = run(f"{trainer}, Muon", tmp_path / "whole", 2 * steps, world)
    assert all(rank["digest"] == rank["by hand"] and rank["verified"] for rank in whole)
    check_resumed(f"{trainer}, Muon", whole, steps, tmp_path)


def check_resumed(trainer: str, whole: list[dict[str, Any]], steps: int, tmp_path: Path) -> None:
    """Check that half of a run, saved and resumed, ends like the whole run, to the bit."""
    world = len(whole)
    half = tmp_path / "whole" / f"step={steps}.ckpt"  # Lightning saves on its way, the others when they end
    if not trainer.startswith("lightning"):
        half = tmp_path / "half"
        run(trainer, half, steps, world)
    resumed = run(trainer, tmp_path / "resumed", 2 * steps, world, resume=half)
    assert [rank["digest"] for rank in resumed] == [rank["digest"] for rank in whole]
    assert all(rank["count"] == 4 * steps and rank["verified"] for rank in resumed)


def check_validation(ranks: list[dict[str, Any]]) -> None:
    """Check that masters of a folder and of a file, cast into a new module and into the trained one, give the
    fit's metric.
    """
    for rank in ranks:
        assert rank["loaded"] == [rank["validated"]] * len(rank["loaded"])
        assert rank["fresh"] != [rank["validated"]]
        assert rank["state is as before"]


@pytest.mark.slow
def test_another_number_of_ranks_resumes(trainer: str, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "of two"
    folder.parent.mkdir()
    run(trainer, folder, 6, 2)
    saved = {"lightning": folder / "step=3.ckpt", "transformers": folder.parent / "checkpoint-3"}.get(trainer, folder)
    (resumed,) = run(trainer, folder.parent / "of one", 12, 1, resume=saved)
    assert resumed["verified"]


@pytest.mark.parametrize("world", WORLDS)
def test_transformers(world: int, tmp_path: Path) -> None:
    """Losses and norms are near those of the stock Trainer and the same model in FP32, and resumed ones equal."""
    pytest.importorskip("transformers", reason="transformers is not installed: make readers")
    (tmp_path / "a").mkdir()
    whole = run("transformers", tmp_path / "a" / "run", 6, world)
    assert all(rank["verified"] and len(rank["logs"]) == 6 for rank in whole)
    assert whole[0]["read back"]
    for (loss, norm), (stock_loss, stock_norm) in zip(whole[0]["logs"], whole[0]["stock"], strict=True):
        assert abs(loss - stock_loss) < 0.05 and abs(norm - stock_norm) < 0.2 * stock_norm
    resumed = run("transformers", tmp_path / "a" / "again", 6, world, resume=tmp_path / "a" / "checkpoint-3")
    assert [rank["digest"] for rank in resumed] == [rank["digest"] for rank in whole]
    assert resumed[0]["logs"] == whole[0]["logs"]


@pytest.mark.slow
def test_what_nobody_would_reduce_is_refused(trainer: str, tmp_path: Path) -> None:
    """Parameters of a quantized model that no ZeroAdamW trains are refused."""
    if trainer == "transformers":
        pytest.skip("its backward pass is accelerate's")
    for of_rank in launched(["tests.trainers.runs", trainer], tmp_path / "refused", 2):
        for said, expected in of_rank:
            assert expected in said if expected else not said
