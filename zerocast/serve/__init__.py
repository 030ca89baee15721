"""Live weights for inference engines that follow a run: all bytes, or the bytes that changed.

`zerocast.export` writes files for engines with the modules of this package.
"""

from zerocast.serve.engine_receiver import EngineReceiver
from zerocast.serve.engine_sender import EngineSender
from zerocast.serve.engine_weights import EngineWeights
from zerocast.serve.live import Bucket, named_tensors
from zerocast.serve.namings import dequantized
from zerocast.serve.receiver import Receiver
from zerocast.serve.refit_message import RefitError
from zerocast.serve.sender import Message, Sender
from zerocast.serve.stored_model import stored_weights

__all__ = [
    "Bucket",
    "EngineReceiver",
    "EngineSender",
    "EngineWeights",
    "Message",
    "Receiver",
    "RefitError",
    "Sender",
    "dequantized",
    "named_tensors",
    "stored_weights",
]
