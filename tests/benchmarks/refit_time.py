"""Bytes and seconds of a refit of a model of Llama-3-8B's shapes, sender and receiver on one GPU.

    python -m tests.benchmarks.refit_time

The matrices of all blocks are random (std 0.02). Between refits each master moves by the learning rate times a normal
number of a standard deviation of `--update`, so that about as many bytes change as in the training of `refit_bytes`.
Seconds are of the host and the GPU together, until the GPU is idle. Messages stay on the GPU; what would carry them to
another one is not timed.

The parts of a refit are those of another one after as large a step, in which the host waits for the GPU before and after
each: the sender copies its share of the live bytes (`copy`), compares it with that of the refit before (`compare`), and
encodes the changes (`pack`); both take digests (`digest`); the receiver decodes (`unpack`) and writes (`apply`). `rest` is
what is left, nearly all of it Python.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

import zerocast
from tests.benchmarks.refit_bytes import FORMATS
from zerocast.serve import Receiver, Sender, bucket, receiver, refit_message, sender
from zerocast.serve.sender import Message

ATTENTION = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}
MLP = {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}
LEARNING_RATES = (1e-6, 1e-5)


def matrices(layers: int, shrink: int) -> dict[str, tuple[int, int]]:
    """Return the names and shapes of the matrices of blocks."""
    shapes = {f"self_attn.{name}_proj": shape for name, shape in ATTENTION.items()}
    shapes |= {f"mlp.{name}_proj": shape for name, shape in MLP.items()}
    return {
        f"model.layers.{layer}.{name}.weight": (rows // shrink, columns // shrink)
        for layer in range(layers)
        for name, (rows, columns) in shapes.items()
    }


# The functions of each part.
PARTS = {
    "copy": [(sender, "flat_bytes")],
    "compare": [(refit_message, "_compared")],
    "pack": [(refit_message.ChangedBytes, "between")],
    "digest": [(sender, "digest"), (refit_message, "digest"), (bucket, "digest_of_span")],
    "unpack": [(receiver, "changes_of")],
    "apply": [(receiver, "write_changes"), (Receiver, "_copy")],
}


def idle() -> float:
    """Wait for the GPU, and return the time."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def parts() -> Iterator[Counter[str]]:
    """Measure the seconds of each part while the context is open, without those of parts that it calls."""
    seconds: Counter[str] = Counter()

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start, inside = idle(), seconds.total()
            result = function(*arguments)
            seconds[part] += idle() - start - (seconds.total() - inside)
            return result

        return staticmethod(call) if part == "pack" else call

    with ExitStack() as stack:
        for part, functions in PARTS.items():
            for owner, name in functions:
                stack.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))
        yield seconds


def refit(to: Receiver, messages: Iterable[Message]) -> tuple[int, float]:
    """Let a receiver take all messages. Returns their bytes, and the seconds until the GPU is idle."""
    start, nbytes = idle(), 0
    for message in messages:
        nbytes += message.nbytes
        to.accept(message.header, message.tensors)
    return nbytes, idle() - start


def show(what: str, refits: Callable[[], tuple[int, float]]) -> None:
    """Print the bytes and seconds of a refit, and the parts of another one."""
    nbytes, seconds = refits()
    with parts() as of_parts:
        _, whole = refits()
    columns = [*(of_parts[part] for part in PARTS), whole - of_parts.total()]
    print(f"{what:24}{nbytes / 1e6:9,.1f}{seconds:8.3f} |" + "".join(f"{value:9.3f}" for value in columns), flush=True)


class Run:
    """Random masters of these shapes, cast into a format, and who sends and receives them."""

    def __init__(self, shapes: dict[str, tuple[int, int]], fmt: str, bucket_bytes: int, update: float) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._generator = torch.Generator(device).manual_seed(0)
        self._masters = [torch.zeros(rows * columns, device=device) for rows, columns in shapes.values()]
        weights = [zerocast.QuantizedWeight.empty(shape, fmt, device=device) for shape in shapes.values()]
        self._plan = zerocast.CastPlan(weights, self._masters, [0] * len(weights), names=list(shapes))
        self._update = update
        self._step(0.02)
        self._sender = Sender(self._plan, FORMATS[fmt], allow_unequal_scales=True, bucket_bytes=bucket_bytes)
        self._receiver = Receiver(device=device)

    def _step(self, std: float) -> None:
        for master in self._masters:
            master.add_(torch.empty_like(master).normal_(generator=self._generator), alpha=std)
        self._plan.cast()
        self._plan.post_all_gather()

    def full(self) -> tuple[int, float]:
        """Send all weights. Return the bytes and seconds."""
        return refit(self._receiver, self._sender.named_tensors())

    def delta(self, lr: float) -> tuple[int, float]:
        """Take a step and send what it changed. Return the bytes and seconds."""
        self._step(lr * self._update)
        return refit(self._receiver, self._sender.named_deltas(self._receiver.refit))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--shrink", type=int, default=1, help="divides all extents, to try this on a CPU")
    parser.add_argument("--update", type=float, default=0.6)
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=["fp8_block", "nvfp4", "identity"])
    parser.add_argument("--bucket-bytes", type=int, default=2**28)
    arguments = parser.parse_args()
    print(f"{'':24}{'MB':>9}{'s':>8} |" + "".join(f"{part:>9}" for part in (*PARTS, "rest")))
    for fmt in arguments.format:
        run = Run(matrices(arguments.layers, arguments.shrink), fmt, arguments.bucket_bytes, arguments.update)
        # The first refits allocate.
        run.full()
        run.delta(LEARNING_RATES[0])
        show(f"{fmt}, full", run.full)
        for lr in LEARNING_RATES:
            show(f"{fmt}, delta at {lr:.0e}", partial(run.delta, lr))
        # Two would not fit.
        del run


if __name__ == "__main__":
    main()
