"""Megatron-Core: zerocast casts QuantizedWeights in its byte buffers after its optimizer's step.

A run of megatron.training needs `install(recipe)` before `pretrain()` and nothing else. For other
loops, `quantized_params()` is a context around the construction of model, DDP and optimizer;
`attach(optimizer, ddp_chunks)` takes over the cast; `dequantize_` prepares a sharded state dict for
a checkpoint. `square_mxfp8()` gives TransformerEngine's MXFP8 weights tiles, in which one byte per
element serves both directions.
"""

from .attachment import Attachment, attach
from .building import quantized_params
from .checkpoint import dequantize_
from .installation import Installation, add_arguments, install, uninstall
from .primary import square_mxfp8

__all__ = [
    "Attachment",
    "Installation",
    "add_arguments",
    "attach",
    "dequantize_",
    "install",
    "quantized_params",
    "square_mxfp8",
    "uninstall",
]
