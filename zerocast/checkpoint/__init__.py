"""States on disk: checkpoints, masters from files of other programs, exports for inference."""

from zerocast.checkpoint import export

__all__ = ["export"]
