"""FormatSpec: everything that distinguishes one weight format from another, as one frozen value.

The stages of every backend are written once against these fields; no stage compares the name of a
format. A FormatSpec never holds a tensor or a process group, so it hashes, compares, pickles and
can be traced.
"""

import enum
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerocast.formats.element import Element, torch_dtype

if TYPE_CHECKING:
    import torch

# (rows, columns) of a block of elements, or of a matrix.
Block = tuple[int, int]
# An E2M1 value times 2**n is an E4M3 number for every n from UPCAST_EXPONENT - SCALE_SPREAD to
# UPCAST_EXPONENT.
UPCAST_EXPONENT, SCALE_SPREAD = 6, 14


class ScaleRule(enum.IntEnum):
    """The rule that computes the scales of a weight from its amaxes (docs/formats)."""

    NONE = 0  # identity: no scale
    FP32 = 1  # fp8_max / amax, optionally floored to a power of two; FP32 scale_inv
    E8M0 = 2  # one biased-exponent byte per block, rounded up
    BF16 = 3  # the amax over the largest integer, as a bf16 number
    TWO_LEVEL = 4  # one E4M3 byte per block, and one FP32 scale from the tensor amax


class Columnwise(enum.IntEnum):
    """The source of the columnwise copy, which the input-gradient GEMM reads."""

    NONE = 0  # the rowwise buffer serves both directions
    TRANSPOSE = 1  # the same codes and scales, transposed after the all-gather
    OWN_GRID = 2  # codes in columnwise blocks, cast from the master; not transposed
    SHARED = 3  # the rowwise codes, with the scales of the same blocks in a columnwise buffer


class AmaxPolicy(enum.IntEnum):
    """The amax that scales this step's cast."""

    NONE = 0
    CURRENT = 1  # the amax of this step
    DELAYED = 2  # an amax of the history; this step's amax scales the next cast


@dataclass(frozen=True)
class FormatSpec:
    """A weight format as data. Build one with `zerocast.get_format`.

    Attributes:
        name: the name of the format, without its options.
        element: type of the codes; None stores values of the nominal dtype.
        scale_rule: how scales are computed from amaxes.
        columnwise: the source of the columnwise copy.
        amax_policy: the amax that scales a cast.
        block: (rows, columns) that share one rowwise scale; None for the whole tensor.
        columnwise_block: (rows, columns) that share one columnwise scale, for formats with separate
            columnwise blocks; None for other formats.
        scale_group: (rows, columns) in which every E8M0 scale is at least 2**-SCALE_SPREAD of the
            largest; None if scales are independent.
        scale_rounding: the rounding of the exponent of E8M0 scales, "up" or "floor".
        exact_scales: True if the tensor scale of two-level scales is a bf16 number, and the scales
            of blocks have the mantissas 1, 1.25 and 1.5 only, so that E4M3 holds their products
            with every code.
        multiple: (rows, columns) of a weight must be divisible by it.
        power_of_2_scale: True if FP32 scales are rounded down to a power of two.
        amax_epsilon: lower bound of the amaxes that scales are computed from.
        margin: delayed scaling leaves 2**-margin of headroom.
        amax_history_len: the number of past amaxes that delayed scaling keeps.
        amax_compute_algo: the amax that delayed scaling takes, "max" of the history or
            "most_recent".
        key: the text that builds this format, as `str()` returns it.
    """

    name: str
    element: Element | None
    scale_rule: ScaleRule
    columnwise: Columnwise
    amax_policy: AmaxPolicy
    block: Block | None = None
    columnwise_block: Block | None = None
    scale_group: Block | None = None
    scale_rounding: str = "up"
    exact_scales: bool = False
    multiple: Block = (1, 1)
    power_of_2_scale: bool = False
    amax_epsilon: float = 0.0
    margin: int = 0
    amax_history_len: int = 0
    amax_compute_algo: str = "max"
    key: str = field(default="", compare=False)

    def __deepcopy__(self, memo: Any) -> "FormatSpec":
        """Return itself, which never changes. torch.compile copies the objects that a graph depends
        on and compares them at each call, which is much slower for equal objects than for the same
        object.
        """
        return self

    def __str__(self) -> str:
        return self.key or self.name

    @property
    def bits(self) -> int | None:
        """Width of a code in bits; None if values of the nominal dtype are stored."""
        return self.element.bits if self.element else None

    @property
    def elements_per_byte(self) -> int:
        """Codes per byte: 2 for 4-bit codes, else 1."""
        return 2 if self.bits == 4 else 1

    @property
    def exchange_block(self) -> Block | None:
        """(rows, columns) of the blocks that determine rowwise scales; None for the whole tensor.

        If such a block straddles a shard boundary, the ranks reduce its amaxes. A slice of tensor
        parallelism consists of complete blocks.
        """
        return self.scale_group or self.block

    @property
    def casts_in_one_pass(self) -> bool:
        """True if the stage `adam_cast` takes the format: a scale depends only on the elements of
        its exchange block, and there is one set of codes.
        """
        local = self.amax_policy is AmaxPolicy.CURRENT and self.scale_rule in (ScaleRule.FP32, ScaleRule.E8M0)
        return local and self.block is not None and self.columnwise is not Columnwise.OWN_GRID

    @property
    def casts_columnwise(self) -> bool:
        """True if columnwise codes are cast from the master and gathered, like rowwise codes."""
        return self.columnwise is Columnwise.OWN_GRID

    @property
    def is_exact_in_fp8(self) -> bool:
        """True if the stage `upcast` turns the codes into E4M3 codes of the same values."""
        return self.exact_scales or self.scale_group is not None

    def scale_repeat(self, columnwise: bool = False) -> Block:
        """Return the (rows, columns) of entries of a scale buffer that hold the same scale.

        Tensor cores read byte scales per 1x16, 1x32 or 32x1 elements, so the scale of a larger
        block is repeated.
        """
        if self.block is None or self.scale_rule in (ScaleRule.FP32, ScaleRule.BF16):
            return 1, 1
        if not columnwise:
            return self.block[0], 1
        if self.columnwise is Columnwise.TRANSPOSE:
            return self.block[1], 1
        return 1, (self.columnwise_block or self.block)[1]

    @property
    def scale_dtype_name(self) -> str:
        """The name of the dtype of the entries of scale buffers. A byte is an E8M0 or an E4M3
        code.
        """
        return {ScaleRule.FP32: "float32", ScaleRule.BF16: "bfloat16"}.get(self.scale_rule, "uint8")

    @property
    def scale_dtype(self) -> "torch.dtype":
        """The dtype of the entries of scale buffers."""
        return torch_dtype(self.scale_dtype_name)

    @property
    def has_tensor_scale(self) -> bool:
        """True if one FP32 scale serves the whole tensor."""
        return self.scale_rule is ScaleRule.FP32 and self.block is None

    @property
    def has_tensor_amax(self) -> bool:
        """True if `QuantizedWeight.amax` exists, which per-tensor and two-level scales need."""
        return self.scale_rule is ScaleRule.TWO_LEVEL or (
            self.amax_policy is not AmaxPolicy.NONE and self.block is None
        )


def option_key(build: Callable[..., FormatSpec], name: str, options: dict[str, Any]) -> str:
    """Return the canonical text of a format: its name, then the options that differ from their
    defaults.

    `get_format` reads this text back, so ops and checkpoints carry a format as a string.
    """
    defaults = {p.name: p.default for p in inspect.signature(build).parameters.values()}
    changed = [f"{key}={value}" for key, value in sorted(options.items()) if value != defaults[key]]
    return ":".join([name, ",".join(changed)]) if changed else name
