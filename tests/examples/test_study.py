"""The study: what is fixed in its plan, that nothing is trained twice, and that its numbers are those of the runs."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tyro

from examples.gpt_pretrain import train
from examples.gpt_pretrain.build import build_model, build_optimizer, forget_masters
from examples.gpt_pretrain.config import TrainConfig
from examples.gpt_pretrain.data import Corpus
from examples.gpt_pretrain.launch import RunFailedError
from examples.gpt_pretrain.model import GPTConfig
from examples.gpt_pretrain.run_log import Record
from examples.gpt_pretrain.study import __main__ as command
from examples.gpt_pretrain.study import runs, show
from examples.gpt_pretrain.study.outcome import _interval, collect
from examples.gpt_pretrain.study.plan import BASELINE, CONTROL, SEEDS, SIZES, Job, Size, jobs
from tests.selection import worlds
from tests.workers import Ranks

TINY = Size(1, TrainConfig(model=GPTConfig(1, 2, 128, 32), steps=3, batch_size=2, eval_sequences=4, device="cpu"))


def records_of(job: Job, validation_loss: float = 2.0, **changes: Any) -> list[Record]:
    """Return the records that a run leaves behind."""
    start = {
        "event": "start",
        "step": 0,
        "ranks": job.ranks,
        "device": "cpu",
        "parameters": 7,
        "machine": {
            "device": "a processor",
            "cores": 2,
            "system": "Linux",
            "python": "3",
            "torch": "2",
            "zerocast": "0",
        },
        "date": f"2026-01-0{1 + job.seed}T00:00:00+00:00",
        "text": "abc",
        "config": json.loads(json.dumps(dataclasses.asdict(job.config), default=str)),
        **changes,
    }
    steps = range(1, job.config.steps + 1)
    curve = [
        {"event": "train", "step": step, "loss": validation_loss + 1 / step, "tokens_per_s": 5.0} for step in steps
    ]
    end = {"validation_loss": validation_loss, "train_loss": 3.0, "skipped_steps": 0, "tokens_per_s": 5.0}
    end["products"] = [] if job.config.format == "bf16" else ["dequantize"]
    return [start, *curve, {"event": "end", "step": job.config.steps, **end}]


def put(job: Job, out: Path, records: Sequence[Record]) -> None:
    folder = out / job.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_slice_sees_no_byte_twice() -> None:
    """A slice sees no byte twice, however batches are cut. Each seed has its own order, and the held-out text
    is in none.
    """
    corpus = Corpus(bytes(range(256)) * 80, 32)

    def seen(sequences: int, batches: int, seed: int = 0) -> list[bytes]:
        cut = (corpus.batch_once(sequences, seed=seed, index=index) for index in range(batches))
        return [bytes(row.tolist()) for batch in cut for row in batch.tokens]

    starts = {bytes(corpus.train[i : i + 32].tolist()) for i in range(0, len(corpus.train) - 32, 32)}
    whole = len(range(0, len(corpus.train) - 32, 32))
    every = corpus._order(0)
    assert len(set(every)) == len(every) == whole and not any(start % 32 for start in every)
    assert set(seen(4, 10)) <= starts and seen(4, 10) == seen(2, 20) != seen(4, 10, seed=1)
    with pytest.raises(ValueError, match="pass more --data, or fewer --steps"):
        corpus.batch_once(whole, seed=0, index=1)


def test_a_text_that_is_too_short_is_said_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"a text of no length " * 80)
    config = dataclasses.replace(
        TINY.config, batches="once", steps=100, data=(tmp_path / "text",), out=tmp_path / "out"
    )
    with pytest.raises(ValueError, match="bytes of text make 47 sequences of 32, and batch 99 wants those up to 200"):
        train.main(config)


def test_another_text_than_the_plans_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("another")
    with pytest.raises(SystemExit, match=r"the plan has a text of SHA-256 8e6a.*, and --data gives 7 bytes of ae448"):
        command.main(["--size", "gpu", "--data", str(tmp_path / "text"), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"--data: .*No such file or directory"):
        command.main(["--size", "gpu", "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path)])


@pytest.mark.parametrize("size", SIZES)
def test_a_run_gets_the_options_that_were_planned(size: str) -> None:
    for job in jobs(dataclasses.replace(SIZES[size], seeds=SEEDS)):
        assert tyro.cli(TrainConfig, args=runs.command_line(job.config)) == job.config
    texts = dataclasses.replace(TINY.config, data=(Path("a"), Path("b c")))
    assert tyro.cli(TrainConfig, args=runs.command_line(texts)) == texts


def test_a_run_is_finished_when_it_ended_as_planned(tmp_path: Path) -> None:
    job = next(jobs(TINY))
    assert runs.finished(job, tmp_path) is None
    whole = records_of(job)
    put(job, tmp_path, whole[:-1])
    assert runs.finished(job, tmp_path) is None
    put(job, tmp_path, whole)
    assert runs.finished(job, tmp_path) == whole
    elsewhere = dataclasses.replace(job, config=dataclasses.replace(job.config, out=Path("/elsewhere")))
    assert runs.finished(elsewhere, tmp_path) == whole
    longer = dataclasses.replace(job, config=dataclasses.replace(job.config, steps=4))
    assert runs.finished(longer, tmp_path) is None
    assert runs.finished(dataclasses.replace(job, ranks=2), tmp_path) is None


def losses(job: Job) -> float:
    return {BASELINE: 2.0, "nvfp4": 2.1, CONTROL: 3.0}.get(job.variant, 2.0) + 0.01 * job.seed * len(job.variant)


def test_nothing_is_trained_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that fails costs no other, and the same command makes it again alone."""
    trained: list[str] = []
    failing = {"nvfp4-1"}

    def train(job: Job, out: Path, *_: Any) -> list[Record]:
        trained.append(job.name)
        if job.name in failing:
            raise RunFailedError("nvfp4-1 failed")
        put(job, out, records_of(job, losses(job)))
        return records_of(job, losses(job))

    monkeypatch.setattr(command, "train", train)
    monkeypatch.setattr(command, "SIZES", {"cpu": TINY})
    names = [job.name for job in jobs(TINY)]
    arguments = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results"), "--at-once", "2"]
    assert command.main(arguments) == 1
    said = capsys.readouterr().out
    assert "nvfp4-1 failed" in said and "17 of 18 runs are finished" in said
    row = next(line for line in said.splitlines() if line.startswith("| `nvfp4` "))
    assert row.split(" | ")[5:8] == ["+0.1000", "not run", "+0.1200"]
    failing.clear()
    for _ in range(2):
        assert command.main(arguments) == 0
    assert sorted(trained) == sorted([*names, "nvfp4-1"])
    results = tmp_path / "results" / "cpu"
    assert (results / "gap.png").read_bytes().startswith(b"\x89PNG")
    assert "`python -m examples.gpt_pretrain.study --size cpu`" in (results / "table.md").read_text()
    outcome = json.loads((results / "results.json").read_text())
    assert show.table(outcome) in (results / "table.md").read_text()


