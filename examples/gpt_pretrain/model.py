"""A byte-level GPT in one short file.

It has the usual parts of a language model: pre-norm blocks, RMSNorm, rotary positions, causal
attention, a GELU MLP, no biases, one matrix for embedding and output head. The vocabulary is the
256 byte values, so there is no tokenizer.

Precision: the model is built in FP32. The trainer then turns the matrices of the blocks into
quantized weights and the embedding into BF16, the dtype of the activations. Norm weights stay FP32;
norms and the loss are computed in FP32.

It leaves out parts that would change nothing about the weights: dropout, grouped queries, sampling
and its KV cache.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerocast import gemm

VOCAB_SIZE = 256


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model. The defaults make 3.2 M parameters."""

    n_layer: int = 4
    """Number of transformer blocks."""
    n_head: int = 4
    """Attention heads a block; must divide n_embd."""
    n_embd: int = 256
    """Width of the residual stream; block formats want a multiple of 128."""
    context: int = 256
    """Bytes of text that one sequence holds."""
    tie_embedding: bool = True
    """Use the embedding matrix as the output head as well."""

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f"n_embd must be a multiple of 2 * n_head, got {self.n_embd} and {self.n_head} heads")


class RMSNorm(nn.Module):
    """Root-mean-square norm with an FP32 weight, computed in FP32, returned in the dtype of its
    input.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Norm over the last dimension."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, eps=1e-6).to(x.dtype)


class Linear(nn.Linear):
    """A linear layer that multiplies in FP32 on a CPU without bf16 instructions, where bf16 is many
    times slower. Quantized weights do this by themselves.
    """

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias` as the dtype of `x`."""
        return gemm.plain.linear(x, self.weight, self.bias)


def rotary_table(context: int, head_dim: int, base: float = 10000.0) -> Tensor:
    """Tabulate cosine and sine of the angle of every (position, channel pair): float32 [2,
    context, head_dim / 2].
    """
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(context, dtype=torch.float32), frequency)
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + D/2) of `x` [..., T, D] by the angles of their position."""
    cos, sin = table[:, : x.shape[-2]].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.qkv = Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Mix positions: [batch, length, n_embd] to the same."""
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.n_head, width // self.n_head)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # three of [batch, head, length, head_dim]
        computed = gemm.plain.product_dtype(x.dtype, x.device.type)
        q, k, v = rotate(q, table).to(computed), rotate(k, table).to(computed), v.to(computed)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).to(x.dtype)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return out


class MLP(nn.Module):
    """Two matrices with a GELU between, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down = Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix channels: [batch, length, n_embd] to the same."""
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """Attention and MLP, each on a normed copy of the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.n_embd)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Add the outputs of attention and MLP: [batch, length, n_embd] to the same."""
        x = x + self.attn(self.attn_norm(x), table)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """Bytes in, logits over the next byte out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCAB_SIZE, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd)
        self.head = Linear(config.n_embd, VOCAB_SIZE, bias=False)
        self.register_buffer("rotary", rotary_table(config.context, config.n_embd // config.n_head), persistent=False)
        self.reset_parameters()
        if config.tie_embedding:
            self.head.weight = self.embed.weight

    def reset_parameters(self) -> None:
        """Draw weights of deviation 0.02, and less for matrices that write to the residual
        stream.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                writes_residual = name.endswith(("attn.proj.weight", "mlp.down.weight"))
                scale = 1 / math.sqrt(2 * self.config.n_layer) if writes_residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, length, 256] in the dtype of the embedding, from bytes [batch,
        length] as int64.
        """
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.rotary)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte, in FP32."""
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())
