"""The model whose training step is timed: Llama blocks in plain torch, and their shapes.

A block has RMSNorm, rotary embedding, grouped-query attention by torch's
scaled_dot_product_attention, and SwiGLU. Nothing here uses zerocast, since every implementation
that is compared trains this module.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

EPSILON = 1e-5
ROTARY_BASE = 500_000.0
STANDARD_DEVIATION = 0.02


@dataclass(frozen=True)
class Shape:
    """The widths of a model: `dim` of the residual stream, `ffn` of the MLP, and heads."""

    dim: int
    ffn: int
    heads: int
    kv_heads: int

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.dim // self.heads


SHAPES = {
    "llama3-1b": Shape(2048, 8192, 32, 8),
    "llama3-8b": Shape(4096, 14336, 32, 8),
    "llama3-70b": Shape(8192, 28672, 64, 8),
    "tiny": Shape(128, 256, 2, 1),
}


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._head_dim = shape.head_dim
        kv_dim = shape.kv_heads * shape.head_dim
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk = nn.Linear(shape.dim, kv_dim, bias=False)
        self.wv = nn.Linear(shape.dim, kv_dim, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend within each sequence of `x` (batch, tokens, dim)."""
        q, k, v = (w(x).unflatten(-1, (-1, self._head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLP(nn.Module):
    """The SwiGLU feed-forward layer of a block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.w2 = nn.Linear(shape.ffn, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, `w2(silu(w1(x)) * w3(x))`."""
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """Attention and MLP, each after a norm, with residual connections."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, EPSILON)
        self.mlp_norm = nn.RMSNorm(shape.dim, EPSILON)
        self.attention = Attention(shape)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run both on `x` (batch, tokens, dim)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """A causal language model; `forward` returns the mean cross-entropy in nats per token.

    Matrices are drawn from a normal distribution with standard deviation 0.02.
    """

    def __init__(self, shape: Shape, layers: int, vocabulary: int, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(layers))
        self.norm = nn.RMSNorm(shape.dim, EPSILON)
        self.head = nn.Linear(shape.dim, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=STANDARD_DEVIATION)
        frequencies = ROTARY_BASE ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(sequence).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angles.sin().bfloat16(), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of `labels` given `tokens`, both of shape (batch, sequence)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
