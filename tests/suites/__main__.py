"""Run peers' own tests with zerocast in them: python -m tests.suites SOURCES [--only SUITE]. See README.md."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.suites.suites import SUITES, Suite

HERE = Path(__file__).parent
# pytest's own status for a run without tests.
NOTHING_RAN = 5


@dataclass(frozen=True)
class Compared:
    """The results of a suite without zerocast and with it."""

    suite: str
    passed_without: frozenset[str]
    passed_with: frozenset[str]
    expected: frozenset[str]

    @property
    def new(self) -> list[str]:
        """The tests that fail with zerocast alone, and are not expected to."""
        return sorted(self.passed_without - self.passed_with - self.expected)

    @property
    def outdated(self) -> list[str]:
        """The expected differences that are none any more."""
        return sorted(self.expected - (self.passed_without - self.passed_with))

    @property
    def counts(self) -> str:
        """One line for the table."""
        expected = len(self.expected) - len(self.outdated)
        return (
            f"{self.suite:<20} {len(self.passed_without):>6} passed without zerocast, {len(self.passed_with):>6} of these with it; "
            f"{expected} expected differences, {len(self.new)} new, {len(self.outdated)} outdated"
        )


def expected_differences(path: Path) -> dict[str, frozenset[str]]:
    """Return the tests that are expected to fail with zerocast, by suite. ValueError for one without a reason or listed twice."""
    listed: dict[str, set[str]] = {}
    tests: set[str] | None = None
    for line in path.read_text().splitlines():
        test = line.strip()
        if not test or line.startswith("#"):
            continue
        if not line.startswith(" "):
            suite, _, reason = line.partition(": ")
            tests = listed.setdefault(suite, set()) if reason else None
            continue
        if tests is None:
            raise ValueError(f"{path}: no suite and reason for {test}")
        if test in tests:
            raise ValueError(f"{path}: listed twice: {test}")
        tests.add(test)
    return {suite: frozenset(tests) for suite, tests in listed.items()}


def pins(path: Path) -> dict[str, tuple[str, str]]:
    """Return (commit or version, where it comes from) by the name of a source."""
    lines = [line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: (pin, " ".join(origin)) for name, pin, *origin in lines}


def problem_of(folder: Path, pin: str) -> str:
    """Return why a checkout is not the pinned one. Empty if it is."""
    if not folder.is_dir():
        return f"{folder} is not there"
    # Source packages of PyPI and of Debian tell their version.
    package, changelog = folder / "PKG-INFO", folder / "debian" / "changelog"
    if package.exists():
        lines = package.read_text().splitlines()
        return "" if f"Version: {pin}" in lines else f"{folder} is not version {pin}"
    if changelog.exists():
        newest, *_ = changelog.read_text().splitlines()
        return "" if f"({pin})" in newest else f"{folder} is not version {pin}"
    said = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return "" if said.stdout.strip() == pin else f"{folder} is not at {pin}"


def copied(suite: Suite, sources: Path, scratch: Path) -> Path:
    """Copy a suite's tests, with other texts where it says so."""
    copy = scratch / suite.name
    shutil.copytree(sources / suite.source / suite.root, copy)
    for file in copy.rglob("*.py") if suite.texts else ():
        text = file.read_text()
        for old, new in suite.texts.items():
            text = text.replace(old, new)
        file.write_text(text)
    return copy


def passed(suite: Suite, changes: Sequence[str], folder: Path, tests: Sequence[str]) -> frozenset[str]:
    """Run tests in `folder` and return those that passed. What they print is in a file beside it."""
    run = f"{suite.name} {changes[-1]}" if suite.zerocast in changes else suite.name
    results, arguments, log = (folder.parent / f"{run}.{kind}" for kind in ("results", "arguments", "log"))
    arguments.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-p", "peer_plugin", "-c", os.devnull, "--rootdir", str(folder)]
    command += ["-q", "--timeout", "180", "-p", "no:cacheprovider", *(["-k", suite.selected] if suite.selected else [])]
    environment = os.environ | {
        # Not the root of the repository: peers have packages of the name `tests` too.
        "PYTHONPATH": os.pathsep.join([str(folder), str(HERE)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "120",
        "ZEROCAST_CHANGES": " ".join(changes),
        "ZEROCAST_RESULTS": str(results),
    }
    with log.open("w") as output:
        subprocess.run(
            [*command, f"@{arguments}"], cwd=folder, env=environment, stdout=output, stderr=output, check=False
        )
    if not results.exists():
        raise RuntimeError(f"{suite.name}: no test was run with {changes}:\n{log.read_text()[-2000:]}")
    outcomes = {line["test"]: line["outcome"] for line in map(json.loads, results.read_text().splitlines())}
    return frozenset(test for test, outcome in outcomes.items() if outcome == "passed")


def compare(suite: Suite, sources: Path, scratch: Path, expected: frozenset[str]) -> Compared:
    """Run a suite without zerocast, and what passed of it with zerocast."""
    folder = copied(suite, sources, scratch)
    without = passed(suite, suite.changes, folder, suite.tests)
    with_zerocast = passed(suite, (*suite.changes, suite.zerocast), folder, sorted(without))
    return Compared(suite.name, without, with_zerocast, expected)


def run(
    suites: Iterable[Suite], sources: Path, pinned: dict[str, tuple[str, str]], expected: dict[str, frozenset[str]]
) -> int:
    """Run suites and print their counts. Returns the exit status: 1 for a difference that is new or outdated."""
    compared = []
    scratch = Path(tempfile.mkdtemp(prefix="zerocast-suites-"))
    print(f"outputs of the tests: {scratch}")
    for suite in suites:
        pin, origin = pinned[suite.source]
        problem = problem_of(sources / suite.source, pin)
        if problem:
            print(f"SKIPPED {suite.name}: {problem}, which is {origin} at {pin}")
            continue
        compared.append(compare(suite, sources, scratch, expected.get(suite.name, frozenset())))
        print(compared[-1].counts, flush=True)
    for each in compared:
        for test in each.new:
            print(f"NEW {each.suite}: {test} passes without zerocast and fails with it")
        for test in each.outdated:
            print(f"OUTDATED {each.suite}: {test} is no difference any more: take it out of expected.txt")
    if not compared:
        print("no suite was run")
        return NOTHING_RAN
    return int(any(each.new or each.outdated for each in compared))


def main() -> int:
    """Read which suites to run, and where their sources are, from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description=__doc__)
    parser.add_argument("sources", type=Path, help="the folder with the checkouts that sources.txt names")
    parser.add_argument("--only", choices=[suite.name for suite in SUITES], help="one suite")
    given = parser.parse_args()
    suites = [suite for suite in SUITES if given.only in (None, suite.name)]
    return run(suites, given.sources, pins(HERE / "sources.txt"), expected_differences(HERE / "expected.txt"))


if __name__ == "__main__":
    sys.exit(main())
