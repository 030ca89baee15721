"""Commands answer a user's mistakes with one sentence and status 2, never a traceback."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from zerocast.cli import main

COMMANDS = {
    "plna": "no command 'plna': did you mean 'plan'?",
    "fly": "no command 'fly': there are doctor, plan, inspect, export, bench, bench step",
    "bench stepp": "no command 'bench stepp': did you mean 'bench step'?",
    "--verison": "did you mean '--version'?",
    "": "usage: zerocast COMMAND",
    "plan": "pass one model, as in zerocast plan llama3-8b",
    "plan llama3-8": "gpt-oss-120b) nor a file: did you mean 'llama3-8b'?",
    "plan llama3-8b --format nvfp": "unknown format 'nvfp'; did you mean 'nvfp4'? known:",
    "plan llama9": "'llama9' is neither a model (llama3-8b, llama3-70b, llama3-405b, qwen3-8b, ",
    "plan llama3-8b --ranks 0": "ranks must be at least 1, got 0",
    "plan llama3-8b --ranks 100000000000": "ranks must be at most 1,048,576, got 100,000,000,000",
    "plan llama3-8b --sweep --ranks 9": "leave out --ranks",
    "plan llama3-8b --png no/plan.png": "there is no folder no",
    "plan llama3-8b --parallel hsdp --ranks 12": "12 ranks in groups of equal size, not of 8",
    "plan .": "zerocast plan: . has no config.json",
    "plan llama3-8b --rank 8": "--ranks",
    "plan llama3-8b --ranks many": "Error parsing --ranks",
    "bench --scale 0": "scale must be at least 1, got 0",
    "bench --seconds -1": "seconds must be between 0 and 3,600, got -1",
    "bench --seconds nan": "seconds must be between 0 and 3,600, got nan",
    "bench --threshold -1": "threshold must be between 0 and inf, got -1",
    "bench --seed -1": "seed must be between 0 and",
    "bench --only nvfp5": "no row is called 'nvfp5': did you mean nvfp4?",
    "bench --compare nowhere.json": "zerocast bench: nowhere.json does not exist",
    "bench --backend nothing": "unknown backend 'nothing'",
    "bench step --variants fsdp2:fp4": "no variant is called 'fsdp2:fp4'; there are: fsdp2:bf16, ",
    "bench step --variants fsdp2:bf16 --text nowhere.txt": "nowhere.txt",
    "bench step --layers 0": "layers must be at least 1, got 0",
    "bench step --lr -1": "lr must be between 0 and",
    "bench step --compare nowhere.json": "zerocast bench step: nowhere.json does not exist",
    "doctor --seconds -1": "seconds must be between 0 and 3,600, got -1",
    "doctor --seed -1": "seed must be between 0 and",
    "inspect nowhere": "zerocast inspect: nowhere does not exist",
    "inspect m.safetensors --format fp3": "unknown format 'fp3'",
    "inspect m.safetensors --format nvfp4 --weights *.mlp.*": "'*.mlp.*' matches no weight; there are: w",
    "inspect m.safetensors --png no/histogram.png": "there is no folder no",
    "export m.safetensors out --masters bfloat16": "--masters is for --to checkpoint, got --to hf",
    "export m.safetensors out --to checkpoint --naming deepseek": "--naming is for --to hf and safetensors, got",
    "export m.safetensors out --to safetensors --model .": "--model is for --to hf, got --to safetensors",
    "export m.safetensors out --naming bf16": "zerocast export: ",
    "export m.safetensors out --naming bf16 --format nvfp4": "--format needs --weights",
    "export m.safetensors out --naming bf16 --share-amax llama": "--share-amax needs --format",
    "export nowhere out --to safetensors": "nowhere does not exist",
    "export codes.safetensors out --to safetensors": "w is float8_e4m3fn (4, 4), not a high-precision weight",
    "export m.safetensors . --to safetensors": "is not empty: export into a new folder",
    "export m.safetensors . --to checkpoint": "already exists",
    "export m.safetensors out --to safetensors --shard-bytes 0": "shard_bytes must be at least 1, got 0",
    "export m.safetensors out --to safetensors --format nvfp4 --weights x*": "'x*' matches no weight",
    "export m.safetensors out --to safetensors --format mxfp4 --weights w --naming modelopt": (
        "w is mxfp4; modelopt has names for nvfp4"
    ),
}


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line or "nothing")
def test_one_sentence(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"w": torch.ones(32, 32)}, "m.safetensors")
    save_file({"w": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, "codes.safetensors")
    try:
        status = main(line.split())
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert status == 2
    assert said.out == ""
    assert COMMANDS[line] in " ".join(said.err.replace("│", "").split())
    assert "tyro" not in said.err and "Config" not in said.err  # nor other names of the source
    assert sorted(os.listdir()) == ["codes.safetensors", "m.safetensors"]


def test_a_text_is_no_weights(capsys: Any, tmp_path: Path) -> None:
    """The error for a text file does not pass on torch's advice to unpickle it in any case."""
    (tmp_path / "README.md").write_text("# a page")
    assert main(["inspect", str(tmp_path / "README.md")]) == 1
    said = capsys.readouterr().err
    assert "is not a file of plain tensors" in said and "weights_only" not in said


def test_a_reader_that_goes_away_ends_a_command() -> None:
    command = [sys.executable, "-m", "zerocast", "plan", "llama3-8b"]
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (run.returncode, [line for line in run.stderr.splitlines() if " of 3: " not in line]) == (141, [])


@pytest.mark.parametrize(("line", "said"), {"--version": "zerocast 0.1.0\n", "-h": "usage: zerocast COMMAND"}.items())
def test_what_is_said_without_a_command(line: str, said: str) -> None:
    """Packages that the library does not need are imported with a command only."""
    script = (
        f"import sys; sys.argv = ['zerocast', '{line}']\n"
        "from zerocast.cli import main\n"
        "try: main()\n"
        "finally: print([name for name in ('tyro', 'matplotlib') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.startswith(said)
    assert run.stdout.endswith("[]\n")
    assert max(map(len, run.stdout.splitlines())) <= 100
