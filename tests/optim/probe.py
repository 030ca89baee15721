"""A model whose gradients are what a test says, so that an optimizer can be compared with arithmetic.

Each parameter enters the loss through a product whose gradient is exact: `linear(identity, W)` for a quantized weight, `p *
g` for any other. Backward hooks, buckets and collectives see an ordinary backward pass.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import zerocast

PLAIN = "plain"


@dataclass(frozen=True)
class Spec:
    """One parameter: how it is stored, its nominal dtype, its parameter group, and on which (step, rank) it gets a gradient."""

    name: str
    shape: tuple[int, ...]
    fmt: str = PLAIN
    dtype: torch.dtype = torch.bfloat16
    group: int = 0
    used: str = "always"

    def initial(self) -> Tensor:
        """Return the FP32 value that the master starts from."""
        value = _normal(self.name, self.shape) * 0.1
        return value if self.fmt != PLAIN else value.to(self.dtype).float()

    def gradient(self, step: int, rank: int) -> Tensor | None:
        """Return the gradient of one backward pass on one rank, in the nominal dtype, or None if the parameter
        takes no part.
        """
        if not USED[self.used](step, rank):
            return None
        size = 10.0 ** (step % 5 - 3)
        return (_normal(f"{self.name} {step} {rank}", self.shape) * size).to(self.dtype)


USED: Mapping[str, Callable[[int, int], bool]] = {
    "always": lambda step, rank: True,
    "never": lambda step, rank: False,
    "rank 0": lambda step, rank: rank == 0,
    "by turns": lambda step, rank: (step + rank) % 2 == 0,
}

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MIXED = (
    Spec("embedding", (50, 24)),
    Spec("norm", (37,), dtype=FP32, group=1),
    Spec("delayed", (48, 80), "fp8_delayed:amax_history_len=3"),
    Spec("recent", (16, 16), "fp8_delayed:amax_compute_algo=most_recent,amax_history_len=4,element=e5m2,margin=1"),
    Spec("current", (13, 7), "fp8_current", FP32),
    Spec("block", (130, 33), "fp8_block"),
    Spec("block_fp16", (5, 129), "fp8_block:power_of_2_scale=False", FP16, 1),
    Spec("mx", (64, 96), "mxfp8"),
    Spec("square", (64, 96), "mxfp8:block=32x32"),
    Spec("nv", (48, 112), "nvfp4"),
    Spec("nv_late", (16, 32), "nvfp4", FP32, used="by turns"),
    Spec("unused", (32, 32), "nvfp4", used="never"),
    Spec("fp16", (3, 5, 7), dtype=FP16, used="rank 0"),
    Spec("scalar", (), dtype=FP32, group=1),
    Spec("bias", (1,), group=1),
)
# One of each kind, where formats are not what a test is about.
FEW = tuple(
    spec
    for spec in MIXED
    if spec.name in ("embedding", "norm", "delayed", "block", "nv", "nv_late", "fp16", "scalar", "bias")
)


class Probe(nn.Module):
    """The parameters of `specs`, by name."""

    def __init__(self, specs: Iterable[Spec]) -> None:
        super().__init__()
        self.specs = tuple(specs)
        for spec in self.specs:
            self.register_parameter(spec.name, nn.Parameter(spec.initial()))
            if spec.fmt == PLAIN:
                self.get_parameter(spec.name).data = spec.initial().to(spec.dtype)
        quantized = [spec for spec in self.specs if spec.fmt != PLAIN]
        for dtype in {spec.dtype: None for spec in quantized}:
            formats = {spec.name: spec.fmt for spec in quantized if spec.dtype is dtype}
            zerocast.quantize_(self, zerocast.Recipe(formats), dtype=dtype)

    def loss(self, gradients: Mapping[str, Tensor | None]) -> Tensor:
        """Return a scalar whose gradients are `gradients`. Parameters without one take no part."""
        parts = []
        for spec in self.specs:
            gradient, parameter = gradients[spec.name], self.get_parameter(spec.name)
            if gradient is None:
                continue
            gradient = gradient.to(parameter.device)
            if spec.fmt != PLAIN:
                identity = torch.eye(spec.shape[1], dtype=spec.dtype, device=parameter.device)
                part = nn.functional.linear(identity, parameter) * gradient.t()
            else:
                part = parameter * gradient
            parts.append(part.sum().float())
        return torch.stack(parts).sum()

    def backward(self, step: int, rank: int) -> None:
        """Run a backward pass with the gradients of a step and rank, if there are any."""
        gradients = {spec.name: spec.gradient(step, rank) for spec in self.specs}
        if any(gradient is not None for gradient in gradients.values()):
            self.loss(gradients).backward()

    def param_groups(
        self, options: Iterable[Mapping[str, object]], frozen: Collection[str] = ()
    ) -> list[dict[str, object]]:
        """Return named parameters in the groups of their specs, with these options by group. Those that are
        `frozen` need no gradient from now on, and are in none.
        """
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)
        groups = []
        for index, chosen in enumerate(options):
            members = [
                (spec.name, self.get_parameter(spec.name))
                for spec in self.specs
                if spec.group == index and spec.name not in frozen
            ]
            groups.append({"params": members, **chosen})
        return groups


def _normal(key: str, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(_normal_values(key, shape).copy())


# Arrays of their own memory, since tests count the bytes of all tensors in a process.
@functools.lru_cache(4096)
def _normal_values(key: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    seed = int.from_bytes(key.encode(), "little") % (2**61 - 1)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    values: NDArray[np.float32] = drawn.numpy().copy()
    return values
