"""Every way in which zerocast writes a folder whole or not at all: what was there, the save, what must be left."""

import functools
import hashlib
import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.checkpoint.crash.disk import Recorder
from tests.checkpoint.storage import names_in
from tests.workers import START_SECONDS, join
from zerocast import Recipe, ZeroAdamW, optim, quantize_
from zerocast.checkpoint.sources import open_source
from zerocast.export import export_safetensors
from zerocast.optim import Checkpoints

SAVED = "saved"  # the mark after the call that has returned


def _model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))


def trained(steps: int) -> ZeroAdamW:
    """An optimizer after so many steps, the same wherever it is made."""
    model = _model()
    quantize_(model, Recipe({"*.weight": "nvfp4"}))
    optimizer = ZeroAdamW(model.named_parameters(), lr=1e-2)
    for step in range(steps):
        model(torch.full((2, 16), 0.1 * (step + 1))).square().sum().backward()
        optimizer.step()
    return optimizer


def trained_by_torch(steps: int) -> Any:
    """Likewise with an optimizer of torch."""
    from zerocast.fsdp2 import TrainingState

    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(max(1, steps)):
        optimizer.zero_grad()
        model(torch.full((2, 16), 0.1 * (step + 1))).square().sum().backward()
        optimizer.step()
    return TrainingState(model, optimizer)


