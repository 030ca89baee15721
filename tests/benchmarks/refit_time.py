"""Bytes and seconds of a refit of a model of Llama-3-8B's shapes, sender and receiver on one GPU.

    python -m tests.benchmarks.refit_time

The matrices of all blocks are random (std 0.02). Between refits each master moves by the learning rate times a normal
number of a standard deviation of `--update`, so that about as many bytes change as in the training of `refit_bytes`.
Seconds are of the host and the GPU together, until the GPU is idle: the sender compares with its copy, finds and encodes
changes and takes digests; the receiver checks, decodes and writes. Messages stay on the GPU; what would carry them to
another one is not timed.
"""

import argparse
import time
from collections.abc import Iterable

import torch

import zerocast
from tests.benchmarks.refit_bytes import FORMATS
from zerocast.serve import Receiver, Sender
from zerocast.serve.sender import Message

ATTENTION = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}
MLP = {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}
LEARNING_RATES = (1e-6, 1e-5)


def matrices(layers: int, shrink: int) -> dict[str, tuple[int, int]]:
    """The names and shapes of the matrices of blocks."""
    shapes = {f"self_attn.{name}_proj": shape for name, shape in ATTENTION.items()}
    shapes |= {f"mlp.{name}_proj": shape for name, shape in MLP.items()}
    return {
        f"model.layers.{layer}.{name}.weight": (rows // shrink, columns // shrink)
        for layer in range(layers)
        for name, (rows, columns) in shapes.items()
    }


def refit(what: str, receiver: Receiver, messages: Iterable[Message]) -> None:
    """Let a receiver take all messages, and print their bytes and the seconds until the GPU is idle."""

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    wait()
    start, nbytes = time.perf_counter(), 0
    for message in messages:
        nbytes += message.nbytes
        receiver.accept(message.header, message.tensors)
    wait()
    print(f"{what:30} {nbytes / 1e6:10,.1f} MB {time.perf_counter() - start:8.3f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--shrink", type=int, default=1, help="divides all extents, to try this on a CPU")
    parser.add_argument("--update", type=float, default=4.0)
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--bucket-bytes", type=int, default=2**28)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = matrices(arguments.layers, arguments.shrink)
    for fmt in arguments.format:
        generator = torch.Generator(device).manual_seed(0)
        masters = {
            name: torch.empty(rows * columns, device=device).normal_(0, 0.02, generator=generator)
            for name, (rows, columns) in shapes.items()
        }
        weights = [zerocast.QuantizedWeight.empty(shape, fmt, device=device) for shape in shapes.values()]
        plan = zerocast.CastPlan(weights, list(masters.values()), [0] * len(masters), names=list(masters))
        plan.cast()
        plan.post_all_gather()
        sender = Sender(plan, FORMATS[fmt], allow_unequal_scales=True, bucket_bytes=arguments.bucket_bytes)
        receiver = Receiver(device=device)
        refit(f"{fmt}, full", receiver, sender.named_tensors())
        for lr in (LEARNING_RATES[0], *LEARNING_RATES):  # the first one allocates
            for master in masters.values():
                master.add_(torch.empty_like(master).normal_(generator=generator), alpha=lr * arguments.update)
            plan.cast()
            plan.post_all_gather()
            refit(f"{fmt}, delta at {lr:.0e}", receiver, sender.named_deltas(receiver.refit))
        del plan, weights, masters, sender, receiver


if __name__ == "__main__":
    main()
