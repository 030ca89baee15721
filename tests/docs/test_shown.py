"""What pages show of commands is what these print today."""

from pathlib import Path

import pytest

from tests.docs import shown
from tests.docs.page import ROOT


def test_the_page_on_scale_shows_three_models() -> None:
    sweeps = [page for page, arguments, _ in shown.commands() if "--sweep" in arguments]
    assert sweeps.count(ROOT / "docs/scale.md") == 3


CASES = [
    pytest.param(*case, marks=[pytest.mark.slow] if "deepseek" in case[1] else [], id=case[1])
    for case in shown.commands()
]


@pytest.mark.parametrize(("page", "arguments", "text"), CASES)
def test_commands_print_what_pages_show(page: Path, arguments: str, text: str) -> None:
    assert shown.printed(arguments) == text, "make shown"
