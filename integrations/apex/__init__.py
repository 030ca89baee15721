"""NVIDIA Apex: a DistributedFusedAdam with quantized weights, which zerocast casts after its step.

Apex gathers their bytes.

Importing this package imports Apex; ImportError says what was looked for where it is missing, or
another project has its name.
"""

from .optimizer import DistributedFusedAdam

__all__ = ["DistributedFusedAdam"]
