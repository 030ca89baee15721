"""The sample of mutants, on toys."""

import pytest

from tests.mutants.__main__ import CRASHED, HUNG, KILLED, ROOT, draw, killer
from tests.mutants.sites import Site, sites

PYTHON = b'''\
def clamp(x: int, low: int = 0, strict: bool = False) -> int:
    """Say 1 + 1."""
    if x < low and strict:
        log(f"{x + 1}")
    return max(x, low) + 2
'''
CPP = b"""\
#include "a + b.h"
int64_t clamp(int64_t x) {  // 1 + 1
  if (x < kLow && f(x)) {
    log(x);
  }
  return std::max<int64_t>(x, kLow) + 2;
}
"""


def mutants(path: str, source: bytes) -> list[tuple[int, str]]:
    """Return the lines that are changed, with what they become."""
    changed = [(site.line, site.apply(source)) for site in sites(path, source)]
    return sorted((line, text.splitlines()[line - 1].decode().strip()) for line, text in changed)


def test_mutants_of_python() -> None:
    assert mutants("toy.py", PYTHON) == [
        (1, "def clamp(x: int, low: int = 0, strict: bool = True) -> int:"),
        (1, "def clamp(x: int, low: int = 1, strict: bool = False) -> int:"),
        (3, "if (x < low or strict):"),
        (3, "if not (x < low and strict):"),
        (3, "if x <= low and strict:"),
        (4, "pass"),
        (5, "return None"),
        (5, "return max(x, low) + 3"),
        (5, "return max(x, low) - 2"),
        (5, "return min(x, low) + 2"),
    ]


def test_mutants_of_cpp() -> None:
    assert mutants("toy.cpp", CPP) == [
        (3, "if (!(x < kLow && f(x))) {"),
        (3, "if (x < kLow || f(x)) {"),
        (3, "if (x <= kLow && f(x)) {"),
        (4, ";"),
        (6, "return std::max<int64_t>(x, kLow) + 3;"),
        (6, "return std::max<int64_t>(x, kLow) - 2;"),
        (6, "return std::min<int64_t>(x, kLow) + 2;"),
        (6, "return {};"),
    ]


def test_a_draw_is_repeated_by_its_seed() -> None:
    first, again, other = (draw(seed, "zerocast/formats", 20) for seed in (1, 1, 2))
    assert first == again != other
    assert len({(site.path, site.line) for site in first}) == 20
    for site in first:
        compile(site.apply((ROOT / site.path).read_bytes()), site.path, "exec")


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (KILLED, "FAILED tests/cast/test_plan.py::test_c[1 - 2] - AssertionError: x"),
        (HUNG, "+++++ Timeout +++++"),
        (CRASHED, "Fatal Python error: Segmentation fault"),
    ],
)
def test_the_killer_is_named(status: str, line: str) -> None:
    found, by = killer(1, f"tests/cast/test_plan.py::test_c[1 - 2] \n{line}\n")
    assert (found, by.split(", status")[0]) == (status, "tests/cast/test_plan.py::test_c[1 - 2]")


def test_no_mutant_of_what_needs_a_gpu() -> None:
    assert draw(1, "csrc/cuda", 5) == []
    assert isinstance(draw(1, "csrc/cpu", 5)[0], Site)
