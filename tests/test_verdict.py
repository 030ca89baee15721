"""A run of the tests fails if it skips a test that is not expected to be skipped."""

import subprocess
import sys
from pathlib import Path

from tests.docs.page import ROOT

CASES = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_skips(number):
    pytest.skip("there is no moon")
"""


def run_cases(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", *options]
    return subprocess.run([*command, str(folder / "test_it.py")], cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_skip_that_is_not_expected_fails_the_run(tmp_path: Path) -> None:
    run = run_cases(tmp_path, "--expect-skips", "no sun")
    _, _, failed = run.stdout.partition("skips that --expect-skips does not allow")
    assert "     3  there is no moon" in failed and run.returncode == 1
