"""Lightning: strategies for its Trainer and for Fabric, with ZeroAdamW in place of
DistributedDataParallel.
"""

from .fabric import FabricZeroStrategy
from .trainer import ZeroStrategy

__all__ = ["FabricZeroStrategy", "ZeroStrategy"]
