"""One pool of processes a world size, to which multi-process tests stream their cases.

A case is an importable function with its arguments; every rank calls it, inside a process group of gloo, or of NCCL with a GPU a
rank, and what each returned comes back by rank. A failure on any rank, and a case that is late, fails the test and replaces the
processes: nothing of a broken collective is left for the next case. Processes are forked from a server that is a fork of the tests'
process after it has imported all tests, so a new pool costs little. Where there is a GPU, the server is a process that has torch
imported and has not touched a GPU, and a pool of NCCL takes some seconds for what each process sets up on its GPU. Between cases
the processes of gloo are stopped, since each polls its sockets: the idle pools of a session took two thirds of two cores. Where
lines are counted, those of one rank of two are too.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from coverage import Coverage

CASE_SECONDS = 60.0  # a case that takes longer hangs
START_SECONDS = 120.0
GRACE_SECONDS = 1.0  # for the other ranks, once one has failed
# The limit for a process. gloo has three threads for each group that cases left, and all of them wake up all the time: 400 take
# 14 % of a core in each rank of each pool. New processes take 0.2 s.
MAX_THREADS = 100
COLLECTIVE_SECONDS = 30

Ranks = Callable[[int], Callable[..., list[Any]]]  # ranks(world)(function, *args): the results, by rank

context = multiprocessing.get_context("forkserver")
# with what `import zerocast` leaves to be imported when it is asked for
_preloaded = [
    "torch.distributed",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "hypothesis",
    "pytest",
    "zerocast.optim",
    "zerocast.fsdp2",
    "zerocast.export",
    "zerocast.metrics",
    "tests.freeze_imports",
]
context.set_forkserver_preload(_preloaded)


def preload(module: str) -> None:
    """Import `module` before the first rank is forked, so that all ranks have it. Does nothing on a
    machine with a GPU: hosts look for a GPU when they are imported, and a process that is forked
    after that cannot use CUDA.
    """
    import torch

    if not torch.cuda.is_available():
        _preloaded.insert(-1, module)
        context.set_forkserver_preload(_preloaded)


def fork_server() -> None:
    """Fork the server of the ranks from this process, so that ranks have all modules that it has imported. On a
    machine with a GPU, for the reason that `preload` gives, and where lines are counted, the first rank starts a new server.
    """
    import torch

    if torch.cuda.is_available() or Coverage.current() is not None:
        return
    with patch.object(util, "spawnv_passfds", _fork), warnings.catch_warnings():
        # Python 3.12 warns of threads, which may hold locks. Those of pytest-xdist and of numpy wait, and hold none.
        warnings.simplefilter("ignore", DeprecationWarning)
        forkserver.ensure_running()


def _fork(path: object, arguments: list[Any], kept: list[int]) -> int:
    """Run a Python program, the last of the arguments, in a fork of this process. Returns the number of the new process."""
    process = os.fork()
    if process:
        return process
    try:
        # Pipes and files of this process must close when it does. Their numbers stay taken: objects that the fork
        # inherits close them some day, and would close what has the same number by then.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in (*kept, nowhere):
                os.dup2(nowhere, number, inheritable=False)
        # pytest has replaced them.
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def threads(process: int | None) -> int:
    """Return the number of threads of a process, 0 where the system does not list them."""
    listed = Path(f"/proc/{process}/task")
    return len(list(listed.iterdir())) if listed.is_dir() else 0


def error_of(call: Callable[[], object]) -> str:
    """Return the error of a call as "ValueError: what it says", or an empty text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def on_ranks(*worlds: Any, timeout: float = CASE_SECONDS) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test's body on every rank of each of these numbers of ranks, with its parameters and fixtures
    pickled. 0 is this process, without a group. Without numbers `world` is a parameter of the test.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(ranks: Ranks, world: int, **given: Any) -> None:
            given |= {"world": world} if "world" in named else {}
            if world == 0:
                body(**given)
            else:
                ranks(world)(_run_body, body.__module__, body.__name__, given, timeout=timeout)

        named = inspect.signature(body).parameters
        arguments = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("ranks", "world", *named)]
        test.__signature__ = inspect.Signature([*dict.fromkeys(arguments)])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world", worlds)(test) if worlds else test

    return decorate


def _run_body(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**given)


class RanksFailed(AssertionError):
    """The error of a case that raised, died or was late on some ranks. The message holds what each of them said."""


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection


