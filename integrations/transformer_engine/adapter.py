"""Adapter: what zerocast must know of the tensors of one of TransformerEngine's quantizers, as data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zerocast.formats import FormatSpec

from .host import require


def nothing(of: Any) -> None:
    """For what needs nothing done."""


def always() -> bool:
    """For what does not depend on the GPU."""
    return True


def never(tensor: Any) -> bool:
    """For what no tensor is."""
    return False


@dataclass(frozen=True)
class Option:
    """An option of a quantizer or, with an underscore, of a tensor that must have one value where it exists."""

    name: str
    needed: Any
    reason: str

    def check(self, quantizer: Any, tensor: Any) -> None:
        """ValueError with the reason for another value."""
        for owner, name in ((quantizer, self.name), (tensor, f"_{self.name}")):
            value = getattr(owner, name, self.needed)
            if value != self.needed:
                raise ValueError(f"{name} is {value} and {self.needed} is needed: {self.reason}")


@dataclass(frozen=True)
class Adapter:
    """One format in TransformerEngine's terms.

    `format` makes a FormatSpec of a quantizer. `of_tensor` and `of_quantizer` say which attribute holds which buffer, by the
    names in `layout.BUFFERS`. `outdate` drops the columnwise copy, as automatic post-processing asks for, or marks it so that
    `outdated` is true; `copies` says whether this GPU needs one, `copied` is called with the tensors whose copies were made.
    `alone` is the reason for which a Hybrid tensor cannot hold one direction of the format; with `two_payloads` codes by columns
    are cast and gathered by themselves.
    """

    format: Callable[[Any], FormatSpec]
    of_tensor: Mapping[str, str]
    of_quantizer: Mapping[str, str] = field(default_factory=dict)
    options: tuple[Option, ...] = ()
    outdate: Callable[[Any], None] = nothing
    outdated: Callable[[Any], bool] = never
    copies: Callable[[], bool] = always
    copied: Callable[[Sequence[Any]], None] = nothing
    alone: str = ""
    two_payloads: bool = False

    def format_of(self, tensor: Any, quantizer: Any) -> FormatSpec:
        """The format of a tensor. ValueError with the reason where it is not cast, RuntimeError for another shape of the host."""
        require(tensor, self.of_tensor.values())
        require(quantizer, self.of_quantizer.values())
        self.check(tensor, quantizer)
        return self.format(quantizer)

    def check(self, tensor: Any, quantizer: Any) -> None:
        """ValueError with the reason for options that are not cast: at every call, since they may be set at any time."""
        for option in self.options:
            option.check(quantizer, tensor)
        stored, made = getattr(tensor, "_fp8_dtype", None), getattr(quantizer, "dtype", None)
        if stored is not None and made is not None and stored != made:
            names = [getattr(dtype, "name", str(dtype)) for dtype in (stored, made)]
            raise ValueError("its codes are {} and its quantizer makes {}".format(*names))

    def attribute(self, name: str) -> str:
        """What the host calls a buffer."""
        return self.of_tensor.get(name) or f"quantizer's {self.of_quantizer[name]}"

    def places(self, names: Iterable[str]) -> list[str]:
        """Buffers as attributes of a tensor, those of its quantizer dotted."""
        return [self.of_tensor.get(name) or f"_quantizer.{self.of_quantizer[name]}" for name in names]

    def checked(self, tensor: Any, quantizer: Any) -> list[str]:
        """What `check` looks at, as attributes of a tensor, those of its quantizer dotted."""
        options = [option.name for option in self.options]
        of_tensor = [name for name in ("_fp8_dtype", *(f"_{name}" for name in options)) if hasattr(tensor, name)]
        return of_tensor + [f"_quantizer.{name}" for name in ("dtype", *options) if hasattr(quantizer, name)]

    def buffers(self, tensor: Any, quantizer: Any) -> dict[str, Tensor | None]:
        """The buffers as they are now."""
        held = {name: getattr(tensor, attribute) for name, attribute in self.of_tensor.items()}
        return held | {name: getattr(quantizer, attribute) for name, attribute in self.of_quantizer.items()}
