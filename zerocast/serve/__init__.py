"""Weights for inference: exports to files that engines load."""

from zerocast.serve import export

__all__ = ["export"]
