"""`import zerocast` brings along no compiler, which takes seconds, no triton, which fixes whether kernels are
interpreted, and nothing that changes torch for the process.
"""

import functools
import json
import subprocess
import sys
from typing import Any

# Printed as JSON by a new process, in forks of it once it has torch, which takes longest.
SCRIPT = """
import json, os, sys

import zerocast

found = {"at first": [name for name in sys.modules if name == "torch" or name.startswith("zerocast.")]}

import torch

def in_a_fork(call):
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.write(writes, json.dumps(call()).encode())
        os._exit(0)
    os.close(writes)
    with open(reads) as answer:
        return json.load(answer)

def of_a_cast():
    before = set(sys.modules)
    zerocast.quantize_
    new = set(sys.modules) - before
    others = [name for name in new if name.partition(".")[0] != "zerocast"]
    public = all(getattr(zerocast, name) for name in zerocast.__all__)
    return len(new), others, [public, zerocast.serve.Sender.__name__, hasattr(zerocast, "nothing")]

found["a cast"] = in_a_fork(of_a_cast)

from torch.distributed.tensor import DTensor
from torch.optim import optimizer as optim

def state():
    return list(optim._global_optimizer_pre_hooks), list(optim._global_optimizer_post_hooks), dict(vars(DTensor))

before = state()
import zerocast.optim, zerocast.fsdp2, zerocast.export
heavy = ("torch._dynamo", "torch._inductor", "triton", "safetensors", "matplotlib", "tyro")
found["imports"] = state() == before, [name for name in heavy if name in sys.modules]

def changed_by(call):
    call()
    return [now != then for now, then in zip(state(), before)]

weight = lambda: zerocast.QuantizedWeight.empty((16, 16), "nvfp4")
prepare = lambda: zerocast.fsdp2.prepare(torch.nn.Linear(16, 16), {"weight": "nvfp4"})
found |= {name: in_a_fork(lambda: changed_by(call)) for name, call in {"weight": weight, "prepare": prepare}.items()}
print(json.dumps(found))
"""


def printed(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


@functools.cache
def found() -> dict[str, Any]:
    """What the script has found, which several tests look at."""
    return json.loads(printed(SCRIPT))  # type: ignore[no-any-return]


def test_everything_is_imported_when_it_is_asked_for() -> None:
    """`import zerocast` brings nothing, not even torch; a cast then brings no DTensors, FSDP2 or checkpoints.
    Modules beyond torch's are counted, since seconds depend on the machine.
    """
    assert found()["at first"] == []
    number, others, after = found()["a cast"]
    assert number <= 85 and others == []
    assert after == [True, "Sender", False]


def test_options_of_commands_need_no_torch() -> None:
    """Help and mistyped options are answered before anything heavy is imported."""
    script = (
        "import sys, zerocast.cli.options, zerocast.bench.config; print('torch' in sys.modules, 'tyro' in sys.modules)"
    )
    assert printed(script) == "False True\n"


def test_the_process_is_changed_by_the_first_weight_and_the_first_prepare_alone() -> None:
    """Hooks before and after steps, and DTensor, change only then. Until then no heavy package is imported either."""
    assert found()["imports"] == [True, []]
    assert found()["weight"] == [True, False, False]
    assert found()["prepare"] == [True, True, True]
