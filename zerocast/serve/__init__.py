"""Weights for inference: exports to files that engines load, and live bytes for engines that go
along with a run.
"""

from zerocast.serve import export
from zerocast.serve.decode import dequantized
from zerocast.serve.live import Bucket, named_tensors
from zerocast.serve.receiver import Receiver
from zerocast.serve.refit_header import RefitError
from zerocast.serve.sender import Message, Sender
from zerocast.serve.stored_weights import stored_weights

__all__ = [
    "Bucket",
    "Message",
    "Receiver",
    "RefitError",
    "Sender",
    "dequantized",
    "export",
    "named_tensors",
    "stored_weights",
]
