"""The examples run: every format, one and two ranks, resuming to the bit, and the demo with what it writes."""

import functools
import json
import math
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import tyro

from examples.gpt_pretrain import demo, train
from examples.gpt_pretrain.config import TrainConfig
from examples.gpt_pretrain.data import Corpus, standard_library_files
from examples.gpt_pretrain.launch import Run, RunFailedError
from examples.gpt_pretrain.measure import bytes_per_parameter, digest_of_weights, forward_buffers
from examples.gpt_pretrain.model import GPT, GPTConfig
from examples.gpt_pretrain.run_log import Record, RunLog, read_records
from examples.gpt_pretrain.world import World
from tests.selection import some
from tests.workers import Ranks

ROOT = Path(__file__).resolve().parents[2]
TINY = GPTConfig(n_layer=1, n_head=2, n_embd=128, context=32)
TINY_ARGUMENTS = shlex.split("--model.n-layer 1 --model.n-head 2 --model.n-embd 128 --model.context 32 --batch-size 2")
FORMATS = {name: name for name in ("bf16", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "mxfp4", "nvfp4")}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(3000)))
    return path


def tiny(text: Path, out: Path, **changes: object) -> TrainConfig:
    config = TrainConfig(model=TINY, data=(text,), out=out, steps=4, batch_size=2, eval_sequences=4, warmup_steps=2)
    return replace(config, **changes)


# --- data and model -------------------------------------------------------------------------------------------------


def test_batches_depend_on_seed_step_micro_step_and_rank_only():
    corpus = Corpus(os.urandom(100_000), context=16)
    places = [
        {"seed": seed, "step": step, "micro_step": micro_step, "rank": rank}
        for seed in (0, 1)
        for step in (0, 1)
        for micro_step in (0, 1)
        for rank in (0, 1)
    ]
    batches = [corpus.train_batch(4, **place) for place in places]
    again = [corpus.train_batch(4, **place) for place in reversed(places)][::-1]
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(batches, again, strict=True))
    assert len({tuple(batch.tokens.flatten().tolist()) for batch in batches}) == len(places)
    assert torch.equal(batches[0].tokens[:, 1:], batches[0].targets[:, :-1])


def test_ranks_share_out_the_validation_text():
    corpus = Corpus(os.urandom(100_000), context=16)
    whole = torch.cat([batch.tokens for batch in corpus.validation_batches(3, 10, rank=0, ranks=1)])
    parts = [torch.cat([batch.tokens for batch in corpus.validation_batches(3, 10, rank=r, ranks=4)]) for r in range(4)]
    assert whole.shape == (10, 16)
    assert sorted(whole.tolist()) == sorted(torch.cat(parts).tolist())


def test_no_byte_is_trained_and_validated_on():
    whole = os.urandom(700_000)
    corpus = Corpus(whole, context=16)
    assert len(corpus.train) + len(corpus.validation) == len(whole)
    assert 0.03 < len(corpus.validation) / len(whole) < 0.08


def test_too_little_text_says_so():
    with pytest.raises(ValueError, match="validation text has 2 bytes, too few for context 16"):
        Corpus(bytes(30), context=16)


def test_the_standard_library_is_text_enough():
    files = standard_library_files()
    assert files == standard_library_files()
    assert sum(file.stat().st_size for file in files) > 2_000_000
    assert not [file for file in files if "site-packages" in file.parts]


def test_model_is_causal_and_starts_at_chance():
    model = GPT(TINY)
    assert model.head.weight is model.embed.weight
    tokens = torch.randint(256, (2, TINY.context))
    changed = tokens.clone()
    changed[:, 20:] = 0
    assert torch.equal(model(tokens)[:, :20], model(changed)[:, :20])
    targets = torch.randint(256, tokens.shape)
    assert model.loss(tokens, targets).item() == pytest.approx(math.log(256), abs=0.15)


