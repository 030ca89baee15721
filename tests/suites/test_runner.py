"""The runner of peers' suites, on made-up suites: what is new, what is outdated, and what was not run."""

import subprocess
from pathlib import Path

import pytest

from tests.suites.__main__ import HERE, Compared, expected_differences, pins, run
from tests.suites.suites import SUITES, Suite

TESTS = """
import torch


def step():
    weight = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=1.0)
    weight.sum().backward()
    optimizer.step()
    return weight, optimizer


def test_of_both():
    assert bool((step()[0] < 0).all())


def test_of_plain_torch():
    assert "param_groups" in step()[1].state_dict()


def test_of_neither():
    assert False
"""
SUITE = Suite("made up", "peer", "tests", ("test_made_up.py",), "zero_adamw", texts={"lr=1.0": "lr=0.5"})


@pytest.fixture
def pinned(tmp_path: Path) -> dict[str, tuple[str, str]]:
    """Make a checkout with tests, and return the commit that it is at."""
    (tmp_path / "peer" / "tests").mkdir(parents=True)
    (tmp_path / "peer" / "tests" / "test_made_up.py").write_text(TESTS)
    git = ["git", "-C", str(tmp_path / "peer"), "-c", "user.name=peer", "-c", "user.email=peer"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Tests"]):
        subprocess.run([*git, *command], check=True)
    said = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return {"peer": (said.stdout.strip(), "made up")}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_new_difference_fails_the_gate(
    tmp_path: Path, pinned: dict[str, tuple[str, str]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([SUITE], tmp_path, pinned, {}) == 1
    said = capfd.readouterr().out
    assert "2 passed without zerocast" in said
    assert "1 of these with it; 0 expected differences, 1 new, 0 outdated" in said
    assert "NEW made up: test_made_up.py::test_of_plain_torch passes without zerocast" in said


def test_another_commit_is_not_run(
    tmp_path: Path, pinned: dict[str, tuple[str, str]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([SUITE], tmp_path, {"peer": ("0" * 40, "made up")}, {}) == 5
    said = capfd.readouterr().out
    assert "SKIPPED made up" in said
    assert "no suite was run" in said


def test_an_expected_difference_that_is_none_any_more_is_outdated() -> None:
    compared = Compared("made up", frozenset("ab"), frozenset("a"), frozenset("abc"))
    assert compared.new == []
    assert compared.outdated == ["a", "c"]


def test_every_expected_difference_is_of_a_suite_that_is_pinned() -> None:
    assert expected_differences(HERE / "expected.txt").keys() <= {suite.name for suite in SUITES}
    assert {suite.source for suite in SUITES} == pins(HERE / "sources.txt").keys()
