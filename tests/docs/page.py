"""Pages of the documentation as scripts: the Python blocks of one, in their order, with names in common.

What a block needs and a reader does not may stand in an HTML comment, which no reader sees:

    <!-- ranks: 1 2 -->                    run the page alone, and on two ranks; a page without it is run alone
    <!-- host: megatron -->                with a training host made to run on the CPU, by tests/megatron
    <!-- invisible-code-block: python      names that blocks below use
    ...
    -->
"""

import contextlib
import importlib
import multiprocessing
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

import zerocast

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "zerocast", "csrc", "integrations", "examples", "tests")
RANKS = re.compile(r"^<!-- ranks: ([\d ]+) -->$", re.MULTILINE)
HOST = re.compile(r"^<!-- host: (\w+) -->$", re.MULTILINE)
BLOCK = re.compile(r"^```python$", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """A Markdown file of the repository, by its path."""

    path: Path

    def __str__(self) -> str:
        return os.path.relpath(self.path, ROOT)

    @property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def worlds(self) -> list[int]:
        """The numbers of ranks that it is run on; 1 is this process, without a process group."""
        found = RANKS.search(self.text)
        return [int(world) for world in found[1].split()] if found else [1]

    @property
    def host(self) -> str | None:
        """The training host that its blocks need."""
        found = HOST.search(self.text)
        return found[1] if found else None

    @property
    def why_not(self) -> str:
        """Why it cannot be run here; empty if it can."""
        return str(self._stand_in.WHY_NOT) if self.host else ""

    @property
    def _stand_in(self) -> Any:
        return importlib.import_module(f"tests.{self.host}.host_on_cpu")  # takes seconds: not for other pages

    @property
    def visible_blocks(self) -> int:
        return len(BLOCK.findall(self.text))

    def run(self, folder: str) -> int:
        """Run its blocks in `folder`; returns their number, invisible ones included."""
        document = Sybil([PythonCodeBlockParser()]).parse(self.path)
        with _restored(folder), self._host_on_cpu():
            for example in document:
                example.evaluate()
        return len(list(document))

    @contextlib.contextmanager
    def _host_on_cpu(self) -> Iterator[None]:
        if self.host is None:
            yield
            return
        may_fork = mock.patch.dict(
            vars(multiprocessing.current_process())["_config"], daemon=False
        )  # to write checkpoints
        with may_fork, self._stand_in.host_on_cpu():
            yield


def pages() -> list[Page]:
    """Return every page of the site that has Python in it."""
    return [page for page in map(Page, markdown_files()) if page.visible_blocks]


def markdown_files() -> list[Path]:
    """Return the Markdown files of the repository."""
    return sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])


@contextlib.contextmanager
def _restored(folder: str) -> Iterator[None]:
    """Restore what blocks may change of the process."""
    here = os.getcwd()
    os.chdir(folder)
    try:
        with torch.random.fork_rng(), zerocast.gemm.use("auto"):
            yield
    finally:
        os.chdir(here)
        zerocast.set_debug(False)
