"""Messages of a refit over a process group: the header as JSON, then the tensors as bytes.

Tensors go from the live weights into the receiver's without a copy in between.
"""

import json

import torch
import torch.distributed as dist
from torch import Tensor

from zerocast.serve import Message, Receiver


def send(message: Message, to: int) -> None:
    """Send a message to a rank, which calls `receive`."""
    text = bytearray(json.dumps(dict(message.header)).encode())
    dist.send(torch.tensor([len(text)]), to)
    dist.send(torch.frombuffer(text, dtype=torch.uint8), to)
    for tensor in message.tensors:
        if tensor.numel():
            dist.send(_bytes(tensor), to)


def receive(receiver: Receiver, source: int) -> set[str]:
    """Receive and apply the messages of one refit; the names of the tensors that changed."""
    changed: set[str] = set()
    kind = ""
    while kind != "end":
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source)
        text = torch.zeros(int(size), dtype=torch.uint8)
        dist.recv(text, source)
        header = json.loads(bytes(text.tolist()))
        buffers = receiver.buffers(header)
        for buffer in buffers:
            if buffer.numel():
                dist.recv(_bytes(buffer), source)
        changed.update(receiver.accept(header, buffers))
        kind = header["kind"]
    return changed


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