# --- one process ----------------------------------------------------------------------------------------------------


def test_the_command_line_is_the_config():
    arguments = ["--format", "nvfp4", "--data", "a", "b", "--model.n-layer", "2", "--stage", "1", "--overlap"]
    config = tyro.cli(TrainConfig, args=arguments)
    assert config == TrainConfig(
        format="nvfp4", data=(Path("a"), Path("b")), model=GPTConfig(n_layer=2), stage=1, overlap=True
    )


@pytest.mark.parametrize("name", some(FORMATS, "bf16", "fp8_delayed", "nvfp4"))
def test_every_format_trains_on_one_process(name: str, text: Path, tmp_path: Path):
    summary = train.main(tiny(text, tmp_path, format=name, steps=30, lr=5e-3))
    events = read_records(tmp_path / "metrics.jsonl")
    losses = [record["loss"] for record in events if record["event"] == "train"]
    assert len(losses) == 30
    assert losses[-1] < losses[0] - 1
    assert {record["event"] for record in events} == {"start", "train", "validation", "end"}
    assert summary["skipped_steps"] == 0
    assert "weight_gather" not in summary["traffic_bytes_per_parameter"]
    assert list((tmp_path / "tensorboard").iterdir())


def test_casts_and_phases_are_measured_now_and_then(text: Path, tmp_path: Path):
    train.main(tiny(text, tmp_path, format="nvfp4", steps=5, measure_every=2, grad_accum=2))
    measured = [record for record in read_records(tmp_path / "metrics.jsonl") if record["event"] == "measured"]
    assert [record["step"] for record in measured] == [2, 4]
    for record in measured:
        assert len(record["weights"]) == 4
        assert 0 < record["cast_error"] < 0.2
        assert 0 < record["unchanged_percent"] < 100
        phases = [record[f"ms/{name}"] for name in ("forward", "backward", "norm", "step")]
        assert 0 < min(phases) < sum(phases) < record["ms/total"]
    assert b"measured/ms/step" in b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())


def test_bytes_are_those_of_the_buffers(text: Path, tmp_path: Path):
    def forward(name: str, **shape: object) -> float:
        config = tiny(text, tmp_path, format=name, model=replace(TINY, **shape))
        return bytes_per_parameter(train.build_model(config, torch.device("cpu")))["forward"]

    embedding = 256 * 128
    blocks = 12 * 128 * 128
    norms = 3 * 128
    count = embedding + blocks + norms
    assert forward("bf16") == pytest.approx((2 * (embedding + blocks) + 4 * norms) / count)
    codes_and_scales = blocks / 2 + blocks / 16
    assert forward("nvfp4") == pytest.approx((2 * embedding + codes_and_scales + 4 * norms) / count, rel=1e-3)


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in read_records(out / "metrics.jsonl") if record["event"] == "train"]


@pytest.mark.parametrize(
    ("name", "late", "optimizer"),
    [("nvfp4", "bf16", "adamw"), ("bf16", "fp8_delayed", "adamw"), ("nvfp4", "fp8_block", "muon")],
)
def test_a_late_format_resumes_to_the_bit(text: Path, tmp_path: Path, name: str, late: str, optimizer: str):
    """The format changes with step 5 of 8; a run that goes on from step 6 has the same losses."""
    both = {"format": name, "optimizer": optimizer, "steps": 8, "deterministic": True}
    config = tiny(text, tmp_path / "whole", late_format=late, late_share=0.5, **both)
    whole = train.main(replace(config, checkpoint_every=1))
    read = whole["weight_bytes_per_parameter"]["forward"]
    assert (read > 1.9) == (late == "bf16")
    train.main(tiny(text, tmp_path / "constant", **both))
    expected = losses(tmp_path / "whole")
    # unquantized, the constant run starts from masters that are rounded to bf16
    assert expected[:4] == pytest.approx(losses(tmp_path / "constant")[:4], rel=1e-2 if name == "bf16" else 0)
    # The last three checkpoints are kept.
    for later in (7, 8):
        shutil.rmtree(tmp_path / "whole" / "checkpoints" / f"step_{later:08}")
    train.main(replace(config, resume=True))
    assert losses(tmp_path / "whole") == expected


