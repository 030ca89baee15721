"""Two nodes of this machine: network namespaces joined by a veth pair, a torchrun agent in each, and their store apart.

Where namespaces cannot be made, both agents run on the loopback, and `cut` and `mend` cannot be asked for.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

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
        """Take the link down: packets are lost, and nobody is told."""
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