def test_gaps_are_those_of_the_same_seed() -> None:
    found = collect("cpu", TINY, {job: records_of(job, losses(job)) for job in jobs(TINY)})
    assert found["dates"] == ["2026-01-01T00:00:00+00:00", "2026-01-03T00:00:00+00:00"]
    assert found["variants"][BASELINE]["gaps"] == [0.0, 0.0, 0.0]
    assert found["variants"][BASELINE]["validation_loss"] == pytest.approx(2.04)
    nvfp4 = found["variants"]["nvfp4"]  # 2.1 + 0.05 seed against 2.0 + 0.04 seed
    assert nvfp4["gaps"] == pytest.approx([0.1, 0.11, 0.12])
    assert nvfp4["gap"] == pytest.approx(0.11)
    assert nvfp4["gap_deviation"] == pytest.approx(0.01)
    row = next(line for line in show.table(found).splitlines() if line.startswith("| `nvfp4` "))
    assert (
        row == "| `nvfp4` | weights | 2.1500 ± 0.0500 | +0.1100 ± 0.0100 | +5.39 % | +0.1000 | +0.1100 | +0.1200 | 0 |"
    )


def test_many_seeds_have_an_interval() -> None:
    """A row is compared with the row that the plan names, over the seeds that both have."""
    variants = {name: SIZES["pairs"].variants[name] for name in (BASELINE, "nvfp4", "nvfp4, 8-bit moments")}
    size = dataclasses.replace(TINY, variants=variants, seeds=range(16), compared=SIZES["pairs"].compared)
    loss = {BASELINE: 2.0, "nvfp4": 2.1, "nvfp4, 8-bit moments": 2.102}
    made = {job: records_of(job, loss[job.variant] + 0.001 * (job.seed % 2) * len(job.variant)) for job in jobs(size)}
    made.pop(next(job for job in made if job.variant == "nvfp4" and job.seed == 15))
    found = collect("pairs", size, made)["variants"]["nvfp4, 8-bit moments"]
    assert found["compared"] == "nvfp4" and len(found["gaps"]) == 15
    # 0.002 for 8 seeds and 0.017 for 7; a standard deviation of 0.00775, and Student's 2.145 for 14 degrees of freedom.
    assert found["gap"] == pytest.approx(0.009) and found["gap_interval"] == pytest.approx(0.00429, abs=2e-5)
    row = next(line for line in show.table(collect("pairs", size, made)).splitlines() if "8-bit" in line)
    assert "| +0.0047 to +0.0133 | `nvfp4` | 15 |" in row
    assert math.isinf(_interval([0.5]))


