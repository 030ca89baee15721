"""The table in docs/tested.md is what the recorded runs say, and records name tests that exist."""

from typing import Any

import pytest

from tests.hosts import record
from tests.hosts.record import PAGE, recorded, table, with_table

ROOT = PAGE.parents[1]


def test_the_page_has_the_table_of_the_recorded_runs() -> None:
    text = PAGE.read_text()
    assert with_table(text, table(recorded().values())) == text, (
        "run `make hosts-table`; nothing there is written by hand"
    )


@pytest.mark.parametrize("name", recorded())
def test_recorded_tests_are_there(name: str) -> None:
    """A test that is gone is no evidence: record again."""
    run = recorded()[name]
    assert run["passed"] and run["command"] and run["date"] and run["versions"]["torch"]
    for shown in run["passed"]:
        assert shown["on"] == "CPU" or run["hardware"]["gpus"]
        assert (ROOT / record.HOSTS[shown["host"]]).exists()
        for test in shown["tests"]:
            path, _, function = test.partition("::")
            source = (ROOT / path).read_text()
            assert f"def {function}(" in source and ".shows(" in source, test


def test_ranges_and_marks() -> None:
    runs = [{**shown, "parallel": "data", "format": "nvfp4", "on": "CPU"} for shown in _on(1, 2, 3, 5, 7, 8)]
    made = table(
        [{"passed": runs, "hardware": {"cpu": "x", "cores": 1, "gpus": []}, "versions": {"torch": "0"}, "date": "d"}]
    )
    assert "| 1-3, 5, 7-8 |" in made
    with pytest.raises(ValueError, match="looked for"):
        with_table("a page without marks", made)
    mark = pytest.mark.shows(host="Apexx", parallel="data", formats=(), ranks=1).mark
    with pytest.raises(ValueError, match=r"shows\(host='Apexx'\): the hosts of the table are ZeroAdamW"):
        record.shown_by(mark, {}, False)


def _on(*ranks: int) -> list[dict[str, Any]]:
    return [{"host": "Apex", "ranks": number} for number in ranks]
