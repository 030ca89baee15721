"""The element types that a weight's codes can have, as values, and the names of dtypes.

Source of the numbers: docs/formats/common.md, the OCP FP8 and MX specifications. The backends
implement the encoding; a value here only names the type. Layouts are computed without importing
torch, whose import would delay `zerocast plan`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Element:
    """One code type: its field name, width in bits and largest finite magnitude."""

    name: str
    bits: int
    max: float

    @property
    def dtype(self) -> "torch.dtype":
        """The torch dtype of 8-bit codes. 4-bit codes are packed two to a byte and have no
        dtype.
        """
        # The command line checks the name of a format, and does not wait for torch to answer.
        import torch  # noqa: PLC0415

        return torch.float8_e4m3fn if self is E4M3 else torch.float8_e5m2


E4M3 = Element("e4m3", 8, 448.0)
E5M2 = Element("e5m2", 8, 57344.0)
E2M1 = Element("e2m1", 4, 6.0)
INT4 = Element("int4", 4, 7.0)

FP8 = {element.name: element for element in (E4M3, E5M2)}


def fp8(name: str) -> Element:
    """Return the FP8 element called `name`. Raises ValueError for any other name."""
    if name not in FP8:
        raise ValueError(f"element must be one of {sorted(FP8)}, got {name!r}")
    return FP8[name]


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
