"""The table in docs/tested.md is what the recorded runs say; records name tests that exist; nothing that failed is recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import record
from tests.hosts.table import PAGE, recorded, table, with_table

ROOT = PAGE.parents[1]
TESTS = """
import pytest

@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.shows(host="Apex", parallel="data", formats=("nvfp4", "fp8_block:power_of_2_scale=False", "plain"))
def test_values(world): assert world < 3

@pytest.mark.parametrize(("fmt", "ranks"), [("mxfp8", 2), pytest.param("nvfp4", 2, marks=pytest.mark.gpu)])
@pytest.mark.shows(host="FSDP2", parallel="data, tensor", formats=lambda fmt: (fmt,), ranks=lambda ranks: 2 * ranks)
@pytest.mark.shows(host="ZeroAdamW", parallel="data", formats=("nvfp4",), ranks=1)
def test_functions(fmt, ranks): pass

@pytest.mark.shows(host="Apex", parallel="data", formats=("fp8_block",), ranks=2)
def test_that_fails_for_one_of_them(): assert False

@pytest.mark.shows(host="Apex", parallel="data", formats=("mxfp8",), ranks=2)
def test_skipped(): pytest.skip("no Apex")

def test_not_marked(): pass
"""


def test_the_page_has_the_table_of_the_recorded_runs() -> None:
    text = PAGE.read_text()
    assert with_table(text, table(recorded().values())) == text, (
        "run `make hosts-table`; nothing there is written by hand"
    )


@pytest.mark.parametrize("name", recorded())
def test_recorded_tests_are_there(name: str) -> None:
    """A test that is gone is no evidence: record again."""
    run = recorded()[name]
    assert run["passed"] and run["command"] and run["date"] and run["versions"]["torch"]
    for shown in run["passed"]:
        assert shown["on"] == "CPU" or run["hardware"]["gpus"]
        assert (ROOT / record.HOSTS[shown["host"]]).exists()
        for test in shown["tests"]:
            path, _, function = test.partition("::")
            source = (ROOT / path).read_text()
            assert f"def {function}(" in source and ".shows(" in source, test


def run_of_its_own(folder: Path, *options: str) -> dict[str, Any]:
    """The record of a small run in processes of its own."""
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n shows\n gpu\n")
    line = ["-m", "pytest", "-p", "tests.hosts.record", "-p", "no:cacheprovider", *options]
    line += ["--record-hosts", f"{folder}/found.json", str(folder)]
    known = os.environ | {"ZEROCAST_COMMIT": "abc"}
    ran = subprocess.run([sys.executable, *line], cwd=ROOT, env=known, capture_output=True, text=True, check=False)
    assert "2 failed, 5 passed, 1 skipped" in ran.stdout, ran.stdout
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of a small run."""
    return run_of_its_own(tmp_path_factory.mktemp("hosts"))


@pytest.mark.slow
def test_a_run_that_is_spread_over_processes(found: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    assert run_of_its_own(tmp_path, "-n", "2")["passed"] == found["passed"]


def test_what_passed_is_recorded_and_nothing_else(found: dict[str, Any]) -> None:
    """Two ranks of Apex in fp8_block passed in one test and failed in another; three failed; mxfp8 was skipped."""
    passed = {(s["host"], s["parallel"], s["ranks"], s["format"], s["on"]) for s in found["passed"]}
    assert passed == {
        ("Apex", "data", 1, "nvfp4", "CPU"),
        ("Apex", "data", 2, "nvfp4", "CPU"),
        ("Apex", "data", 1, "fp8_block", "CPU"),
        ("FSDP2", "data, tensor", 4, "mxfp8", "CPU"),
        ("FSDP2", "data, tensor", 4, "nvfp4", "GPU"),
        ("ZeroAdamW", "data", 1, "nvfp4", "CPU"),
        ("ZeroAdamW", "data", 1, "nvfp4", "GPU"),
    }
    assert "--record-hosts found.json" in found["command"]
    assert found["commit"] == "abc"


def test_the_table_of_a_run(found: dict[str, Any]) -> None:
    """Hosts in their order, ranks as ranges, a blank where nothing passed."""
    found["hardware"] = {"cpu": "some processor", "cores": 4, "gpus": ["some GPU"] * 2}
    made = table([found])
    rows = [line for line in made.splitlines() if line.startswith("| [")]
    assert rows == [
        "| [ZeroAdamW](../zerocast/optim) | data |  |  |  |  |  | 1 (1) |",
        "| [FSDP2](../zerocast/fsdp2) | data, tensor |  |  |  | 4 |  | (4) |",
        "| [Apex](../integrations/apex) | data |  |  | 1 |  |  | 1-2 |",
    ]
    text = " ".join(made.split())
    assert "4 cores of some processor" in text and "2 some GPU" in text and "hosts:" not in text
    with_package = {**found["passed"][0], "host": "Megatron-Core"}
    versions = {**found["versions"], "megatron-core": "1.2.3"}
    assert "Recorded with hosts: megatron-core 1.2.3; CPU" in table(
        [{**found, "passed": [with_package], "versions": versions}]
    )


def test_ranges_and_marks() -> None:
    runs = [{**shown, "parallel": "data", "format": "nvfp4", "on": "CPU"} for shown in _on(1, 2, 3, 5, 7, 8)]
    made = table(
        [{"passed": runs, "hardware": {"cpu": "x", "cores": 1, "gpus": []}, "versions": {"torch": "0"}, "date": "d"}]
    )
    assert "| 1-3, 5, 7-8 |" in made
    with pytest.raises(ValueError, match="looked for"):
        with_table("a page without marks", made)
    mark = pytest.mark.shows(host="Apexx", parallel="data", formats=(), ranks=1).mark
    with pytest.raises(ValueError, match=r"shows\(host='Apexx'\): the hosts of the table are ZeroAdamW"):
        record.shown_by(mark, {}, False)


def _on(*ranks: int) -> list[dict[str, Any]]:
    return [{"host": "Apex", "ranks": number} for number in ranks]
