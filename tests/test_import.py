"""`import zerocast` brings along no compiler, which takes seconds, no triton, which fixes whether kernels are
interpreted, and nothing that changes torch for the process.
"""

import subprocess
import sys

import pytest

HEAVY = ("torch._dynamo", "torch._inductor", "triton", "safetensors", "matplotlib", "tyro")
EVERYTHING = "import zerocast, zerocast.optim, zerocast.fsdp2, zerocast.export"


def printed(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


def test_everything_is_imported_when_it_is_asked_for() -> None:
    """`import zerocast` brings nothing, not even torch; a cast then brings no DTensors, FSDP2 or checkpoints.
    Modules beyond torch's are counted, since seconds depend on the machine.
    """
    script = """
import sys, zerocast
print([name for name in sys.modules if name == "torch" or name.startswith("zerocast.")])
import torch
before = set(sys.modules)
zerocast.quantize_
new = set(sys.modules) - before
print(len(new), [name for name in new if name.partition(".")[0] != "zerocast"])
print(all(getattr(zerocast, name) for name in zerocast.__all__), zerocast.serve.Sender.__name__, hasattr(zerocast, "nothing"))
"""
    at_first, counts, after = printed(script).splitlines()
    assert at_first == "[]"
    number, _, others = counts.partition(" ")
    assert int(number) <= 85 and others == "[]"
    assert after == "True Sender False"


def test_options_of_commands_need_no_torch() -> None:
    """Help and mistyped options are answered before anything heavy is imported."""
    script = (
        "import sys, zerocast.cli.options, zerocast.bench.config; print('torch' in sys.modules, 'tyro' in sys.modules)"
    )
    assert printed(script) == "False True\n"


CHANGES = """
import sys, torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as optim

def state():
    return list(optim._global_optimizer_pre_hooks), list(optim._global_optimizer_post_hooks), dict(vars(DTensor))

before = state()
{0}
print(state() == before, [name for name in {2} if name in sys.modules])
{1}
print([now != then for now, then in zip(state(), before)])
"""


@pytest.mark.parametrize(
    ("first", "changed"),
    [
        ("zerocast.QuantizedWeight.empty((16, 16), 'nvfp4')", "[True, False, False]"),
        ("zerocast.fsdp2.prepare(torch.nn.Linear(16, 16), {'weight': 'nvfp4'})", "[True, True, True]"),
    ],
)
def test_the_process_is_changed_by_the_first_weight_and_the_first_prepare_alone(first: str, changed: str) -> None:
    """Hooks before and after steps, and DTensor, change only then. Until then no heavy package is imported either."""
    assert printed(CHANGES.format(EVERYTHING, first, HEAVY)).splitlines() == ["True []", changed]
