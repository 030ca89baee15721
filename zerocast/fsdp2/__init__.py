"""zerocast under FSDP2: the FP32 master is the parameter, the wire carries quantized bytes."""

from zerocast.fsdp2.prepare import prepare, refresh

__all__ = ["prepare", "refresh"]
