"""What `import zerocast` brings along: no compiler, which takes seconds, no triton, which fixes whether kernels are interpreted."""

import subprocess
import sys

HEAVY = ("torch._dynamo", "torch._inductor", "triton", "safetensors", "matplotlib", "tyro")


def test_nothing_heavy_is_imported() -> None:
    imports = "import zerocast, zerocast.optim, zerocast.fsdp2, zerocast.export"
    script = f"import sys; {imports}; print([name for name in {HEAVY} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
