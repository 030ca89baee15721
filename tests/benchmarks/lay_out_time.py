"""Time how the gradients of a block of Llama-3-8B are laid out for FSDP2's reduction, by its op and by our kernel.

    python -m tests.benchmarks.lay_out_time            # on a GPU

Prints for each number of ranks milliseconds of the GPU and of the host (medians of 20), and those of a copy of as many
bytes.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

# FSDP2 registers the op when it is imported.
import torch.distributed.fsdp

from tests.benchmarks.refits import ATTENTION, MLP
from zerocast.fsdp2 import reduction

NORMS = {"attention_norm": (4096,), "mlp_norm": (4096,)}
REPEATS = 20
# Cycles for which the GPU waits before each call, so that it measures the GPU and not the host.
WAIT = 3_000_000


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the milliseconds of the GPU and of the host."""
    call()
    of_gpu, of_host = [], []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(WAIT)
        start.record()
        before = time.perf_counter()
        call()
        of_host.append((time.perf_counter() - before) * 1e3)
        end.record()
        torch.cuda.synchronize()
        of_gpu.append(start.elapsed_time(end))
    return median(of_gpu), median(of_host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    ranks = parser.parse_args().ranks
    shapes = [*NORMS.values(), *ATTENTION.values(), *MLP.values()]
    gradients = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    numel = sum(gradient.numel() for gradient in gradients)
    # The copy moves as many bytes: 6 an element, 4 of them written.
    source = torch.randn(numel * 3 // 4, device="cuda")
    target = torch.empty_like(source)
    print(f"a copy: {timed(lambda: target.copy_(source))[0]:.3f} ms")
    for count in ranks:
        expected, out = torch.empty(2, count, numel // count, device="cuda")
        op = timed(
            lambda out=expected, count=count: torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=count, out=out)
        )
        ours = timed(lambda out=out, count=count: reduction.lay_out(gradients, 0, count, out=out))
        assert torch.equal(out, expected)
        print(f"{count} ranks: op {op[0]:.3f} ms, host {op[1]:.3f}; kernel {ours[0]:.3f} ms, host {ours[1]:.3f}")


if __name__ == "__main__":
    main()
