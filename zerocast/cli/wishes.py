"""What several commands ask for alike: formats by name, and nominal dtypes."""

from collections.abc import Mapping
from typing import Literal

import torch

Dtype = Literal["bfloat16", "float16", "float32"]
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}
