"""Fixtures and profiles of the whole suite."""

import contextlib
import gc
import inspect
import logging
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import MagicMock

import hypothesis
import pytest
import torch

from tests.devices import HERE, gpu_params
from tests.hosts import record
from tests.hosts.record import pytest_configure  # noqa: F401
from tests.strategies import is_interpreted
from tests.workers import Pool, Ranks, fork_server, freeze_modules, preload, seed_random_numbers
from zerocast.weight import owners

ROOT = Path(__file__).resolve().parents[1]

hypothesis.settings.register_profile("zerocast", deadline=None, print_blob=True, max_examples=60)
hypothesis.settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=3000)
hypothesis.settings.load_profile("zerocast")

# It brings the helpers and backends that cases of most rooms use on every rank.
preload("tests.fsdp2.models")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this suite to pytest's."""
    record.pytest_addoption(parser)
    parser.addoption("--expect-skips", metavar="REGEX", help="fail if a test is skipped for a reason without a match")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what is long with interpreted kernels there, and what is long at every SIMD level below the highest."""
    lower = [name for name in _at_every_level() if "@" in name][1:]
    for item in items:
        if item.get_closest_marker("long_interpreted") and any(map(is_interpreted, item.callspec.params.values())):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("long_at_every_level") and any(p in lower for p in item.callspec.params.values()):
            item.add_marker(pytest.mark.slow)


class Bound(Exception):
    """The signal that a case that needs a GPU has named the function that its ranks call, and needs no further run."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Bind the arguments of a case's call on ranks before the case is skipped for lack of a GPU, so that a
    changed signature is an error here too.
    """
    if "gpu_ranks" in getattr(item, "fixturenames", ()) and not torch.cuda.is_available():
        bind_arguments(item)


def bind_arguments(item: Any) -> None:
    """Run a case up to its first call on ranks, whose arguments must fit the function. Its other fixtures are mocks."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    mismatches: list[str] = []

    def call(function: Any, *arguments: Any, timeout: float = 0.0) -> NoReturn:
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            mismatches.append(f"{function.__qualname__}: {error}")
        raise Bound

    # of a test of hypothesis without its examples, whose failures would be made small
    case = item.function.hypothesis.inner_test if hasattr(item.function, "hypothesis") else item.function
    needed = {name: given.get(name, MagicMock()) for name in inspect.signature(case).parameters}
    # what a case computes before that call may need a GPU
    with contextlib.suppress(Exception):
        case(**needed | {"gpu_ranks": lambda world: call})
    if mismatches:
        pytest.fail(f"the arguments do not fit: {mismatches[0]}", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Collect no garbage while modules are imported: they stay, and collections took a sixth of the time. Use one
    thread, as each rank does: threads wait for each other longer than they compute at such small tensors.
    """
    gc.disable()
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Freeze the modules, since every test module is imported by now, and give one thread to commands that tests start."""
    freeze_modules()
    gc.enable()
    # Commands that tests start read the variable. Where it is not set, Lightning's trainer sets it, and torch's threads as well, to
    # the number of cores: two processes of tests then wait for each other's threads until they end.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Of every test pytest adds six handlers to each logger that does not propagate, and removes them. torch has forty.
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "torch":
            logging.getLogger(name).propagate = True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[object]:
    """Start the server of the ranks once all tests are imported, and before pytest changes what is logged and warned of."""
    # The controller of pytest-xdist has no tests of its own.
    if session.items and not session.config.option.collectonly:
        capture = session.config.pluginmanager.getplugin("capturemanager")
        # What ranks print is captured as what tests print.
        capture.resume_global_capture()
        fork_server()
        capture.suspend_global_capture()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Show only the warnings from files of this tree. A skip that `--expect-skips` does not allow fails the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and "warnings" in reporter.stats:
        reporter.stats["warnings"] = [warning for warning in reporter.stats["warnings"] if is_ours(warning.fslocation)]
    if reporter is not None and unexpected_skips(reporter) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return (yield)


def is_ours(place: tuple[str, int] | None) -> bool:
    """Return True for a warning from a file of this tree, and for one from nowhere."""
    return place is None or (Path(place[0]).is_relative_to(ROOT) and "site-packages" not in Path(place[0]).parts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was skipped, a line for each reason, just before the verdict."""
    for title, reasons in (
        ("skipped", skip_reasons(terminalreporter)),
        ("failed: skips that --expect-skips does not allow", unexpected_skips(terminalreporter)),
    ):
        if reasons:
            terminalreporter.section(title)
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:>6,}  {reason}")


def skip_reasons(reporter: pytest.TerminalReporter) -> Counter[str]:
    """Return how many tests were skipped, by reason."""
    skipped = [report for report in reporter.stats.get("skipped", []) if isinstance(report.longrepr, tuple)]
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)


def unexpected_skips(reporter: pytest.TerminalReporter) -> Counter[str]:
    """Return the skips that `--expect-skips` does not allow, by reason. Empty without that option."""
    expected = reporter.config.getoption("--expect-skips")
    if expected is None:
        return Counter()
    reasons = skip_reasons(reporter)
    return Counter({reason: count for reason, count in reasons.items() if not re.search(expected, reason)})


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(world)(function, *args)`: run a case on every rank of a pool of processes; see README.md."""
    yield from _pools("gloo")


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Ranks]:
    """Likewise over NCCL, each rank with the GPU of its number as its current device."""
    yield from _pools("nccl")


def _pools(backend: str) -> Iterator[Ranks]:
    pools: dict[int, Pool] = {}
    yield lambda world: pools.setdefault(world, Pool(world, backend)).run
    for pool in pools.values():
        pool.close()


@pytest.fixture(params=[name for name in HERE if not is_interpreted(name)], scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend for CPU tensors except interpreted kernels, for tests of plans and processes."""
    name: str = request.param
    return name


@pytest.fixture(params=[*HERE, *gpu_params()], scope="module")
def backend_anywhere(request: pytest.FixtureRequest) -> str:
    """Every backend, including those of a GPU, for tests of stages and of `casts.cast_whole`, which go where it is."""
    name: str = request.param
    return name


def _at_every_level() -> list[str]:
    """Return the backends beside the reference, each at every SIMD level that it has here."""
    found = [name for name in HERE if name not in ("reference", "cpu")]
    if "cpu" in HERE:
        from zerocast.backends import _C

        found += [f"cpu@{level}" for level in _C.simd_levels()]
    return found


def _use_level(variant: str) -> Iterator[str]:
    name, _, level = variant.partition("@")
    if not level:
        yield name
        return
    from zerocast.backends import _C

    before = _C.simd_level()
    _C.set_simd_level(level)
    yield name
    _C.set_simd_level(before)


@pytest.fixture(params=[*_at_every_level(), *gpu_params()], scope="module")
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """A backend beside the reference, at one of its SIMD levels."""
    yield from _use_level(request.param)


@pytest.fixture(params=["reference", *_at_every_level(), *gpu_params()], scope="module")
def any_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every backend, at every SIMD level."""
    yield from _use_level(request.param)


@pytest.fixture
def seed() -> int:
    """A fresh seed, shown when the test fails. ZEROCAST_TEST_SEED repeats one."""
    chosen = int(os.environ.get("ZEROCAST_TEST_SEED") or secrets.randbits(31))
    print(f"ZEROCAST_TEST_SEED={chosen}")
    return chosen


@pytest.fixture(autouse=True)
def fresh_process() -> None:
    """Make each test independent of those before it: seed the random numbers, and forget weights that an
    earlier test left with gradients and without an owner.
    """
    seed_random_numbers()
    owners.forget_all()
