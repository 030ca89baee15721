"""The order in which Blackwell's tensor cores read block scales (cuBLAS documentation, "1D Block
Scaling Factors Layout").
"""

from typing import Any

from torch import Tensor

from zerocast.formats import Columnwise


def swizzle(scales: Tensor) -> Tensor:
    """Scales `[R, C]`, padded to R % 128 == 0 and C % 4 == 0, as the flat tensor that a GEMM takes.

    Element (i, j) goes to `((i/128)*(C/4) + j/4)*512 + (i%32)*16 + ((i%128)/32)*4 + j%4`: tiles of
    128x4 one after another, and in a tile the 4 scales of row i beside those of rows i+32, i+64 and
    i+96.
    """
    rows, columns = scales.shape
    tiles = scales.view(rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def of_weight(weight: Any, columnwise: bool) -> Tensor:
    """The swizzled scales of one direction of a weight, made at its first product after a cast and
    kept until the next.

    The scales of columnwise codes that are not transposed lie as the transpose of what their
    product reads.
    """
    _, scale_inv = weight.direction(columnwise)
    turned = columnwise and weight.format.columnwise is not Columnwise.TRANSPOSE
    made: Tensor = weight.cached_per_cast(
        ("swizzled", columnwise), lambda: swizzle(scale_inv.t().contiguous() if turned else scale_inv)
    )
    return made
