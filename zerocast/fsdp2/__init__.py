"""zerocast under FSDP2: the FP32 master is the parameter, the wire carries quantized bytes."""

from zerocast.fsdp2.load_masters import load_masters
from zerocast.fsdp2.prepare import load_state_dict, prepare, refresh, state_dict

__all__ = ["load_masters", "load_state_dict", "prepare", "refresh", "state_dict"]
