"""NVIDIA Apex: a DistributedFusedAdam with quantized weights. zerocast casts them after its step,
and Apex gathers their bytes.

Importing this package imports Apex. If that is missing, or another project has its name, the
ImportError says what was looked for.
"""

from .optimizer import DistributedFusedAdam

__all__ = ["DistributedFusedAdam"]
