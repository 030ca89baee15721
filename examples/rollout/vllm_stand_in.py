"""Stand-ins for vLLM's products of quantized weights, which it does not support on most CPUs.

They dequantize the parameters that vLLM's loaders leave in a layer, and multiply in bf16.
Everything before a product is vLLM's own. As a plugin of vLLM (`vllm_site`) every process has them.
"""

import os
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.platforms import PlatformEnum

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Return the scales of equal blocks, or one scale, expanded to the elements of a matrix, f32
    `shape`. Scales of one byte are biased exponents.
    """
    scales = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
    scales = scales.reshape(scales.shape[0], -1) if scales.dim() > 1 else scales.reshape(-1, 1)
    for dim in (0, 1):
        scales = scales.repeat_interleave(-(-shape[dim] // scales.shape[dim]), dim)
    return scales[: shape[0], : shape[1]]


def flipped(codes: Tensor) -> Tensor:
    """Return a matrix of bytes from its last row and column to the first."""
    return codes.view(torch.uint8).flip(0, 1).view(codes.dtype)


def decoded(layer: nn.Module) -> Tensor:
    """Return the matrix [out, in] that the parameters of a layer represent."""
    weight: Any = getattr(layer, "weight", None)
    weight = layer.weight_packed if weight is None else weight
    weight = flipped(weight.data) if getattr(layer, "is_packed", False) else weight
    scales: Any = getattr(layer, "weight_scale_inv", None)
    scales = layer.weight_scale if scales is None else scales
    if weight.dtype == torch.uint8:
        codes = torch.stack([weight & 15, weight >> 4], -1).flatten(-2).long()
        values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
        values = values * spread(scales.data, values.shape)
        overall = getattr(layer, "weight_global_scale", None)  # a divisor until the layer is processed, a factor then
        return values if overall is None else values * overall.data
    if weight.dtype == torch.int32:  # eight integers of 4 bits, the first in the lowest bits, each with 8 added
        codes = (weight.data[..., None] >> torch.arange(0, 32, 4)) & 15
        values = codes.flatten(-2).float() - 8
        return values * spread(scales.data, values.shape)
    values = weight.data.float() if weight.is_contiguous() else weight.data.t().float()  # some are kept transposed
    return values * spread(scales.data, values.shape)


class Dequantizing(NvFp4LinearKernel):  # a kernel as vLLM knows one
    """Replaces each kernel of quantized products. It reads the loaded weights in place."""

    layers: ClassVar[list[nn.Module]] = []

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        self.config = config

    @classmethod
    def is_supported(cls, *args: Any) -> tuple[bool, str | None]:
        """Return that it runs on any device, without a reason against it."""
        return True, None

    can_implement = is_supported

    def input_quant_key(self) -> None:
        """Inputs stay as they are."""
        return

    def process_weights_after_loading(self, layer: Any) -> None:
        """Record the layer, whose bytes stay as they were loaded."""
        self.layers.append(layer)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product with the decoded matrix, as the dtype of `x`."""
        return nn.functional.linear(x, decoded(layer).to(x.dtype), bias)


class Packing(Dequantizing):
    """One that lays codes out again, in the order of bytes from the last to the first."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Note the layer, and flip its codes."""
        super().process_weights_after_loading(layer)
        for name in ("weight", "weight_packed"):
            weight: Any = getattr(layer, name, None)
            if weight is not None:
                layer.is_packed = True
                codes = flipped(weight.data if weight.is_contiguous() else weight.data.t())
                setattr(layer, name, nn.Parameter(codes, requires_grad=False))


class Buffering(Packing):
    """One that also keeps codes in a buffer, which vLLM does not copy where a load has not named
    it.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """Like the base class, with a copy of the codes."""
        super().process_weights_after_loading(layer)
        layer.register_buffer("codes", layer.weight.data.clone(), persistent=False)


def use(kernel: type[Dequantizing]) -> None:
    """Replace all kernels by a stand-in."""
    for name, table in vars(linear).items():
        if name.startswith("_POSSIBLE_"):
            table[PlatformEnum.CPU] = [kernel]
    # vLLM always uses this kernel for weight-only formats.
    linear.MarlinNvFp4LinearKernel = kernel


def register() -> None:
    """Register the stand-in that ZEROCAST_STAND_IN names, and its memory layout for refits of
    zerocast.
    """
    from zerocast.integrations.vllm import layers  # noqa: PLC0415, since `use` needs no zerocast

    layers.READ_IN_PLACE.add(Dequantizing.__name__)
    layers.REPLAYED.update((Packing.__name__, Buffering.__name__))
    kernels = {"in place": Dequantizing, "packed": Packing, "packed into a buffer": Buffering}
    use(kernels[os.environ["ZEROCAST_STAND_IN"]])
