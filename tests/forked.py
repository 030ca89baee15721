"""Workers of pytest-xdist as forks of the process that starts them, once it has imported all tests: each would take 10 s for it."""

import contextlib
import gc
import importlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from tests.workers import fork

# A Python that execnet starts reads its program from there as well. The exit handlers of the parent are not this process's.
PROGRAM = """
import atexit, os, sys
os.dup2({its_input}, 0)
os.dup2({its_output}, 1)
sys.stdin = open(0, closefd=False)
atexit._clear()
try:
    exec(eval(sys.stdin.readline()))
finally:
    atexit._run_exitfuncs()
"""


class Forked(Popen2IO):
    """The connection to a worker, in place of execnet's `Popen2IOMaster`, which starts a Python with these arguments."""

    def __init__(self, arguments: list[str], execmodel: Any) -> None:
        its_input, writing = os.pipe()
        reading, its_output = os.pipe()
        program = PROGRAM.format(its_input=its_input, its_output=its_output)
        self._process = fork(program, [its_input, its_output])
        os.close(its_input)
        os.close(its_output)
        super().__init__(os.fdopen(writing, "wb"), os.fdopen(reading, "rb"), execmodel)

    def wait(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)


def fork_workers(config: pytest.Config) -> None:
    """Import the tests that pytest's arguments name, and have workers forked from now on. On a machine with a GPU, for the
    reason that `workers.preload` gives, and where lines are counted, each worker remains a Python of its own.
    """
    if torch.cuda.is_available() or config.pluginmanager.has_plugin("_cov"):
        return
    torch.set_num_threads(1)
    # As in a worker: what is imported stays.
    gc.disable()
    for argument in config.args:
        path = Path(config.invocation_params.dir, argument.partition("::")[0])
        # In pytest's order: the hosts of a room are made importable by its conftest.py.
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_name("conftest.py"), path]
        for file in files:
            if file.name == "conftest.py" or file.name.startswith("test_"):
                _import(file, config.rootpath)
    gateway_io.Popen2IOMaster = Forked


def _import(file: Path, root: Path) -> None:
    """Import a module of tests. One that fails, or is skipped as a whole, is left to the workers, who say so."""
    with contextlib.suppress(Exception, pytest.skip.Exception):
        importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))
