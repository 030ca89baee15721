"""ModelOpt's own tensors, as a reader of folders in its naming."""

from collections.abc import Mapping

import torch
from torch import Tensor

SCALES = ("_scale", "_scale_2")


def decoded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a folder by name; those that are quantized by the class of ModelOpt for their bytes, in bf16."""
    scales = {f"{name}{suffix}" for name in tensors for suffix in SCALES}
    return {
        name: _value(tensor, tensors[f"{name}_scale"], tensors.get(f"{name}_scale_2"))
        if f"{name}_scale" in tensors
        else tensor
        for name, tensor in tensors.items()
        if name not in scales
    }


def _value(codes: Tensor, scale: Tensor, double_scale: Tensor | None) -> Tensor:
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    if double_scale is not None:
        packed = NVFP4QTensor(torch.Size((codes.shape[0], 2 * codes.shape[1])), torch.bfloat16, codes)
        scales = {"scale": scale, "double_scale": double_scale, "block_sizes": {-1: 16}}
        return packed.dequantize(dtype=torch.bfloat16, **scales)
    if scale.dtype == torch.uint8:
        return MXFP8QTensor(codes.shape, torch.bfloat16, codes).dequantize(dtype=torch.bfloat16, scale=scale)
    if scale.dim() == 4:
        scale = scale.flatten(2).flatten(0, 1).repeat_interleave(128, 0).repeat_interleave(128, 1)
        scale = scale[: codes.shape[0], : codes.shape[1]]
    else:
        scale = scale[:, None]
    return FP8QTensor(codes.shape, torch.bfloat16, codes).dequantize(dtype=torch.float32, scale=scale).bfloat16()
