"""One of two processes that Lightning runs raises alone: what the other one does, under ZeroStrategy and under DDPStrategy."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import zerocast
from tests.trainers.test_runs import ROOT

pytest.importorskip("lightning", reason="lightning is not installed: make hosts")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STRATEGIES = pytest.mark.parametrize("strategy", ["zero", "ddp"])
# The timeout of a process group that no test waits for.
HALF_AN_HOUR = 1800


def said_by(folder: Path, strategy: str, where: str, rank: int, seconds: int) -> str:
    """What both processes print of a run in which a rank raises alone. They end, and nothing is saved that loads."""
    arguments = [strategy, where, str(rank), str(seconds), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "said").open("w") as said:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.trainers.raises_alone", *arguments],
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            timeout=240,
            check=False,
        )
    text = (folder / "said").read_text()
    assert ended.returncode != 0, text
    assert not (folder / "went on").exists(), text
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    assert len(pids) == 2, text
    end = time.monotonic() + 30
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.5)
    assert not any(map(is_running, pids))
    if strategy == "zero":
        assert zerocast.optim.Checkpoints(folder / "saved.ckpt" / "zerocast" / "0").steps() == []
    return text


def is_running(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@STRATEGIES
@pytest.mark.parametrize("rank", [0, 1])
def test_while_all_save_none_waits(strategy: str, rank: int, tmp_path: Path) -> None:
    """The process that raises ends, and the collective that the other one is in fails with it."""
    assert f"rank {rank} raises alone" in said_by(tmp_path, strategy, "save", rank, HALF_AN_HOUR)


@STRATEGIES
def test_in_a_step(strategy: str, tmp_path: Path) -> None:
    """OnExceptionCheckpoint then saves on that rank while the other one steps. Under Lightning's own DDPStrategy both wait for
    the timeout of their process group.
    """
    said = said_by(tmp_path, strategy, "step", 1, 20)
    assert ("Timed out waiting 20000ms" in said) or strategy == "zero", said
