"""zerocast under FSDP2: the FP32 master is the parameter, the wire carries quantized bytes."""

import sys
from types import ModuleType

from zerocast.fsdp2.fused_adamw import FusedAdamW
from zerocast.fsdp2.gradient_wire import set_grad_wire
from zerocast.fsdp2.prepare import PickledHook, load_state_dict, prepare, refresh, state_dict
from zerocast.fsdp2.state import TrainingState, load_masters

# Prepared modules that were pickled earlier name their hooks so.
for _name, _hook in (("left_gathered", "LeftGathered"), ("sources", "VerifyEvery")):
    sys.modules[f"{__name__}.{_name}"] = _module = ModuleType(_name)
    vars(_module)[_hook] = PickledHook

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
