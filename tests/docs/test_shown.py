"""What pages show of commands is what these print today."""

from pathlib import Path

import pytest

from tests.docs import shown
from tests.docs.page import ROOT


def test_the_page_on_scale_shows_a_sweep() -> None:
    assert [page for page, arguments, _ in shown.commands() if "--sweep" in arguments] == [ROOT / "docs/scale.md"]


CASES = [pytest.param(*case, id=case[1]) for case in shown.commands()]


@pytest.mark.parametrize(("page", "arguments", "text"), CASES)
def test_commands_print_what_pages_show(page: Path, arguments: str, text: str) -> None:
    assert shown.printed(arguments) == text, "make shown"
