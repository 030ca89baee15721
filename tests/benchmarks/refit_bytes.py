"""Bytes of a refit: what a step changes of bf16 weights and of quantized ones, at the learning rates of RL.

    python -m tests.benchmarks.refit_bytes

A small Llama of random weights (std 0.02) learns the bytes of Python's standard library in FP32 on the CPU. After the
moments have settled, the same masters are cast into every format after every step, and a `Sender` finds what changed.
Mean over steps: the share of bytes that differ, and bytes an element of the codes and scales that a delta brings.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import zerocast
from zerocast.formats.layout import matrix_shape
from zerocast.serve import Sender

FORMATS = {
    "identity": "bf16",
    "fp8_block": "deepseek",
    "fp8_current": "modelopt",
    "mxfp8": "modelopt",
    "nvfp4": "modelopt",
}
LEARNING_RATES = (1e-6, 3e-6, 1e-5)


def build(hidden: int, layers: int) -> nn.Module:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--settle", type=int, default=30, help="steps before the first refit")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    text = "".join(path.read_text(errors="ignore") for path in sorted(Path(torch.__file__).parent.glob("*.py")))
    data = torch.tensor(list(text.encode()))
    for lr in LEARNING_RATES:
        model = build(arguments.hidden, arguments.layers)
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


if __name__ == "__main__":
    main()
