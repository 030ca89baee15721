"""NVIDIA Apex: a DistributedFusedAdam with quantized weights. zerocast casts them after its step,
and Apex gathers their bytes.

Importing this package imports Apex. If Apex is missing, or a different project has its name, the
ImportError names the missing modules.
"""

from .optimizer import DistributedFusedAdam

__all__ = ["DistributedFusedAdam"]
