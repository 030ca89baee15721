"""The troubleshooting page quotes messages that the source has."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.page import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
GAP = "…"
FIRST_CELL = re.compile(r"^\| `(.+?)` \|", re.MULTILINE)
LOGGED = re.compile(r"`([^`]*)`")


def template(node: ast.AST) -> str:
    """Return a string expression with gaps for what is only known at run time."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) if isinstance(part, ast.Constant) else GAP for part in node.values)
    return GAP


def plain(text: str) -> str:
    """Put gaps for the formats of logging too, and drop code marks, which cannot be quoted inside a message."""
    return re.sub(r"%[sdr]", GAP, text).replace("`", "")


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("zerocast", "integrations"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def strings() -> set[str]:
    """Return every string of the library."""
    return {
        plain(template(node))
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Constant, ast.JoinedStr))
    }


def quoted() -> list[str]:
    return FIRST_CELL.findall(PAGE.read_text())


@pytest.fixture(scope="module")
def known() -> set[str]:
    return strings()


def test_every_quoted_message_is_in_the_source(known: set[str]) -> None:
    assert len(quoted()) > 20
    assert [message for message in quoted() if not any(message in text for text in known)] == []


def test_logged_messages_are_in_the_source(known: set[str]) -> None:
    lines = " ".join(PAGE.read_text().split()).split("Logged")[1:]
    found = [message for line in lines for message in LOGGED.findall(line.split("## ")[0]) if GAP in message]
    assert len(found) >= 4
    assert [message for message in found if not any(message in text for text in known)] == []