def test_muon_learns_and_is_measured(text: Path, tmp_path: Path):
    train.main(tiny(text, tmp_path, format="nvfp4", optimizer="muon", steps=16, lr=5e-3, measure_every=8))
    found = losses(tmp_path)
    assert found[-1] < found[0] - 1
    measured = [record for record in read_records(tmp_path / "metrics.jsonl") if record["event"] == "measured"]
    assert all(len(record["weights"]) == 4 for record in measured) and len(measured) == 2
    with pytest.raises(ValueError, match=r"optimizer=muon needs parallel=zero, got fsdp2"):
        tiny(text, tmp_path, optimizer="muon", parallel="fsdp2")


def test_resume_without_a_checkpoint_says_so(text: Path, tmp_path: Path):
    with pytest.raises(SystemExit, match="no complete checkpoint"):
        train.main(tiny(text, tmp_path, resume=True))


def test_a_resumed_log_drops_what_will_be_written_again(tmp_path: Path):
    for resumed_at in (0, 3):
        log = RunLog(tmp_path, resumed_at=resumed_at, enabled=True)
        for step in range(resumed_at, 5):
            log.write("train", step + 1, loss=float(step), resumed_at=resumed_at)
        log.close()
    records = read_records(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["resumed_at"]) for record in records] == [(1, 0), (2, 0), (3, 0), (4, 3), (5, 3)]


def test_a_rank_that_stood_still_does_not_write_into_the_log_that_goes_on(tmp_path: Path):
    """Rank 0 of the run before wakes up after another process has taken over the log."""
    before, after = (RunLog(tmp_path, resumed_at=0, enabled=True) for _ in range(2))
    after.write("train", 1, loss=2.0)
    before.write("train", 1, loss=3.0)
    after.write("train", 2, loss=1.0)
    records = read_records(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["loss"]) for record in records] == [(1, 2.0), (2, 1.0)]
    for log in (before, after):
        log.close()


# --- two processes --------------------------------------------------------------------------------------------------


def on_this_rank(arguments: list[str]) -> None:
    """Run train.py on a rank of the pool, like torchrun."""
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    with mock.patch.object(World, "join", return_value=world), mock.patch.object(World, "leave"):
        train.main(tyro.cli(TrainConfig, args=arguments))


class OnThePool(Run):
    """A run that is over once it has begun, on ranks that have torch imported."""

    def __init__(self, pools: Ranks, folder: Path, arguments: Sequence[str], *, ranks: int, timeout: float) -> None:
        self.folder, self._pool = folder, pools(ranks)
        self._arguments = ["--out", str(folder), *arguments]

    def __enter__(self) -> Run:
        self._pool(on_this_rank, self._arguments)
        return self

    def __exit__(self, *_: object) -> None: ...

    def is_over(self) -> bool:
        return True


