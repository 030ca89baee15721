"""The operators that pass torch's dispatcher."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Dispatched(TorchDispatchMode):
    """A mode that records the names of operators in order, such as `aten::copy_` and `zerocast::partial_cast`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    @property
    def counts(self) -> Counter[str]:
        """The number of calls of each operator."""
        return Counter(self.names)

    @property
    def stages(self) -> list[str]:
        """The operators of zerocast in call order, without their namespace."""
        return [name.removeprefix("zerocast::") for name in self.names if name.startswith("zerocast::")]
