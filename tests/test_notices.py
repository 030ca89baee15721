"""docs/notices.md says what the tests say: what goes wrong, where, and what zerocast does about it.

`python -m tests.test_notices` (`make notices`) writes its lists. A row is `@pytest.mark.notices(mistake, where=..., answer=...)`
over one test or several; nothing in the lists is written by hand. Marks are read from the source, so that tests of hosts that are
not installed count too.
"""

import ast
import functools
import textwrap
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "notices.md"
BEGIN, END = "<!-- begin: made by `make notices` from the marks of the tests -->\n", "<!-- end -->"
WHERE = (
    "Weights",
    "CastPlan",
    "ZeroAdamW",
    "FSDP2",
    "Checkpoints",
    "Megatron",
    "TransformerEngine",
    "Apex",
)
Row = tuple[str, str, str]  # where, mistake, answer


@functools.cache
def marked() -> dict[Row, list[str]]:
    """Return the tests behind each row, as `file::test`."""
    rows: dict[Row, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                for row in (row for mark in node.decorator_list for row in _rows(mark)):
                    rows[row].append(f"{path.relative_to(TESTS.parent)}::{node.name}")
    return rows


def _rows(decorator: ast.expr) -> list[Row]:
    """Return the rows of a mark, one for each host. It may hold literals only."""
    if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.notices"):
        return []
    (mistake,) = map(ast.literal_eval, decorator.args)
    says = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords}
    places = says["where"] if isinstance(says["where"], tuple) else (says["where"],)
    if not {*places} <= {*WHERE}:
        raise ValueError(f"where is one of {WHERE}, got {says['where']!r}")
    return [(where, mistake, says["answer"]) for where in places]


def table() -> str:
    """Return Markdown: a list for each host, or for the hosts that share an answer, in the order of WHERE."""
    shared: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(dict)
    for (where, mistake, answer), tests in marked().items():
        shared[mistake, answer][where] = tests
    by_hosts: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for (mistake, answer), by_host in sorted(shared.items()):
        links = _links(mistake, sorted({test for tests in by_host.values() for test in tests}))
        by_hosts[tuple(sorted(map(WHERE.index, by_host)))].append(_wrapped(f"* {links}: {answer}"))
    return "\n".join(_section(hosts, by_hosts[hosts]) for hosts in sorted(by_hosts))


def _section(hosts: tuple[int, ...], rows: list[str]) -> str:
    heading = ", ".join(WHERE[host] for host in hosts)
    return f"## {heading}\n\n{''.join(rows)}"


def _wrapped(row: str) -> str:
    return textwrap.fill(row, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


def _links(mistake: str, tests: list[str]) -> str:
    """Return a mistake with a link to each file that has a test of it."""
    first, *others = dict.fromkeys(test.partition("::")[0] for test in tests)
    return " ".join([f"[{mistake}](../{first})", *(f"[({n})](../{path})" for n, path in enumerate(others, 2))])


def written(page: str) -> str:
    """Return the page with the current lists."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


def test_the_page_has_the_rows_of_the_tests() -> None:
    page = PAGE.read_text()
    assert page == written(page), "docs/notices.md is not what the marks say: run `make notices`"


def test_every_test_that_is_named_exists_once_in_its_row() -> None:
    for row, tests in marked().items():
        assert len(tests) == len(set(tests)), row


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
