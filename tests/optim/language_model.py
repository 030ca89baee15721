"""A small language model of every kind of parameter: quantized linears, a bf16 embedding tied to the head, FP32 norms, a
weight used twice."""

import torch
from torch import Tensor, nn
from torch.nn import functional

import zerocast

VOCABULARY, WIDTH, HIDDEN = 61, 64, 96
FORMATS = {
    "blocks.0.up.weight": "nvfp4",
    "blocks.0.down.weight": "mxfp8",
    "blocks.1.up.weight": "fp8_block",
    "blocks.1.down.weight": "fp8_delayed:amax_history_len=4",
    "blocks.2.up.weight": "fp8_current",
    "shared.weight": "nvfp4",
}


class Block(nn.Module):
    """Norm in FP32, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x.float()).to(x.dtype))
        return x + self.down(functional.silu(hidden))


class LM(nn.Module):
    """A small model of the next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        zerocast.quantize_(self, zerocast.Recipe(FORMATS), dtype=torch.bfloat16)
        for name, parameter in self.named_parameters():
            if type(parameter) is nn.Parameter and "norm" not in name:
                parameter.data = parameter.data.bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean loss of the next token."""
        x = self.embedding(tokens[:, :-1]) * 4
        for block in self.blocks:
            x = self.shared(block(x))
        logits = self.head(x).float()
        return functional.cross_entropy(logits.view(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def batch(step: int, rank: int) -> Tensor:
    """Tokens of a periodic text, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(0, VOCABULARY, (2, 1), generator=generator)
    stride = torch.randint(1, 4, (2, 1), generator=generator)
    return (start + stride * torch.arange(17)) % VOCABULARY
