"""Refits of weights: the bytes that a step changes, and the seconds of sender and receiver.

    python -m tests.benchmarks.refits bytes
    python -m tests.benchmarks.refits time              # on a GPU

`bytes` has what a step changes of bf16 weights and of quantized ones, at the learning rates of RL. A small Llama of random
weights (std 0.02) learns the bytes of Python's standard library in FP32 on the CPU. After the moments have settled, the same
masters are cast into every format after every step, and a `Sender` finds what changed. Mean over steps: the share of bytes
that differ, and bytes an element of the codes and scales that a delta brings.

`time` has bytes and seconds of a refit of a model of Llama-3-8B's shapes, sender and receiver on one GPU. The matrices of all
blocks are random (std 0.02). Between refits each master moves by the learning rate times a normal number of a standard
deviation of `--update`, so that about as many bytes change as in the training of `bytes`. Seconds are of the host and the GPU
together, until the GPU is idle. Messages stay on the GPU; what would carry them to another one is not timed.

The parts of a refit are those of another one after as large a step, in which the host waits for the GPU before and after
each: the sender copies its share of the live bytes (`copy`), compares it with that of the refit before and encodes the changes
(`pack`); both take digests (`digest`); the receiver decodes (`unpack`) and writes (`apply`). `rest` is what is left, nearly all
of it Python.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import zerocast
from zerocast.formats.layout import matrix_shape
from zerocast.serve import Receiver, Sender, receiver, receiving, refit_message, sender
from zerocast.serve.sender import Message

FORMATS = {
    "identity": "bf16",
    "fp8_block": "deepseek",
    "fp8_current": "modelopt",
    "mxfp8": "modelopt",
    "nvfp4": "modelopt",
}
LEARNING_RATES_OF_BYTES = (1e-6, 3e-6, 1e-5)


def build_llama(hidden: int, layers: int) -> nn.Module:
    """Return a Llama of transformers, whose initializer has a standard deviation of 0.02."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_attention_heads=hidden // 64,
        num_hidden_layers=layers,
        vocab_size=256,
        max_position_embeddings=256,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


class Casts:
    """The matrices of a model, cast into one format after each step, and who sends them."""

    def __init__(self, model: nn.Module, fmt: str, naming: str) -> None:
        masters = {name: p.detach().view(-1) for name, p in model.named_parameters() if name.endswith("_proj.weight")}
        shapes = {name: matrix_shape(p.shape) for name, p in model.named_parameters() if name in masters}
        weights = [zerocast.QuantizedWeight.empty(shapes[name], fmt) for name in masters]
        self.plan = zerocast.CastPlan(weights, list(masters.values()), [0] * len(masters), names=list(masters))
        self.elements = sum(master.numel() for master in masters.values())
        self.cast()
        self.sender = Sender(self.plan, naming, allow_unequal_scales=True, bucket_bytes=2**24)
        self.full = sum(message.nbytes for message in self.sender.named_tensors())
        self.changed: list[float] = []
        self.sent: list[float] = []

    def cast(self) -> None:
        self.plan.cast()
        self.plan.post_all_gather()

    def refit(self) -> None:
        before = [share.clone() for share in self.sender._kept]
        nbytes = sum(message.nbytes for message in self.sender.named_deltas(self.sender.refit))
        differ = sum(int((a != b).sum()) for a, b in zip(before, self.sender._kept, strict=True))
        self.changed.append(differ / self.full)
        self.sent.append(nbytes / self.elements)


def count_bytes(arguments: argparse.Namespace) -> None:
    """Print the bytes that a step changes, by learning rate and format."""
    text = "".join(path.read_text(errors="ignore") for path in sorted(Path(torch.__file__).parent.glob("*.py")))
    data = torch.tensor(list(text.encode()))
    for lr in LEARNING_RATES_OF_BYTES:
        model = build_llama(arguments.hidden, arguments.layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        casts: dict[str, Casts] = {}
        for step in range(arguments.settle + arguments.steps + 1):
            starts = torch.randint(len(data) - 129, (8,))
            ids = torch.stack([data[at : at + 128] for at in starts.tolist()])
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == arguments.settle:
                casts = {fmt: Casts(model, fmt, naming) for fmt, naming in FORMATS.items()}
            for one in casts.values() if step > arguments.settle else ():
                one.cast()
                one.refit()
        for fmt, one in casts.items():
            changed, sent = (sum(values) / len(values) for values in (one.changed, one.sent))
            print(
                f"lr {lr:.0e} {fmt:12} full {one.full / one.elements:.4f} B/elt, changed {changed:.4%}, delta {sent:.5f} B/elt"
            )


ATTENTION = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}
MLP = {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}
LEARNING_RATES_OF_TIMES = (1e-6, 1e-5)


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
    "pack": [(refit_message.ChangedBytes, "between")],
    "digest": [(sender, "digest"), (refit_message, "digest"), (receiving, "digest_of_span")],
    "unpack": [(receiver, "changes_of")],
    "apply": [(receiver, "write_changes"), (receiver, "_copy")],
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


def show_times(what: str, refits: Callable[[], tuple[int, float]]) -> None:
    """Print the bytes and seconds of a refit, and the parts of another one."""
    nbytes, seconds = refits()
    with parts() as of_parts:
        _, whole = refits()
    columns = [*(of_parts[part] for part in PARTS), whole - of_parts.total()]
    print(f"{what:24}{nbytes / 1e6:9,.1f}{seconds:8.3f} |" + "".join(f"{value:9.3f}" for value in columns), flush=True)


class TimedRefits:
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


def time_refits(arguments: argparse.Namespace) -> None:
    """Print the bytes and seconds of refits, by format and learning rate."""
    print(f"{'':24}{'MB':>9}{'s':>8} |" + "".join(f"{part:>9}" for part in (*PARTS, "rest")))
    for fmt in arguments.format:
        run = TimedRefits(matrices(arguments.layers, arguments.shrink), fmt, arguments.bucket_bytes, arguments.update)
        # The first refits allocate.
        run.full()
        run.delta(LEARNING_RATES_OF_TIMES[0])
        show_times(f"{fmt}, full", run.full)
        for lr in LEARNING_RATES_OF_TIMES:
            show_times(f"{fmt}, delta at {lr:.0e}", partial(run.delta, lr))
        # Two would not fit.
        del run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    counted = commands.add_parser("bytes")
    counted.set_defaults(run=count_bytes)
    counted.add_argument("--hidden", type=int, default=256)
    counted.add_argument("--layers", type=int, default=4)
    counted.add_argument("--settle", type=int, default=30, help="steps before the first refit")
    counted.add_argument("--steps", type=int, default=8)
    timed = commands.add_parser("time")
    timed.set_defaults(run=time_refits)
    timed.add_argument("--layers", type=int, default=32)
    timed.add_argument("--shrink", type=int, default=1, help="divides all extents, to try this on a CPU")
    timed.add_argument("--update", type=float, default=0.6)
    timed.add_argument("--format", nargs="+", choices=FORMATS, default=["fp8_block", "nvfp4", "identity"])
    timed.add_argument("--bucket-bytes", type=int, default=2**28)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
