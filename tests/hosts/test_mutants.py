"""The list of guards follows the code, and the last table follows the list; `mutate.py` breaks them."""

import re
from pathlib import Path

from tests.hosts.mutate import MUTANTS, ROOT

TABLE = Path(__file__).with_name("mutants.md")


def test_the_text_of_every_guard_is_there_once() -> None:
    counts = {(m.guards, m.path): (ROOT / m.path).read_text().count(m.before) for m in MUTANTS}
    assert {guard: count for guard, count in counts.items() if count != 1} == {}


def test_every_mutant_is_python() -> None:
    """One that cannot be imported would be killed by anything."""
    for mutant in MUTANTS:
        text = (ROOT / mutant.path).read_text().replace(mutant.before, mutant.after)
        compile(text, f"{mutant.path} without {mutant.guards}", "exec")


def test_the_table_has_a_row_for_every_guard() -> None:
    rows = re.findall(r"^\| ([^|]+?) \| \[`([^`]+)`\]", TABLE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted((m.guards, m.path) for m in MUTANTS)
