"""What `import zerocast` brings along: no compiler, which takes seconds, no triton, which fixes whether kernels are interpreted."""

import subprocess
import sys

import pytest

LAZY = ("torch._dynamo", "torch._inductor", "triton", "safetensors", "matplotlib", "tyro")


@pytest.mark.parametrize("module", ["zerocast", "zerocast.optim", "zerocast.fsdp2", "zerocast.export"])
def test_nothing_heavy_is_imported(module: str) -> None:
    script = f"import sys, {module}; print([name for name in {LAZY} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
