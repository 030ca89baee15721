"""A node is killed, cut off or stands still: the run goes on from the newest checkpoint on the node that is left, and on both
once the other one is back; each time to the bit of a run that was started from that checkpoint.
"""

import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.gpt_pretrain.launch import Run
from examples.gpt_pretrain.run_log import Record, read_records
from tests.examples.nodes import Nodes, nodes

TIMEOUT = 10  # seconds of the process group
MODEL = ["--model.n-layer=1", "--model.n-head=2", "--model.n-embd=128", "--model.context=32", "--batch-size=2"]
CHECKPOINT_EVERY = 50
STEPS = 10  # that are compared
PATIENCE = 240  # seconds, with a machine that does much else
RANKS = {"zero": 1, "fsdp2": 1, "hsdp": 2}  # of a node
PARALLEL = {name: [f"--parallel={name}"] for name in RANKS}
PARALLEL["hsdp"] += ["--shard-ranks=2"]  # a node is a replica


@dataclass(frozen=True)
class Fault:
    """A fault of a node, and how the node comes back from it."""

    strikes: Callable[[Nodes, int], None]
    ends: Callable[[Nodes, int], None]


FAULTS = {
    "killed": Fault(lambda both, node: both.signal(node, signal.SIGKILL), lambda both, node: None),
    "paused": Fault(
        lambda both, node: both.signal(node, signal.SIGSTOP), lambda both, node: both.signal(node, signal.SIGCONT)
    ),
    "cut off": Fault(lambda both, node: both.cut(), lambda both, node: both.mend()),
}


class ElasticRun:
    """A run on two nodes, whose log and checkpoints are looked at from outside."""

    def __init__(self, folder: Path, both: Nodes, parallel: str) -> None:
        (folder / "text.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(3000)))
        self.both, self.folder, self.ranks = both, folder, RANKS[parallel]
        self.arguments = [f"--data={folder / 'text.txt'}", *PARALLEL[parallel], "--format=nvfp4", "--deterministic"]
        self.arguments += [*MODEL, "--steps=100000", "--eval-every=1000000", f"--timeout={TIMEOUT}"]

    def start(self, node: int) -> None:
        out = f"--out={self.folder / 'out'}"
        every = f"--checkpoint-every={CHECKPOINT_EVERY}"
        self.both.start_agent(node, self.ranks, [*self.arguments, every, "--elastic", out])

    def runs(self, nodes: int, beyond: int, steps: int) -> list[Record]:
        """Wait until the run was started after step `beyond` on the ranks of as many nodes, and has made `steps` steps."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            self._keep_checkpoints()
            found = read_records(self.folder / "out" / "metrics.jsonl")
            begun = started(found) if found else {"ranks": 0, "step": 0}
            wanted = begun["ranks"] == nodes * self.ranks and begun["step"] >= beyond
            if wanted and max(steps_of(found), default=0) >= begun["step"] + steps:
                return found
            time.sleep(0.1)
        ends = [f"the console of node {node} ends with:\n{self.both.console(node)[-6000:]}" for node in range(2)]
        raise AssertionError("too late; " + "\n\n".join(ends))

    def goes_on(self, records: list[Record]) -> dict[int, tuple[float, float]]:
        """Return the steps of a run on as many ranks from the checkpoint that these records continue."""
        step, ranks = started(records)["step"], started(records)["ranks"]
        again = self.folder / f"again_{step}"
        shutil.copytree(self.folder / "kept" / f"step_{step:08d}", again / "checkpoints" / f"step_{step:08d}")
        with Run(again, [*self.arguments, "--resume"], ranks=ranks, timeout=120) as run:
            while max(steps_of(run.records()), default=0) < step + STEPS:
                assert not run.is_over()
                time.sleep(0.1)
            return steps_of(run.records())

    def _keep_checkpoints(self) -> None:
        """Copy every checkpoint, of which the run deletes all but three."""
        for path in (self.folder / "out" / "checkpoints").glob("step_????????"):
            kept = self.folder / "kept" / path.name
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


def goes_and_comes_back(folder: Path, both: Nodes, parallel: str, fault: str, struck: int) -> None:
    """Check that the run goes on from a checkpoint on the node that is left, and later on both, to the bit."""
    run = ElasticRun(folder, both, parallel)
    for node in range(2):
        run.start(node)
    run.runs(nodes=2, beyond=0, steps=CHECKPOINT_EVERY + 10)
    began = time.monotonic()
    FAULTS[fault].strikes(both, struck)
    alone = run.runs(nodes=1, beyond=CHECKPOINT_EVERY, steps=CHECKPOINT_EVERY + 10)
    print(f"{parallel}, {fault}: alone after {time.monotonic() - began:.0f} s")
    began = time.monotonic()
    FAULTS[fault].ends(both, struck)
    if both.has_ended(struck):
        run.start(struck)
    together = run.runs(nodes=2, beyond=started(alone)["step"] + CHECKPOINT_EVERY, steps=STEPS)
    print(f"{parallel}, {fault}: together after {time.monotonic() - began:.0f} s")
    both.end()
    for records in (alone, together):
        step, found, expected = started(records)["step"], steps_of(records), run.goes_on(records)
        assert [found[step + i] for i in range(1, STEPS + 1)] == [expected[step + i] for i in range(1, STEPS + 1)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("parallel", "fault", "struck"),
    [
        ("zero", "killed", 1),
        ("zero", "paused", 0),  # with it rank 0, which writes the log and the checkpoints
        ("zero", "cut off", 1),
        *[(parallel, fault, 1) for parallel in ("fsdp2", "hsdp") for fault in FAULTS],
    ],
)
def test_a_node_goes_and_comes_back(tmp_path: Path, parallel: str, fault: str, struck: int) -> None:
    with nodes(tmp_path) as both:
        if fault == "cut off" and not both.apart:
            pytest.skip("there is no link to cut: network namespaces cannot be made here")
        goes_and_comes_back(tmp_path, both, parallel, fault, struck)