def value(state: Any) -> str:
    """What an optimizer holds on this rank."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_leaves(state.state_dict(), "")):
        digest.update(name.encode() + getattr(tensor, "flat", tensor).numpy().tobytes())
    return digest.hexdigest()


def _leaves(state: Any, prefix: str) -> Any:
    for key, one in state.items():
        yield from _leaves(one, f"{prefix}{key}.") if isinstance(one, dict) else [(f"{prefix}{key}", one)]


@functools.cache
def _expected(make: Callable[[int], Any], steps: int) -> str:
    return value(make(steps))


@functools.cache
def _reader(make: Callable[[int], Any]) -> Any:
    return make(0)


@dataclass(frozen=True)
class Folder:
    """A folder of checkpoints. `before` and `saved` are numbers of checkpoints, each with how often it was trained until then."""

    before: tuple[tuple[int, int], ...]
    saved: tuple[int, int]
    keep: int
    place: str = "checkpoints"
    asynchronous: bool = False
    make: Callable[[int], Any] = trained

    def prepare(self, root: Path) -> None:
        """Write the checkpoints that exist before the save that may be interrupted."""
        for step, steps in self.before:
            self._checkpoints(root).save(self.make(steps), step)

    def save(self, root: Path, mark: Callable[[str], None]) -> None:
        """What may be interrupted, on every rank; training goes on while an asynchronous save writes."""
        number, steps = self.saved
        checkpoints, state = self._checkpoints(root, self.asynchronous), self.make(steps)
        checkpoints.save(state, number)
        if self.asynchronous:
            self.make(steps)
        checkpoints.wait()
        mark(SAVED)

    def check(self, root: Path, done: bool) -> None:
        """Every step that is listed can be loaded, and the newest is what was saved, or what was before while it is not `done`."""
        checkpoints, reader = self._checkpoints(root), _reader(self.make)
        allowed = {number: {_expected(self.make, steps)} for number, steps in self.before}
        number, new = self.saved[0], _expected(self.make, self.saved[1])
        allowed.setdefault(number, set()).add(new)
        steps = checkpoints.steps()
        assert steps or not (self.before or done), "no checkpoint is left"
        for step in reversed(steps):
            assert checkpoints.load(reader, None if step == steps[-1] else step) == step, f"step {step} is passed over"
            assert value(reader) in allowed[step], f"step {step} is not what was saved"
            assert value(reader) == new or not (done and step == number), "what was saved is not there"
        last = max([number * done, *(step for step, _ in self.before)])
        assert not steps or steps[-1] >= last, f"step {last} is lost, {steps} are left"

    def goes_on(self, root: Path) -> None:
        """What is left after a crash takes the next save, and this number once more."""
        checkpoints, reader = self._checkpoints(root), _reader(self.make)
        for number, steps in [(self.saved[0], 3), (self.saved[0] + 1, 4)]:
            checkpoints.save(self.make(steps), number)
            assert checkpoints.load(reader) == number
            assert value(reader) == _expected(self.make, steps)
        kept = checkpoints.steps()
        assert len(kept) <= self.keep
        self._check_names(root, kept)

    def _check_names(self, root: Path, kept: list[int]) -> None:
        assert names_in(root / self.place) == [f"step_{step:08d}" for step in kept]

    def _checkpoints(self, root: Path, asynchronous: bool = False) -> Checkpoints:
        return Checkpoints(root / self.place, self.keep, asynchronous)


@dataclass(frozen=True)
class Once:
    """A folder that is written once, by `write(root, path)`; `read` finds in it what was to be written, or raises."""

    write: Callable[[Path, Path], object]
    read: Callable[[Path], object]
    place: str = "once"

    def prepare(self, root: Path) -> None:
        """What it is made from."""
        save_file(_model().state_dict(), root / "source.safetensors")

    def save(self, root: Path, mark: Callable[[str], None]) -> None:
        """Write one file or folder, the part that may be interrupted, and mark its end."""
        self.write(root, root / self.place)
        mark(SAVED)

    def check(self, root: Path, done: bool) -> None:
        """The file is whole or not there."""
        if done or (root / self.place).exists():
            self.read(root / self.place)

    def goes_on(self, root: Path) -> None:
        """What is left after a crash is no hindrance."""
        if not (root / self.place).exists():
            self.write(root, root / self.place)
        self.read(root / self.place)


def _read_one(path: Path) -> None:
    optim.load(_reader(trained), path)
    assert value(_reader(trained)) == _expected(trained, 1)


def _exported(root: Path, path: Path) -> None:
    from zerocast.cli.export import export
    from zerocast.cli.options import ExportConfig

    assert export(ExportConfig(str(root / "source.safetensors"), str(path), to="checkpoint")) == 0


def _exported_live(root: Path, path: Path) -> None:
    """By all ranks, each of which writes files of its own."""
    group = dist.group.WORLD if dist.is_initialized() else None
    export_safetensors(_model(), path, group=group)


def _read_weights(path: Path) -> None:
    found = open_source(path)
    front = "model." if "model.0.weight" in found.entries else ""
    for name, wanted in _model().state_dict().items():
        tensor = found.read(front + name, (0,) * wanted.dim(), tuple(wanted.shape))
        assert torch.equal(tensor.float(), wanted.to(tensor.dtype).float()), name


SAVES: dict[str, Folder | Once] = {
    "the first": Folder((), (1, 1), 3, "not/yet/there"),
    "the next": Folder(((1, 1),), (2, 2), 3),
    "the next, the one before goes": Folder(((1, 1),), (2, 2), 1),
    "in place of itself": Folder(((1, 1),), (1, 2), 1),
    "in place of itself, beside others": Folder(((1, 1), (2, 2)), (2, 5), 2),
    "while training goes on": Folder(((1, 1),), (2, 2), 1, asynchronous=True),
    "in place of itself, while training goes on": Folder(((1, 1),), (1, 2), 1, asynchronous=True),
    "an optimizer of torch": Folder(((1, 1),), (1, 2), 1, make=trained_by_torch),
    "zerocast.optim.save": Once(lambda _, path: optim.save(trained(1), path), _read_one),
    "zerocast.optim.save, deeper": Once(lambda _, path: optim.save(trained(1), path), _read_one, "not/yet/there"),
    "export_safetensors": Once(_exported_live, _read_weights),
    "zerocast export": Once(_exported, _read_weights),
}


def run(compiled: str, name: str, root: Path, log: Path, rank: int, world: int, kill_before: int) -> None:
    """Save, recorded, in a process of its own, which ends before the `kill_before`-th change."""
    torch.set_num_threads(1)
    if world > 1:
        join(rank, world, "gloo", log.with_suffix(".store").as_uri(), timedelta(seconds=5))
    recorder = Recorder(compiled, root, log)
    recorder.kill_before(kill_before)
    SAVES[name].save(root, recorder.mark)


def run_and_kill(compiled: str, name: str, folder: Path, world: int = 1, killed: int = 0) -> None:
    """Save again and again, one rank killed before a later change each time, until it comes to its end; exit codes by rank.

    Each rank is forked from this process, which has saved once: nothing is imported or set up again.
    """
    torch.set_num_threads(1)
    _save_once(SAVES[name], folder.with_name(f"{folder.name}_whole"))
    for kill_before in itertools.count(1):
        at = folder / f"killed_before_{kill_before:04d}"
        (at / "root").mkdir(parents=True)
        SAVES[name].prepare(at / "root")
        processes = [
            _forked(compiled, name, at / "root", at / "log", rank, world, kill_before * (rank == killed))
            for rank in range(world)
        ]
        codes = [_exit_code(process) for process in processes]
        (at / "codes").write_text(json.dumps(codes))
        if codes[killed] != -signal.SIGKILL:
            return


def _save_once(save: Folder | Once, root: Path) -> None:
    """Without threads, which would not be there in processes that are forked later."""
    root.mkdir()
    save.prepare(root)
    (replace(save, asynchronous=False) if isinstance(save, Folder) else save).save(root, lambda _: None)


def _forked(*arguments: Any) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        run(*arguments)
        code = 0
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(code)


def _exit_code(process: int) -> int:
    """Return the exit code of a process. A process that hangs is killed, and -SIGALRM returned."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return -signal.SIGALRM
