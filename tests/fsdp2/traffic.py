"""What the ranks of a case send: collectives by name with the bytes they carry."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMES = {
    "allgather": "all-gather",
    "_allgather_base_": "all-gather",
    "allreduce_": "all-reduce",
    "_reduce_scatter_base_": "reduce-scatter",
}


class Traffic(TorchDispatchMode):
    """`sent[name]`: bytes that this rank put in, one entry a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, list[int]] = {"all-gather": [], "all-reduce": [], "reduce-scatter": []}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what a collective is given."""
        name = func.name().partition("::")[2]
        if func.namespace == "c10d" and name in NAMES:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            put_in = tensors[0] if NAMES[name] == "all-reduce" else tensors[-1]
            self.sent[NAMES[name]].append(put_in.numel() * put_in.element_size())
        return func(*args, **(kwargs or {}))
