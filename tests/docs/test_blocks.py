"""Every Python block of README.md and of the site runs, and what it asserts holds; a broken one fails."""

import re
from pathlib import Path

import pytest

from tests.docs.page import Page, markdown_files, pages
from tests.workers import Ranks

CASES = [pytest.param(page, world, id=f"{page}-{world}") for page in pages() for world in page.worlds]
PYTHON_WITHOUT_FENCE = re.compile(r"^ {4}(?:from \w|import \w|@|.*\bzerocast(?:\.\w+)+\()", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$|^<!--.*?-->$", re.MULTILINE | re.DOTALL)


def run(ranks: Ranks, page: Page, world: int, folder: Path) -> list[int]:
    return [page.run(str(folder))] if world == 1 else ranks(world)(page.run, str(folder))


@pytest.mark.parametrize(("page", "world"), CASES)
def test_blocks_run(ranks: Ranks, page: Page, world: int, tmp_path: Path) -> None:
    if page.why_not:
        pytest.skip(page.why_not)
    assert min(run(ranks, page, world, tmp_path)) >= page.visible_blocks


def test_no_page_is_passed_over() -> None:
    found = {str(page) for page in pages()}
    assert {"README.md", "docs/quickstart/zero.md", "docs/formats/nvfp4.md", "zerocast/metrics/README.md"} <= found


def test_python_is_in_fences() -> None:
    """Indented Python would not be run."""
    prose = {path: FENCED.sub("", path.read_text()) for path in markdown_files()}
    assert [path for path, text in prose.items() if PYTHON_WITHOUT_FENCE.search(text)] == []
