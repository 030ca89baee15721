"""What all commands have in common: help with an example and the exit status, JSON, an error for what is no command."""

import json
from pathlib import Path
from typing import Any

import pytest

from zerocast.cli import main

COMMANDS = ("bench", "convert", "doctor", "inspect", "plan")


@pytest.mark.parametrize("command", [*COMMANDS[1:], "bench cast", "bench step"])
def test_help(capsys: Any, command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert (
        f"zerocast {command.removesuffix(' cast')} " in text.replace("\n", " ").partition("Example: ")[2]
        and "Exit status: " in text
        and "--json" in text
    )


def test_all_are_listed(capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert [command for command in COMMANDS if command not in text] == []


@pytest.mark.parametrize("arguments", [["fly"], ["plan", "--ranks", "many"], ["inspect"], []])
def test_what_cannot_be_parsed(capsys: Any, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_bench_prints_json(capsys: Any, tmp_path: Path) -> None:
    options = [
        "bench",
        "--backend",
        "cpu",
        "--scale",
        "64",
        "--seconds",
        "0",
        "--only",
        "A cast nvfp4",
        "--out",
        str(tmp_path),
    ]
    assert main([*options, "--json"]) == 0
    (written,) = tmp_path.glob("*.json")
    assert json.loads(capsys.readouterr().out) == json.loads(written.read_text())
