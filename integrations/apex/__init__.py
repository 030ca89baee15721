"""NVIDIA Apex: a DistributedFusedAdam with quantized weights. zerocast casts them after its step,
and Apex gathers their bytes.

Importing this package imports Apex; ImportError says what was looked for where it is missing, or
another project has its name.
"""

from .optimizer import DistributedFusedAdam

__all__ = ["DistributedFusedAdam"]
