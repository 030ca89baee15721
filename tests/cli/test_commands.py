"""Options and errors that all commands share: help with an example and the exit status, JSON, and an error for
an unknown command.
"""

from pathlib import Path
from typing import Any

import pytest

from zerocast.bench.render import legend
from zerocast.bench.row import all_rows
from zerocast.cli import main

COMMANDS = ("bench", "doctor", "export", "inspect", "plan")


@pytest.mark.parametrize("command", [*COMMANDS, "bench step"])
def test_help(capsys: Any, command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert (
        f"zerocast {command} " in text.replace("\n", " ").partition("Example: ")[2]
        and "Exit status: " in text
        and "--json" in text
    )


def test_all_are_listed(capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert [command for command in COMMANDS if command not in text] == []


def test_every_row_of_the_bench_is_explained_in_100_columns() -> None:
    assert [line for line in legend(list(all_rows())) if len(line) > 100] == []


def test_bench_writes_where_asked_and_explains_its_rows(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--backend", "cpu", "--scale", "64", "--seconds", "0", "--no-peers"]
    assert main(["bench", *options, "--only", "B scattered cast mxfp8:block=32x32", "A Adam"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert list(tmp_path.iterdir()) == []
    assert any(line.startswith("  Adam ") and "AdamW on the shard" in line for line in lines)
    assert any(line.startswith("  B scattered/64 ") and "16 weights" in line for line in lines)
    for row in ("B scattered cast mxfp8:block=32x32", "A Adam"):
        assert len([line for line in lines if line.startswith(f"| {row} |")]) == 1
