"""How a run of the tests ends: a line a reason for what was skipped, no warnings of other packages, and then the verdict."""

import subprocess
import sys
from pathlib import Path

from tests.docs.page import ROOT

CASES = f"""
import warnings, pytest

def test_warnings():
    warnings.warn_explicit("of this tree", UserWarning, {str(ROOT / "zerocast" / "a.py")!r}, 1)
    warnings.warn_explicit("of a package", UserWarning, {str(ROOT / ".venv/lib/site-packages/a.py")!r}, 1)
    warnings.warn_explicit("of Python", UserWarning, "/usr/lib/python3/a.py", 1)

@pytest.mark.parametrize("number", range(3))
def test_skips(number):
    pytest.skip("there is no moon")
"""


def run_cases(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", *options]
    return subprocess.run([*command, str(folder / "test_it.py")], cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_run_ends_with_its_verdict(tmp_path: Path) -> None:
    run = run_cases(tmp_path)
    assert "of this tree" in run.stdout and "of a package" not in run.stdout and "of Python" not in run.stdout
    lines = run.stdout.splitlines()
    assert lines.count("     3  there is no moon") == 1
    assert "1 passed, 3 skipped, 1 warning" in lines[-1] and run.returncode == 0


def test_a_skip_that_is_not_expected_fails_the_run(tmp_path: Path) -> None:
    assert run_cases(tmp_path, "--expect-skips", "no (sun|moon)").returncode == 0
    run = run_cases(tmp_path, "--expect-skips", "no sun")
    _, _, failed = run.stdout.partition("skips that --expect-skips does not allow")
    assert "     3  there is no moon" in failed and run.returncode == 1
