"""NVIDIA Apex: a DistributedFusedAdam whose quantized weights are cast by zerocast after its step, and gathered as bytes by Apex.

Importing this package imports Apex; ImportError says what was looked for where it is missing, or another project has its name.
"""

from .optimizer import DistributedFusedAdam

__all__ = ["DistributedFusedAdam"]