class Pool:
    """`world` processes of one group of `backend`, gloo or nccl, started at the first case."""

    def __init__(self, world: int, backend: str = "gloo") -> None:
        self.world, self.backend = world, backend
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the store, which new groups need as well
        # multiprocessing would wait for ever for a stopped process to end.
        atexit.register(self._kill)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = CASE_SECONDS) -> list[Any]:
        """Run `function(*args)` on every rank. Return the results by rank. Raises RanksFailed."""
        message = pickle.dumps((function, args))
        if not self._workers:
            self._start()
        self._signal(signal.SIGCONT)
        for worker in self._workers:
            worker.connection.send_bytes(message)
        try:
            answers = self._collect(function.__qualname__, timeout)
        except BaseException:  # a test that was interrupted here leaves no answers for the next one
            self._kill()
            raise
        if threads(self._workers[0].process.pid) > MAX_THREADS:
            self.close()
        else:
            self._signal(signal.SIGSTOP)
        return answers

    def _signal(self, number: signal.Signals) -> None:
        """Stop or continue the processes. Those of NCCL go on, whose watchdogs take a silent process for a broken one."""
        for worker in self._workers if self.backend == "gloo" else []:
            os.kill(worker.process.pid or 0, number)

    def close(self) -> None:
        """Let the processes leave their group and end."""
        self._signal(signal.SIGCONT)
        for worker in self._workers:
            worker.connection.send_bytes(b"")
        for worker in self._workers:
            worker.process.join(10.0)
        self._kill()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zerocast-store-")
        store = Path(self._folder.name, "store").as_uri()
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            name = f"rank {rank} of {self.world}"
            counted = rank == 0 and self.world == 2 and Coverage.current() is not None
            arguments = (rank, self.world, self.backend, store, theirs, counted)
            process = context.Process(target=_serve, args=arguments, daemon=True, name=name)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))
        self._collect("start", START_SECONDS)

    def _collect(self, what: str, timeout: float) -> list[Any]:
        ranks = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        results: list[Any] = [None] * self.world
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while ranks:
            ready = wait(list(ranks), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = ranks.pop(connection)
                succeeded, results[rank] = _reply(connection, self._workers[rank].process)
                if not succeeded:
                    failures[rank] = results[rank]
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures or ranks:
            failures |= {rank: "no answer in time\n" for rank in ranks.values()}
            self._kill()
            said = "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items()))
            raise RanksFailed(f"{what} on {self.world} ranks\n{said}")
        return results

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            # Megatron's checkpoints leave a process to each rank, which would outlive a rank that is killed.
            assert worker.process.pid
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.join()
            worker.connection.close()
        self._workers = []
        if self._folder:
            self._folder.cleanup()
            self._folder = None


def _reply(connection: Connection, process: BaseProcess) -> tuple[bool, Any]:
    try:
        reply: tuple[bool, Any] = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        process.join(GRACE_SECONDS)
        ended = process.exitcode
        return False, f"the process died: {signal.strsignal(-ended) if ended and ended < 0 else ended}\n"
    return reply


def in_a_process(function: Callable[..., object], *arguments: Any, seconds: float = 240.0) -> tuple[int | None, str]:
    """Call an importable function in a process of its own that has torch imported already, on one thread, and let it end as a
    command does. Returns its exit status and what it printed; it is killed if it takes longer.
    """
    with tempfile.TemporaryDirectory(prefix="zerocast-process-") as folder:
        printed = Path(folder, "printed")
        process = context.Process(target=_ends_as_a_command, args=(str(printed), function, arguments))
        process.start()
        process.join(seconds)
        process.kill()
        process.join()
        return process.exitcode, printed.read_text(errors="replace")


def _ends_as_a_command(printed: str, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    with open(printed, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        function(*arguments)
    finally:
        # The interpreter ends in this order, too.
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()


def join(rank: int, world: int, backend: str, store: str, limit: timedelta) -> None:
    """Enter the default process group, on one thread; with NCCL on the GPU of the rank's number. `store` is the URI of a file."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=limit)


def seed_random_numbers() -> None:
    """Seed them. Without a GPU `torch.manual_seed` keeps the seed for each kind of device that may come, with the text of the
    whole stack, which takes longer than many a test.
    """
    import torch

    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


def freeze_modules() -> None:
    """Keep what was imported out of garbage collections, which cost half a second else wherever optimizers ask for one."""
    gc.collect()
    gc.freeze()


def _told(error: BaseException) -> str:
    """Return the traceback of an error, for a failed assertion with the variables of each function, which
    nothing else tells.
    """
    with contextlib.suppress(Exception):  # of a variable that has no text, in Python 3.10
        told = traceback.TracebackException.from_exception(error, capture_locals=isinstance(error, AssertionError))
        return "".join(told.format())
    return "".join(traceback.format_exception(error))


def _serve(rank: int, world: int, backend: str, store: str, connection: Connection, counted: bool) -> None:
    """Run a worker: join the group, then answer cases until an empty message."""
    import torch.distributed as dist

    from zerocast.weight import owners

    os.setpgid(0, 0)  # with what it starts, which ends with it
    faulthandler.enable()  # a process that memory faults end says where it was
    coverage = Coverage(data_suffix=True) if counted else None
    if coverage:
        coverage.start()
    join(rank, world, backend, store, timedelta(seconds=COLLECTIVE_SECONDS))
    connection.send_bytes(pickle.dumps((True, None)))
    modules = 0
    while message := connection.recv_bytes():
        try:
            function, args = pickle.loads(message)
            if len(sys.modules) > modules:
                modules = len(sys.modules)
                freeze_modules()
            seed_random_numbers()  # no case depends on those before it
            owners.forget_all()
            answer = pickle.dumps((True, function(*args)))
        except BaseException as error:  # a rank must answer each call
            answer = pickle.dumps((False, _told(error)))
            if coverage:  # the process is about to be replaced
                coverage.save()
        connection.send_bytes(answer)
    dist.destroy_process_group()
    if coverage:
        coverage.stop()
        coverage.save()
