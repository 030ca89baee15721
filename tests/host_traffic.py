"""Values that cross between host and device, which costs nothing on the CPU and makes the host wait on a GPU."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CROSSING = {
    "_local_scalar_dense",  # item(), float(), bool()
    "lift_fresh",  # torch.tensor of Python values
    "scalar_tensor",  # a Python value among tensors, as in torch.where
    "nonzero",
    "masked_select",
    "unique_dim",
    "equal",
}


class HostTraffic(TorchDispatchMode):
    """A mode that records operators, except our own ops, that read a value on the host or bring one from it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        masks = [t for t in tree_leaves(args[1:]) if isinstance(t, Tensor) and t.dtype is torch.bool]
        if name in CROSSING or (name.startswith("index") and masks):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))
