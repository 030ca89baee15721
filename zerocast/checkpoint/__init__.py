"""States on disk: whole checkpoints, files of other programs as masters, and exports for
inference.
"""

from zerocast.checkpoint import export

__all__ = ["export"]
