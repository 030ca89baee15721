"""One training run as a child process: torchrun on this host, observed through its
metrics.jsonl.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.gpt_pretrain.run_log import Record, read_records

ROOT = Path(__file__).resolve().parents[2]  # where `-m examples.gpt_pretrain.train` can be found


class RunFailedError(Exception):
    """A run ended badly, or was silent for too long; the message ends with its last lines."""


class Run:
    """A run of train.py on `ranks` processes. Use it in a `with`: leaving it ends every process of
    the run.

    The console goes to `folder`/console.log. Each rank computes on one thread, so that two ranks
    share two cores. The rendezvous port is chosen by the system, on the loopback interface. Without
    `torchrun` it is one process and no process group, which starts sooner. `environment` is added
    to the environment of this process.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        ranks: int,
        timeout: float,
        torchrun: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._timeout = timeout
        self._environment = _environment() | dict(environment or {})
        self._heard, self._said = time.monotonic(), [0, 0]
        folder.mkdir(parents=True, exist_ok=True)
        rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        command = [sys.executable]
        if torchrun:
            command += ["-m", "torch.distributed.run", *rendezvous, f"--nproc-per-node={ranks}"]
        command += ["-m", "examples.gpt_pretrain.train", "--out", str(folder.resolve()), *arguments]
        self._command = command

    @property
    def _console(self) -> Path:
        return self.folder / "console.log"

    def records(self) -> list[Record]:
        """Read the records of the run so far."""
        return read_records(self.folder / "metrics.jsonl")

    def is_over(self) -> bool:
        """Return True if the run has ended well. Raises RunFailedError if it failed or has neither
        logged nor printed anything for `timeout` seconds; a slow run may continue.
        """
        code = self._process.poll()
        if code is None and not self._is_silent():
            return False
        if code == 0:
            return True
        reason = f"said nothing for {self._timeout:.0f} s" if code is None else f"ended with exit status {code}"
        raise RunFailedError(f"the run in {self.folder} {reason}; from {self._console}:\n\n{self._last_words()}")

    def _is_silent(self) -> bool:
        """Return True if neither the console nor the log has grown within the last `timeout`
        seconds.
        """
        files = (self._console, self.folder / "metrics.jsonl")
        said = [path.stat().st_size if path.exists() else 0 for path in files]
        if said != self._said:
            self._heard, self._said = time.monotonic(), said
        return time.monotonic() - self._heard > self._timeout

    def _last_words(self) -> str:
        """Return the last lines that the ranks printed, and which one failed, without the long
        report that torchrun adds.
        """
        lines = self._console.read_text(errors="replace").splitlines()
        end = next((i + 1 for i, line in enumerate(lines) if "failed (exitcode" in line), len(lines))
        return "\n".join(lines[:end][-40:])

    @property
    def has_ended(self) -> bool:
        """True if the launcher has ended, for any reason."""
        return self._process.poll() is not None

    def wait(self) -> list[Record]:
        """Wait for the end and return the records; raises like `is_over`."""
        while not self.is_over():
            time.sleep(0.1)
        return self.records()

    def kill(self) -> None:
        """Kill every process of the run, which gets no chance to save anything."""
        # torchrun may start its ranks in separate sessions.
        for pid in (*_descendants(self._process.pid), self._process.pid) if not self.has_ended else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> "Run":
        with self._console.open("wb") as console:
            self._process = subprocess.Popen(  # noqa: S603
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if not self.has_ended:
            os.killpg(self._process.pid, signal.SIGTERM)  # torchrun and its ranks are one group
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and their descendants."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return children + [descendant for child in children for descendant in _descendants(child)]


def _environment() -> dict[str, str]:
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in (name for _, name in socket.if_nameindex()) else {}
    return {"OMP_NUM_THREADS": "1", **loopback, **os.environ}
