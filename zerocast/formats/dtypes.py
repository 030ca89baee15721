"""Names of dtypes: layouts are computed without importing torch, whose import would delay `zerocast
plan`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# The bytes of an element of each dtype that layouts use.
ITEMSIZE = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4}


def dtype_name(dtype: "torch.dtype | str") -> str:
    """Return the name of a dtype, which may already be a name."""
    return dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> "torch.dtype":
    """Return the dtype of torch with this name."""
    # Whoever asks has tensors, so this import costs a look-up.
    import torch  # noqa: PLC0415

    dtype: torch.dtype = getattr(torch, name)
    return dtype
