"""torchtitan 0.3 needs a newer torch than this suite's environment may have, so its tests also run in environments of their own."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(960)
@pytest.mark.parametrize("environment", os.environ.get("ZEROCAST_TORCHTITAN", "").split(os.pathsep))
def test_torchtitan_in_an_environment_of_its_own(environment: str) -> None:
    if not os.path.isdir(environment):
        pytest.skip("ZEROCAST_TORCHTITAN names no environment with torchtitan 0.3 and torch 2.14: make test-hosts")
    tests = ["tests/torchtitan/test_model_spec.py", "-m", "not slow", "-q", "-p", "no:cacheprovider"]
    command = [str(Path(environment, "bin", "python")), "-m", "pytest", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    last = done.stdout.strip().rpartition("\n")[2]
    assert done.returncode == 0 and " passed" in last and "skipped" not in last, (
        done.stdout[-4000:] + done.stderr[-2000:]
    )
