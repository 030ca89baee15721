"""A run of the tests fails if it skips a test that is not expected to be skipped."""

from pathlib import Path
from unittest import mock

import pytest

from tests import conftest
from tests.workers import in_a_process

CASES = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_skips(number):
    pytest.skip("there is no moon")
"""


def run_tests(arguments: list[str]) -> None:
    """Run tests that need no ranks, in a fork, and end as pytest ends."""
    with mock.patch.object(conftest, "fork_server"):
        raise SystemExit(pytest.main(arguments))


def test_a_skip_that_is_not_expected_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(CASES)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--expect-skips", "no sun"]
    status, printed = in_a_process(run_tests, [*options, str(tmp_path / "test_it.py")])
    _, _, failed = printed.partition("skips that --expect-skips does not allow")
    assert "     3  there is no moon" in failed and status == 1
