"""zerocast under FSDP2: the FP32 master is the parameter, the wire carries quantized bytes."""

from zerocast.fsdp2.fused_adamw import FusedAdamW
from zerocast.fsdp2.gradient_wire import set_grad_wire
from zerocast.fsdp2.prepare import load_state_dict, prepare, refresh, state_dict
from zerocast.fsdp2.state import TrainingState, load_masters

__all__ = [
    "FusedAdamW",
    "TrainingState",
    "load_masters",
    "load_state_dict",
    "prepare",
    "refresh",
    "set_grad_wire",
    "state_dict",
]
