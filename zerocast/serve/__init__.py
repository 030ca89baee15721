"""Weights for inference: exports to files that engines load, and what such files hold."""

from zerocast.serve import export
from zerocast.serve.stored_weights import stored_weights

__all__ = ["export", "stored_weights"]
