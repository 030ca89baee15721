"""Ctrl-C: one line, exit code 130, no traceback, no process left, nothing half-written. Real processes, signals to their group."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from zerocast import cli
from zerocast.cli import main, plan
from zerocast.serve import write

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(sys.executable).parent / "zerocast"
NOISE = ("import time:", "[W", "Warning:", "warnings.warn")


@pytest.fixture(autouse=True)
def python_handles_the_signal() -> Iterator[None]:
    """Install Python's handler, as in a terminal. A background job, which a test run may be, ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class Ended:
    """The end of a command: its status, its output, and the processes that it left."""

    status: int
    said: list[str]
    left: list[int]


def interrupt_when(
    arguments: Sequence[str],
    ready: Callable[[str], bool],
    delay: float,
    folder: Path,
    mode: str = "-m",
) -> Ended:
    """Start Python in a process group of its own; send SIGINT to the group `delay` seconds after `ready` of what it said."""
    mark, log = uuid.uuid4().hex, folder / "said.txt"
    environment = {**os.environ, "ZEROCAST_TEST_MARK": mark, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", *([mode] if mode else []), *arguments]
    with log.open("wb") as said:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=said,
            stderr=said,
            start_new_session=True,
            preexec_fn=_take_signals,  # noqa: PLW1509 - it takes no lock
        )
    try:
        deadline = time.monotonic() + 120
        while not ready(log.read_text(errors="replace")):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
            time.sleep(0.01)
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)
        status = process.wait(60)
        lines = [line for line in log.read_text(errors="replace").splitlines() if not any(n in line for n in NOISE)]
        return Ended(status, [line for line in lines if line.strip()], marked(mark))
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def _take_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it


def marked(mark: str) -> list[int]:
    """Return the processes that were started with this mark in their environment, except zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"ZEROCAST_TEST_MARK={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def imports(module: str) -> Callable[[str], bool]:
    return lambda said: any(line.split("|")[-1].strip() == module for line in said.splitlines())


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("how", "delay"),
    [
        ("script", 0.2),
        pytest.param("script", 0.0, marks=pytest.mark.slow),
        pytest.param("python -m", 0.0, marks=pytest.mark.slow),
        pytest.param("python -m", 0.2, marks=pytest.mark.slow),
    ],
)
def test_while_a_command_is_imported(tmp_path: Path, how: str, delay: float) -> None:
    """An interrupt during imports, from which a KeyboardInterrupt may come out as anything, or at the first
    output ends the command.
    """
    if how == "script" and not SCRIPT.exists():
        pytest.skip("zerocast is not installed as a command")
    arguments = ["zerocast", "doctor"] if how == "python -m" else [str(SCRIPT), "doctor"]
    ended = interrupt_when(
        arguments, imports("zerocast.cli.self_test"), delay, tmp_path, mode="-m" if how == "python -m" else ""
    )
    # A shell reports both as 130. Python ends by the signal if it came within the exec of a dataclass.
    assert ended.status in (130, -signal.SIGINT)
    assert ended.left == []
    assert [line for line in ended.said if "Traceback" in line or "Error" in line] == []
    assert ended.said.count("zerocast: interrupted") == 1


def press(*_: Any, **__: Any) -> None:
    """Send this process what a terminal sends for Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)


def pressed_once(path: Path) -> None:
    path.write_bytes(b"half")
    press()


def pressed_for_nothing(path: Path) -> None:
    """Swallow the interrupt, like a finaliser, or a library that makes another error of it."""
    try:
        press()
    except KeyboardInterrupt:
        path.write_bytes(b"whole")


@pytest.mark.parametrize("presses_again", [False, True])
@pytest.mark.parametrize("draw", [pressed_once, pressed_for_nothing])
def test_a_picture(
    tmp_path: Path, monkeypatch: Any, capfd: Any, draw: Callable[[Path], None], presses_again: bool
) -> None:
    """An interrupted picture leaves nothing half-written, also if a second press comes during the clean-up."""
    unlink = Path.unlink

    def slow_unlink(path: Path, **options: Any) -> None:
        press()
        unlink(path, **options)

    if presses_again:
        monkeypatch.setattr(Path, "unlink", slow_unlink)
    monkeypatch.setattr(plan, "_plot", lambda found, title, path: draw(path))
    (tmp_path / "plan.png").write_bytes(b"an older one")
    assert main(["plan", "llama3-8b", "--png", str(tmp_path / "plan.png")]) == 130
    assert capfd.readouterr().err == "zerocast: interrupted\n"
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert left == {"plan.png": b"an older one" if draw is pressed_once else b"whole"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("to", ["safetensors", "checkpoint"])
def test_nothing_half_written_is_left_of_an_export(tmp_path: Path, monkeypatch: Any, capfd: Any, to: str) -> None:
    torch.save({"w": torch.ones(64, 64), "v": torch.ones(64, 64)}, tmp_path / "masters.pt")
    if to == "safetensors":
        monkeypatch.setattr(write.TensorWriter, "add", press)
    else:
        monkeypatch.setattr(
            "zerocast.serve.from_masters._master", press
        )  # within a save of torch, which takes it for a failure
    assert main(["export", str(tmp_path / "masters.pt"), str(tmp_path / "out"), "--to", to]) == 130
    assert capfd.readouterr().err == "zerocast: interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["masters.pt"]


def press_for_a_failure(*_: Any) -> None:
    """Raise what torch's writer makes of a KeyboardInterrupt that passes through its C++."""
    try:
        press()
    except KeyboardInterrupt:
        raise ValueError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598") from None


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("export._exported", ["masters.pt", "out"]),
        ("doctor._examine", []),
        ("inspect.Contents.read", ["masters.pt"]),
        ("plan.read_model", ["llama3-8b"]),
    ],
)
def test_an_interrupt_that_a_library_takes_for_a_failure(
    monkeypatch: Any, capfd: Any, inside: str, arguments: list[str]
) -> None:
    monkeypatch.setattr(f"zerocast.cli.{inside}", press_for_a_failure)
    assert main([inside.partition(".")[0], *arguments]) == 130
    assert capfd.readouterr().err == "zerocast: interrupted\n"


@pytest.mark.parametrize("in_thread", [False, True])
def test_who_handles_the_signal_otherwise_keeps_it(in_thread: bool) -> None:
    """A background job keeps ignoring the signal, and only the main thread may set a handler."""
    handler = signal.default_int_handler if in_thread else signal.SIG_IGN
    signal.signal(signal.SIGINT, handler)

    def during_a_command() -> Any:
        with cli.remembered():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        assert (threads.submit(during_a_command).result() if in_thread else during_a_command()) is handler
