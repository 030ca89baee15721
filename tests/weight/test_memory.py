"""No byte outside of a buffer is read or written, whatever a file, a freed storage or a call by hand says."""

import subprocess
import sys

import pytest

from tests.weight import memory_cases
from tests.workers import in_a_process


def test_every_case_is_refused() -> None:
    """In a process of its own, which a case may end."""
    status, printed = in_a_process(memory_cases.run)
    assert status == 0, printed[-2500:]


@pytest.mark.slow
def test_every_case_is_refused_without_asserts() -> None:
    command = [sys.executable, "-O", "-m", "tests.weight.memory_cases"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout[-500:] + ended.stderr[-2000:]


@pytest.mark.parametrize("name", ["file argument 0 0", "plan nvfp4 rowwise_data 2", "quantize_gradient"])
def test_an_error_names_both_sizes(name: str) -> None:
    with pytest.raises(ValueError, match=r"262,144 bytes.*4,096 bytes|2,048 .* 1,024|16 elements, 4,224"):
        memory_cases.cases()[name]()