@pytest.mark.timeout(400)
@pytest.mark.parametrize("launched_by", ["the pool", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_demo_writes_table_picture_and_json(
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
    launched_by: str,
):
    if launched_by == "the pool":
        monkeypatch.setattr(demo, "Run", functools.partial(OnThePool, ranks))
    arguments = ["--out", str(tmp_path), "--formats", "bf16", "nvfp4", "--steps", "12", "--data", str(text)]
    arguments += ["--no-proof"] if launched_by == "the pool" else []
    assert demo.main([*arguments, *TINY_ARGUMENTS]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["runs"]) == ["bf16", "nvfp4"]
    assert results["settings"]["ranks"] == 2
    out = capsys.readouterr().out
    for name, run in results["runs"].items():
        assert [step for step, _ in run["train_curve"]] == list(range(1, 13))
        row = next(line.split() for line in out.splitlines() if line.split()[:1] == [name] and "step" not in line)
        weights = run["weight_bytes_per_parameter"]
        numbers = (run["train_loss"], run["validation_loss"], run["validation_gap_to_bf16"])
        assert row[4:7] == [f"{numbers[0]:.4f}", f"{numbers[1]:.4f}", f"{numbers[2]:+.4f}"]
        nbytes = (run["all_gather_bytes_per_parameter"], weights["resident"], weights["forward"])
        assert row[1:4] == [f"{value:.3f}" for value in nbytes]
    gathered = {name: run["all_gather_bytes_per_parameter"] for name, run in results["runs"].items()}
    assert gathered["nvfp4"] < 0.5 * gathered["bf16"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    if launched_by == "torchrun":
        assert len(results["weights_sha256"]) == 3 and len(set(results["weights_sha256"].values())) == 1
        assert [r["step"] for r in read_records(tmp_path / "proof/killed/metrics.jsonl") if r["event"] == "start"] == [
            0,
            8,
        ]


def test_the_digest_is_of_all_weights(text: Path, tmp_path: Path):
    """The digest in the summary changes with any bit of any parameter."""
    config = tiny(text, tmp_path, format="nvfp4", steps=1)
    summary = train.main(config)
    model = train.build_model(config, torch.device("cpu"))
    before = digest_of_weights(model)
    assert len(summary["weights_sha256"]) == 64 and summary["weights_sha256"] != before
    for parameter in model.parameters():
        buffer = forward_buffers(parameter)[0].view(-1).view(torch.uint8)
        buffer[0] ^= 1
        assert digest_of_weights(model) != before
        buffer[0] ^= 1
    assert digest_of_weights(model) == before


@pytest.mark.timeout(200)
def test_demo_shows_the_console_of_a_run_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert demo.main(["--out", str(tmp_path), "--ranks", "1", "--data", str(tmp_path / "nowhere")]) == 1
    assert "No such file or directory" in capsys.readouterr().out
    assert not (tmp_path / "results.json").exists()


def test_a_silent_run_is_ended(text: Path, tmp_path: Path):
    run = Run(tmp_path, ["--data", str(text), *TINY_ARGUMENTS], ranks=2, timeout=0.3)
    with pytest.raises(RunFailedError, match=r"said nothing for 0 s"), run:
        run.wait()
    assert run.has_ended


def test_a_slow_machine_gets_fewer_steps():
    def records(step_seconds: float) -> list[Record]:
        steps = [{"event": "train", "step_seconds": step_seconds} for _ in range(demo.PACE_STEPS)]
        return [{"event": "start", "config": {"steps": 300, "batch_size": 4}}, *steps]

    demo.check_pace(records(0.25), seconds=90)
    demo.check_pace(records(9.0)[:-1], seconds=90)  # too early to tell
    short = [{"event": "start", "config": {"steps": demo.LEAST_STEPS}}, *records(9.0)[1:]]
    demo.check_pace(short, seconds=90)  # as few steps as there may be
    with pytest.raises(demo.TooSlowError) as caught:
        demo.check_pace(records(0.8), seconds=90)
    assert caught.value.pace == pytest.approx(0.8)
    assert caught.value.batch_size == 4
    least = demo.START_SECONDS + demo.LEAST_STEPS * 0.8
    assert demo.affordable_run(0.8, 4, seconds=least + 8.1) == (demo.LEAST_STEPS + 10, 4)
    assert demo.affordable_run(1.6, 4, seconds=least + 8.1) == (demo.LEAST_STEPS, 2)
    assert demo.affordable_run(80.0, 4, seconds=least) == (demo.LEAST_STEPS, 1)


@pytest.mark.parametrize("formats", [("bf16", "nvfp4", "fp8_block"), ("nvfp4", "bf16"), ("bf16",)])
def test_the_demo_ends_when_it_said(formats: tuple[Any, ...]):
    """All runs take the steps that the first run's share affords, and fit into the time left, slower formats too."""
    config, elapsed, pace = demo.DemoConfig(formats=formats), 20.0, 0.4
    first = pace if formats[0] == "bf16" else pace * demo.QUANTIZED_COST
    steps = demo.affordable_steps(first, config.share(elapsed))
    runs = [demo.START_SECONDS + steps * pace * (1 if name == "bf16" else demo.QUANTIZED_COST) for name in formats]
    assert config.seconds - 2 < elapsed + sum(runs) <= config.seconds


@pytest.mark.parametrize(
    ("line", "said"),
    {
        "train --data nowhere": "No such file or directory: 'nowhere'",
        "train --model.n-layer 0": "n_layer must be at least 1, got 0",
        "train --model.n-head 0": "n_head must be at least 1, got 0",
        "train --lr -1": "lr is out of range: -1.0",
        "train --parallel hsdp": "--parallel hsdp needs torchrun, also for one process",
        "train --out /proc/nowhere": "No such file or directory: '/proc/nowhere'",
        "train --format nvfp4 --model.n-embd 8": "nvfp4 needs rows that are a multiple of 16, got 24",
        "train --resume": "--resume: runs/gpt/checkpoints holds no complete checkpoint",
        "demo --seconds -1": "seconds must be at least 1, got -1",
        "demo --ranks 0": "ranks must be at least 1, got 0",
        "demo --stepz 4": "--steps",
        "demo --steps -4": "steps must be at least 1, got -4",
    }.items(),
)
def test_a_mistake_on_the_command_line_gets_a_line(
    line: str,
    said: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    program, *arguments = line.split()
    if program == "train" and "--data" not in arguments:
        arguments += ["--data", str(text)]
    with pytest.raises(SystemExit) as ended:
        {"train": train.command, "demo": demo.main}[program](arguments)
    shown = capsys.readouterr().err + str(ended.value.code)
    assert said in " ".join(shown.split()) and "Traceback" not in shown


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_cuda_without_a_gpu_is_said(text: Path, tmp_path: Path):
    with pytest.raises(
        SystemExit, match=r"--device cuda needs a GPU for each of the 1 ranks of this machine, torch .* finds 0"
    ):
        train.command(["--device", "cuda", "--data", str(text), "--out", str(tmp_path)])


TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def assert_it_learns(said: str) -> None:
    losses = [float(line.split()[-1]) for line in said.splitlines() if line.startswith("step")]
    assert losses[-1] < 0.1 * losses[0] + 0.01


def test_minimal(capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(ROOT / "examples/minimal_zero.py"), run_name="__main__")
    assert_it_learns(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("launcher", "example"), [([], "minimal_zero"), (TWO_RANKS, "minimal_zero"), (TWO_RANKS, "minimal_fsdp2")]
)
def test_minimal_as_it_is_launched(launcher: list[str], example: str):
    command = [sys.executable, *launcher, f"examples/{example}.py"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert_it_learns(done.stdout)


def test_the_demo_shows_the_runs_before_one_that_failed(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    class FailsInTheSecond(OnThePool):
        def is_over(self) -> bool:
            if self.folder.name == "nvfp4":
                raise RunFailedError("the second run ended with exit status 1")
            return True

    monkeypatch.setattr(demo, "Run", functools.partial(FailsInTheSecond, ranks))
    arguments = ["--out", str(tmp_path), "--formats", "bf16", "nvfp4", "--steps", "2", "--data", str(text)]
    assert demo.main([*arguments, *TINY_ARGUMENTS]) == 1
    assert "the second run ended with exit status 1" in capsys.readouterr().out
    assert list(json.loads((tmp_path / "results.json").read_text())["runs"]) == ["bf16"]
    assert (tmp_path / "loss.png").exists()
