"""A node is killed, cut off or stands still: the run goes on from the newest checkpoint on the node that is left, and on both
once the other one is back; each time to the bit of a run that was started from that checkpoint.

The nodes are network namespaces of this machine joined by a veth pair, with a torchrun agent in each, and their store apart. Where
namespaces cannot be made, both agents run on the loopback, and `cut` and `mend` cannot be asked for.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.gpt_pretrain.launch import Run
from examples.gpt_pretrain.run_log import Record, read_records

ROOT = Path(__file__).resolve().parents[2]
STORE = (
    "import sys, time; from torch.distributed import TCPStore; "
    "store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False); time.sleep(3600)"
)
RENDEZVOUS = "is_host=0,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5"


class Nodes:
    """`prefix[i]` runs a command in node i, whose address is `address[i]` on `interface[i]`."""

    def __init__(self, folder: Path, apart: bool) -> None:
        self.folder, self.apart = folder, apart
        name = f"zc{os.getpid() % 100000}"
        self.names = [f"{name}n{node}" for node in range(2)]
        self.interface = [f"{name}v{node}" for node in range(2)] if apart else ["lo", "lo"]
        self.address = ["10.77.0.1", "10.77.0.2"] if apart else ["127.0.0.1", "127.0.0.1"]
        self.prefix = [["ip", "netns", "exec", name] if apart else [] for name in self.names]
        self._started: list[subprocess.Popen[bytes]] = []
        self._agents: dict[int, subprocess.Popen[bytes]] = {}  # the newest of each node
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = str(free.getsockname()[1])

    def start_store(self) -> None:
        """Start the store of the rendezvous, which outlives both agents."""
        self._start([*self.prefix[0], sys.executable, "-c", STORE, self.address[0], self._port], "store", {})
        time.sleep(1)

    def start_agent(self, node: int, ranks: int, arguments: list[str]) -> None:
        """Start torchrun on a node, for the first time or again. Its console is in the folder."""
        command = [*self.prefix[node], sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2"]
        command += [f"--nproc-per-node={ranks}", "--max-restarts=3", "--monitor-interval=0.3", "--rdzv-backend=c10d"]
        command += [f"--rdzv-endpoint={self.address[0]}:{self._port}", "--rdzv-id=run", f"--rdzv-conf={RENDEZVOUS}"]
        command += [f"--local-addr={self.address[node]}", "-m", "examples.gpt_pretrain.train", *arguments]
        environment = {"GLOO_SOCKET_IFNAME": self.interface[node], "OMP_NUM_THREADS": "1"}
        # where agents share their store, an agent that comes back waits for the address of the first one in vain
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._agents[node] = self._start(command, f"agent{node}", environment)

    def signal(self, node: int, which: signal.Signals) -> None:
        """Send a signal to the agent of a node and to all of its ranks."""
        for process in self._family(self._agents[node].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, which)

    def has_ended(self, node: int) -> bool:
        """Tell whether the agent of a node is gone."""
        return self._agents[node].poll() is not None

    def cut(self) -> None:
        """Take the link down: packets are lost, and no process gets an error."""
        _ip("-n", self.names[1], "link", "set", self.interface[1], "down")

    def mend(self) -> None:
        """Take the link up again."""
        _ip("-n", self.names[1], "link", "set", self.interface[1], "up")

    def console(self, node: int) -> str:
        """Return the output of a node's agent and its ranks."""
        return (self.folder / f"agent{node}.log").read_text(errors="replace")

    def end(self) -> None:
        """End every process that still runs."""
        for process in self._started:
            for one in self._family(process.pid) if process.poll() is None else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            process.wait()

    def _start(self, command: list[str], name: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as console:
            process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **environment}, stdout=console, stderr=subprocess.STDOUT
            )
        self._started.append(process)
        return process

    def _family(self, process: int) -> list[int]:
        """Return a process and all its descendants, children first. Ranks of torchrun have sessions of their own."""
        try:
            below = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        except OSError:
            return []
        return [one for child in below for one in self._family(int(child))] + [process]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def nodes(folder: Path) -> Iterator[Nodes]:
    """Yield two nodes with their store, and leave no process and no namespace behind."""
    found = Nodes(folder, apart=True)
    try:
        try:
            for name in found.names:
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            first, second = found.names
            _ip(
                "-n",
                first,
                "link",
                "add",
                found.interface[0],
                "type",
                "veth",
                "peer",
                found.interface[1],
                "netns",
                second,
            )
            for node, name in enumerate(found.names):
                _ip("-n", name, "addr", "add", f"{found.address[node]}/24", "dev", found.interface[node])
                _ip("-n", name, "link", "set", found.interface[node], "up")
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", b"").decode().strip() or error
            warnings.warn(f"no network namespaces here ({why}): two agents on the loopback", stacklevel=4)
            found = Nodes(folder, apart=False)
        found.start_store()
        yield found
    finally:
        found.end()
        for name in found.names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


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
