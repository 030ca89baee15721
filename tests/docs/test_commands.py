"""Command lines of the documentation: their targets, modules, files and options exist.

That the commands do what is said of them is tested where they are (`tests/cli`, `tests/examples`, `tests/megatron`).
"""

import importlib.util
import re
import shlex

import pytest

from tests.docs.page import ROOT, markdown_files
from zerocast.cli import main
from zerocast.cli.app import find

SHELL = re.compile(r"^```sh\n(.*?)^```$|^( {4}.*?)$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^ *((?:zerocast|make|python|torchrun) .*)$", re.MULTILINE)
HOSTS = ("torchtitan", "megatron")  # no dependencies of ours
NUMBER_OF_RANKS = ("--nproc-per-node", "--nproc_per_node")


def commands() -> list[tuple[str, str]]:
    """Return (page, command line) of every indented or fenced block."""
    found = markdown_files()
    return [(str(path.relative_to(ROOT)), line) for path in found for line in _commands_of(path.read_text())]


def _commands_of(text: str) -> list[str]:
    blocks = [(fenced or indented).replace("\\\n", " ") for fenced, indented in SHELL.findall(text)]
    return [line for block in blocks for line in COMMAND.findall(block)]


def check(words: list[str]) -> None:
    """Raise, or end the process as the parser does, if a command cannot be meant."""
    program, *rest = words
    if program == "make":
        assert re.search(rf"^{re.escape(rest[0])}:", (ROOT / "Makefile").read_text(), re.MULTILINE), rest
        return
    if program == "torchrun" and rest[0] in NUMBER_OF_RANKS:
        rest = rest[2:]
    if program == "zerocast" or rest[:2] == ["-m", "zerocast"]:
        find(rest[2:] if rest[0] == "-m" else rest).parsed()
    elif rest[0] == "-m":
        package = rest[1].partition(".")[0]
        if package in HOSTS and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        assert importlib.util.find_spec(rest[1]) is not None, rest
    else:
        assert (ROOT / rest[0]).is_file(), rest


def words_of(line: str) -> list[str]:
    """Return the words of a line as a shell reads them, without comments and redirection."""
    return shlex.split(line.partition(" > ")[0], comments=True)


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda value: value)
def test_commands_exist(page: str, line: str) -> None:
    check(words_of(line))


def test_commands_are_found() -> None:
    assert {page for page, _ in commands()} >= {"README.md", "zerocast/cli/README.md", "examples/README.md"}


def test_the_plan_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers beside the command are those that it prints."""
    text = (ROOT / "zerocast/cli/README.md").read_text()
    (line,) = (line for line in _commands_of(text) if line.startswith("zerocast plan"))
    assert main(words_of(line.partition(" --png")[0])[1:]) == 0
    printed = [row.split() for row in capsys.readouterr().out.splitlines()]
    shown = [row.split() for row in re.findall(r"^ {6}(\w.* \d+\.\d+)$", text, re.MULTILINE)]
    assert len(shown) == 3
    assert [row for row in shown if row not in printed] == []
