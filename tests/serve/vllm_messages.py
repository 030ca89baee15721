"""Values and tensors as bytes, between processes of two environments."""

import io
from typing import Any

import torch


def dumped(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