MACHINE = records_of(next(jobs(TINY)))[0]["machine"]


@pytest.mark.parametrize(
    "change",
    [
        {"text": "xyz"},
        {"machine": {**MACHINE, "torch": "1"}},
        {"machine": {**MACHINE, "cores": 3}},
        {"ranks": 9},
    ],
)
def test_runs_of_two_machines_are_not_compared(change: dict[str, Any]) -> None:
    made = {job: records_of(job) for job in jobs(TINY)}
    last = list(made)[-1]
    made[last] = records_of(last, **change)
    with pytest.raises(ValueError, match=f"runs that differ in {next(iter(change))} are not comparable"):
        collect("cpu", TINY, made)


def forgotten(fmt: Any) -> list[tuple[str, float, float]]:
    """Return, after a step, (name, what forgetting changes of the masters here, how far they are from the
    weights then).
    """
    config = dataclasses.replace(TINY.config, format=fmt)
    model = build_model(config, torch.device("cpu"))
    optimizer = build_optimizer(model, config)
    tokens = torch.arange(64).view(2, 32)
    model.loss(tokens, tokens).backward()
    optimizer.step()
    (source,) = optimizer.master_views()
    before = [None if owned.master is None else owned.master.clone() for owned in source.masters]
    forget_masters(optimizer)
    found = []
    for old, owned in zip(before, source.masters, strict=True):
        if old is None:
            found.append((owned.name, 0.0, 0.0))
            continue
        held = owned.weight.dequantize().view(-1)[owned.span.start : owned.span.stop].float()
        changes = [float((a - owned.master).abs().max()) for a in (old, held)]
        found.append((owned.name, *changes))
    if dist.is_initialized():
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, found)
        found = [
            (parts[0][0], max(p[1] for p in parts), max(p[2] for p in parts)) for parts in zip(*by_rank, strict=True)
        ]
    return found


@pytest.mark.parametrize("world", worlds(2, slow=[1, 3]))
def test_without_masters_there_is_nothing_but_the_weights(ranks: Ranks, world: int) -> None:
    for found in ranks(world)(forgotten, "nvfp4"):
        for name, changed, left in found:
            if name.startswith("blocks.") and "norm" not in name:
                assert changed > 1e-4, name
                assert left == 0, name
            else:
                assert changed == 0, name  # only quantized weights are the study's


def test_bf16_has_no_masters_to_forget() -> None:
    with pytest.raises(ValueError, match="needs a quantized format, got bf16"):
        TrainConfig(format="bf16", keep_masters=False)
