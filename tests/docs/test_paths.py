"""Files that pages, comments and docstrings name are there, and a table of files names all of its folder."""

import functools
import os
import re
import subprocess
from pathlib import Path

from tests.docs.page import ROOT, markdown_files

SOURCES = ("py", "cpp", "cu", "cuh", "h", "inc", "md")
MARKED = re.compile(rf"`([\w./-]+\.(?:{'|'.join(SOURCES)}))`")
FROM_THE_ROOT = re.compile(
    r"\b((?:docs|tests|zerocast|integrations|examples|csrc)/[\w./-]*\w\.(?:py|cpp|cuh?|h|inc|md|json))\b"
)
ROW = re.compile(r"^\| `([\w./-]+\.py)`", re.MULTILINE)
NOT_OURS = {
    "zerocast/formats/fp8_square.py": "CONTRIBUTING's format, which tests/plugins/site has",
    "pretrain_gpt.py": "Megatron-LM's",
    "scripts/checkpoint_conversion/convert_to_hf.py": "torchtitan's",
}


@functools.cache
def files() -> frozenset[str]:
    """Return the files of the repository as whole paths, or all that exist in a copy of the tree without git."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        return frozenset(line for line in listed.stdout.splitlines() if (ROOT / line).exists())
    return frozenset(str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file())


def is_there(named: str, folder: Path) -> bool:
    """Return whether a path exists from the root or the page's folder, or a name below that folder. Pages of
    no room may name files of any.
    """
    if named in NOT_OURS or os.path.normpath(named) in files() or os.path.normpath(folder / named) in files():
        return True
    below = "" if folder.parts[:1] in ((), ("docs",)) else f"{folder}/"
    return any(path.startswith(below) and path.endswith(f"/{named}") for path in files())


def test_files_that_pages_name_are_there() -> None:
    marked = [(path, named) for path in markdown_files() for named in MARKED.findall(path.read_text())]
    assert len(marked) > 100
    assert [(path, named) for path, named in marked if not is_there(named, path.parent.relative_to(ROOT))] == []


def test_files_that_the_source_names_are_there() -> None:
    named = [
        (path, one)
        for path in sorted(files())
        if path.endswith(SOURCES) and path != "CHANGELOG.md"
        for one in FROM_THE_ROOT.findall((ROOT / path).read_text())
    ]
    assert len(named) > 100
    assert [(path, one) for path, one in named if not is_there(one, Path(path).parent)] == []


def test_a_page_with_a_table_of_files_names_all() -> None:
    """A page whose table has rows for files of its own folder names every module of that folder but tests."""
    tables = 0
    for path in markdown_files():
        text = path.read_text()
        rows = [named for named in ROW.findall(text) if (path.parent / named).is_file()]
        modules = {module.name for module in path.parent.glob("*.py") if not module.name.startswith("test_")}
        modules -= {"__init__.py", "__main__.py", "conftest.py"}
        if len(rows) > 2 and "`<stage>.py`" not in text:
            tables += 1
            assert sorted(modules - set(MARKED.findall(text))) == [], f"name them in a row of the table of {path}"
    assert tables


VERBATIM = re.compile(r"^ *```.*?^ *```$|^<!--.*?-->$|^( {4}|\|).*?$", re.MULTILINE | re.DOTALL)
COLUMNS = 100


def test_prose_wraps() -> None:
    """A line is longer only where it has no space to break at, as a link or a picture."""
    lines = [(path, line) for path in markdown_files() for line in VERBATIM.sub("", path.read_text()).splitlines()]
    long = [(path, line) for path, line in lines if len(line) > COLUMNS]
    assert [(path, line) for path, line in long if " " in re.sub(r"!?\[.*?\]\(", "", line.strip("* "))] == []
