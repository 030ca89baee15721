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


def test_a_run_ends_with_its_verdict(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(CASES)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        str(tmp_path / "test_it.py"),
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "of this tree" in run.stdout and "of a package" not in run.stdout and "of Python" not in run.stdout
    lines = run.stdout.splitlines()
    assert lines.count("     3  there is no moon") == 1
    assert "1 passed, 3 skipped, 1 warning" in lines[-1]
