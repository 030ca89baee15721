"""One line before pretrain() of megatron.training."""

import functools
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron import installing, te
from tests.megatron.installing import FLAG
from tests.megatron.pretraining import FLAGS, ON_CPU, needs_training
from tests.megatron.training import NARROW
from tests.workers import Ranks

pytestmark = needs_training

TILES = "mxfp8:block=32x32"


def on(ranks: Ranks, world: int) -> Callable[..., list[Any]]:
    """A pretrain() takes longer than other cases."""
    return functools.partial(ranks(world), timeout=150.0)


TE_LAYERS = {name for name in installing.CASES if "MXFP8Tensor" in name or "tiles" in name or "one tensor" in name}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", installing.CASES)
def test_mistakes(ranks: Ranks, name: str) -> None:
    if name in TE_LAYERS and te.WHY_NOT:
        pytest.skip(te.WHY_NOT)
    for said in on(ranks, 2)(installing.say, name):
        assert re.match(installing.CASES[name][1], said), said


def test_trains_evaluates_saves_and_resumes(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    save = ("--save", folder, "--save-interval", "2")
    through = on(ranks, 2)(installing.train, "--train-iters", "4", *save)[0]
    assert (
        not through["stale"]
        and len(through["weights"]) == 4
        and set(through["weights"].values()) == {NARROW, "fp8_block"}
    )
    assert list(through["losses"]) == [1, 2, 3, 4] and through["losses"][4] < through["losses"][1]
    assert len(through["evaluated"]) >= 2
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = on(ranks, 2)(installing.train, "--train-iters", "4", "--load", folder)[0]
    assert list(resumed["losses"]) == [3, 4]
    assert resumed["losses"] == {step: through["losses"][step] for step in (3, 4)}
    assert same(resumed["masters"], through["masters"]) and not resumed["stale"]


@te.needs_te
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_weights_of_transformer_engine(ranks: Ranks, overlap: bool) -> None:
    """With an empty recipe they are cast, MXFP8 in tiles too, in buffers of bytes."""
    flags = ("--overlap-grad-reduce", "--overlap-param-gather") if overlap else ()
    for left in on(ranks, 2)(installing.train_te_layers, TILES, "--train-iters", "4", *flags):
        assert not left["stale"] and left["losses"][4] < left["losses"][1]
        assert set(left["weights"].values()) == {TILES} and len(left["weights"]) == 2


@pytest.mark.slow
def test_a_checkpoint_in_bf16_gives_masters_as_they_are(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    masters = on(ranks, 2)(installing.plain, "--train-iters", "1", "--save", folder, "--save-interval", "1")[0][
        "masters"
    ]
    held = on(ranks, 2)(installing.begun, "--train-iters", "1", "--finetune", "--load", folder)[0]
    assert same(held, {name: master.bfloat16().float() for name, master in masters.items()})


def test_by_the_command_line(ranks: Ranks) -> None:
    flags = ("--train-iters", "2", "--overlap-grad-reduce", "--overlap-param-gather")
    by_call, by_flag = on(ranks, 2)(installing.train, *flags)[0], on(ranks, 2)(installing.by_the_flag, *flags)[0]
    assert by_flag["losses"] == by_call["losses"] and same(by_flag["masters"], by_call["masters"])
    assert not by_flag["stale"] and by_flag["weights"] == by_call["weights"]


def test_the_norm_of_masters_in_host_memory(ranks: Ranks) -> None:
    for norm, expected, offloaded in on(ranks, 2)(
        installing.norm_of_masters, "--train-iters", "1", "--log-params-norm"
    ):
        assert offloaded and norm == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_values_are_hashed_and_masters_normed(ranks: Ranks) -> None:
    flags = ("--log-params-norm", "--check-weight-hash-across-dp-replicas-interval", "1")
    assert not on(ranks, 2)(installing.train, "--train-iters", "1", *flags)[0]["stale"]


@pytest.mark.slow
def test_nothing_is_done_without_a_recipe(ranks: Ranks) -> None:
    (without, *_), (installed, *_) = (
        on(ranks, 2)(installing.plain, "--train-iters", "2"),
        on(ranks, 2)(installing.installed_without_a_recipe),
    )
    assert installed["losses"] == without["losses"] and same(installed["masters"], without["masters"])
    assert not installed["weights"]


@pytest.mark.slow
def test_uninstall_gives_everything_back(ranks: Ranks) -> None:
    for changed, said, plain in on(ranks, 2)(installing.after_uninstall):
        assert not changed
        assert said.startswith("RuntimeError: step of") and "which was detached" in said
        assert not plain["weights"]


@pytest.mark.slow
def test_a_chunk_without_quantized_weights(ranks: Ranks) -> None:
    first, second = on(ranks, 2)(installing.chunks_without_weights)
    (empty, last), others = first, second
    assert not empty["weights"] and not any(one["weights"] for one in others)
    assert set(last["weights"].values()) == {NARROW} and len(last["weights"]) == 2
    assert not any(one["stale"] for one in (*first, *second))


def test_the_flags() -> None:
    read: Any = installing.parsed(*FLAG, "*.out=identity", "--zerocast-verify-every", "100")
    assert read.zerocast_recipe == [*FLAG[1:], "*.out=identity"] and read.zerocast_verify_every == 100
    assert installing.parsed().zerocast_recipe is None


@pytest.mark.parametrize("checkout", os.environ.get("ZEROCAST_MEGATRON", "").split(os.pathsep))
def test_the_stock_script(checkout: str, tmp_path: Path) -> None:
    """pretrain_gpt.py of a checkout of Megatron-LM, as it is: train, evaluate, save; resume on another number of ranks."""
    if not os.path.isdir(checkout):
        pytest.skip("ZEROCAST_MEGATRON names no checkout of Megatron-LM: make test-hosts")
    script, folder, here = Path(checkout, "pretrain_gpt.py"), tmp_path / "checkpoint", Path(__file__).parents[2]
    paths = os.pathsep.join([checkout, str(here), os.environ.get("PYTHONPATH", "")])
    # Megatron compiles with the Python of the path, and asks python3-config, which no virtual environment has, for a suffix.
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    suffix = f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"
    fmt = (
        "nvfp4"
        if "nvfp4_packed" in Path(checkout, "megatron/core/distributed/param_and_grad_buffer.py").read_text()
        else "fp8_block"
    )

    def run(ranks: int, *flags: str) -> str:
        launch = f"-m torch.distributed.run --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint localhost:0"
        own = ["--zerocast-recipe", f"*.linear_*.weight={fmt}", "--zerocast-verify-every", "1"]
        line = [sys.executable, *launch.split(), "-m", "tests.megatron.pretraining", str(script), *FLAGS.split()]
        environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "PATH": binaries,
            "MAKEFLAGS": suffix,
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        done = subprocess.run(
            [*line, *ON_CPU.split(), *own, *flags],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            env=environment,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return done.stdout

    said = run(2, "--train-iters", "2", "--save", str(folder), "--save-interval", "2")
    assert "successfully saved checkpoint from iteration       2" in said
    assert re.search(r"validation loss at iteration 2 .*lm loss value: \d", said)
    said = run(3, "--train-iters", "4", "--load", str(folder), "--override-opt_param-scheduler")
    assert "successfully loaded checkpoint" in said and re.search(r"iteration +4/ +4 .*lm loss: \d", said)
