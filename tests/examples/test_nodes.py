"""A node is killed or cut off: the run goes on from the newest checkpoint on the node that is left, to the bit."""

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.gpt_pretrain.launch import Run
from examples.gpt_pretrain.run_log import Record, read_records
from tests.examples.nodes import Nodes, nodes

TIMEOUT = 10  # seconds of the process group
MODEL = ["--model.n-layer=1", "--model.n-head=2", "--model.n-embd=128", "--model.context=32", "--batch-size=2"]
STEPS = 10  # that are compared
FAULTS: dict[str, Callable[[Nodes], None]] = {
    "killed": lambda both: both.signal(1, signal.SIGKILL),
    "cut off": lambda both: both.cut(),
}


def wait_for(records: Callable[[], list[Record]], enough: Callable[[list[Record]], bool], both: Nodes) -> list[Record]:
    """Poll the log of a run, and keep a copy of every checkpoint that it has held."""
    end = time.monotonic() + 240
    while time.monotonic() < end:
        keep_checkpoints(both.folder)
        found = records()
        if enough(found):
            return found
        time.sleep(0.1)
    raise AssertionError(f"too late; the console of node 0 ends with:\n{both.console(0)[-6000:]}")


def keep_checkpoints(folder: Path) -> None:
    for path in (folder / "out" / "checkpoints").glob("step_????????"):
        kept = folder / "kept" / path.name
        if not kept.exists():
            partial = kept.with_name("partial")
            shutil.rmtree(partial, ignore_errors=True)
            try:
                shutil.copytree(path, partial)
                partial.rename(kept)
            except OSError:  # deleted meanwhile, as too old
                continue


def steps_of(records: list[Record]) -> dict[int, tuple[float, float]]:
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records if r["event"] == "train"}


def started(records: list[Record]) -> Record:
    return [record for record in records if record["event"] == "start"][-1]


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "fault"), [("zero", fault) for fault in FAULTS])
def test_the_node_that_is_left_goes_on(tmp_path: Path, parallel: str, fault: str) -> None:
    ranks = 2 if parallel == "hsdp" else 1
    (tmp_path / "text.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(3000)))
    arguments = [
        f"--data={tmp_path / 'text.txt'}",
        f"--parallel={parallel}",
        "--format=nvfp4",
        "--deterministic",
        *MODEL,
    ]
    arguments += ["--steps=100000", "--eval-every=1000000", "--checkpoint-every=50", f"--timeout={TIMEOUT}"]
    with nodes(tmp_path) as both:
        if fault == "cut off" and not both.apart:
            pytest.skip("there is no link to cut: network namespaces cannot be made here")
        for node in range(2):
            both.start_agent(node, ranks, [*arguments, "--elastic", f"--out={tmp_path / 'out'}"])

        def log() -> list[Record]:
            return read_records(tmp_path / "out" / "metrics.jsonl")

        before = wait_for(log, lambda found: max(steps_of(found), default=0) > 60, both)
        assert started(before)["ranks"] == 2 * ranks
        struck = time.monotonic()
        FAULTS[fault](both)
        after = wait_for(
            log,
            lambda found: (
                bool(found)
                and any(record["event"] == "start" and record["ranks"] == ranks for record in found)
                and max(steps_of(found)) >= started(found)["step"] + STEPS
            ),
            both,
        )
        print(f"{parallel}, {fault}: on after {time.monotonic() - struck:.0f} s")
        print("\n".join(line for line in both.console(0).splitlines() if "Error" in line)[-3000:])
    step = started(after)["step"]
    assert step >= 50, "it goes on from a checkpoint"
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "kept" / f"step_{step:08d}", again / "checkpoints" / f"step_{step:08d}")
    with Run(again, [*arguments, "--resume"], ranks=ranks, timeout=120) as run:
        while max(steps_of(run.records()), default=0) < step + STEPS:
            assert not run.is_over()
            time.sleep(0.1)
        expected = steps_of(run.records())
    found = steps_of(after)
    assert [found[step + i] for i in range(1, STEPS + 1)] == [expected[step + i] for i in range(1, STEPS + 1)]
