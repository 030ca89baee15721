"""The GPT example under torchrun with a GPU a rank: it trains."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices import gpus

pytestmark = gpus(2)
ROOT = Path(__file__).resolve().parents[2]
FORMATS = ("bf16", "fp8_block", "nvfp4")


def torchrun(module: str, arguments: str, out: Path) -> None:
    """Run a module on two ranks. It writes to `out`."""
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "-m", module]
    command += [*shlex.split(arguments), "--out", str(out)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fmt", FORMATS)
def test_training(tmp_path, fmt):
    for module in ("tyro", "tensorboard"):
        pytest.importorskip(module)
    torchrun("examples.gpt_pretrain.train", f"--format {fmt} --steps 40 --lr 3e-3 --device cuda", tmp_path)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["event"] == "train"]
    assert records[0]["ranks"] == 2
    assert records[0]["device"] == "cuda:0"
    assert losses[-1] < losses[0] - 1
