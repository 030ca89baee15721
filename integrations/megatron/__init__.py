"""Megatron-Core: QuantizedWeights in the byte buffers of its DistributedDataParallel, cast by zerocast after its optimizer's step.

`quantized_params()`, or `building()`, is a context around the construction of model, DDP and
optimizer; `attach(optimizer, ddp_chunks)` takes over the cast; `dequantize_` prepares a sharded
state dict for a checkpoint.
"""

from .attachment import Attachment, attach
from .building import building, quantized_params
from .checkpoint import dequantize_

__all__ = ["Attachment", "attach", "building", "dequantize_", "quantized_params"]
