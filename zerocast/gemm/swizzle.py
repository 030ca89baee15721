"""Swizzle block scales: put them into the order in which Blackwell's tensor cores read them (cuBLAS
documentation, "1D Block Scaling Factors Layout").
"""

from typing import Any

from torch import Tensor

from zerocast.formats import Columnwise


def swizzle(scales: Tensor) -> Tensor:
    """Return the scales `[R, C]`, padded to R % 128 == 0 and C % 4 == 0, as the flat tensor that a
    GEMM takes.

    Element (i, j) goes to `((i/128)*(C/4) + j/4)*512 + (i%32)*16 + ((i%128)/32)*4 + j%4`. So tiles
    of 128x4 follow each other, and in a tile the 4 scales of row i are followed by those of rows
    i+32, i+64 and i+96.
    """
    rows, columns = scales.shape
    tiles = scales.view(rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def of_weight(weight: Any, columnwise: bool) -> Tensor:
    """Return the swizzled scales of one direction of a weight, made at its first product after a
    cast and kept until the next cast.
    """
    _, scale_inv = weight.direction(columnwise)
    # Columnwise codes that are not a transpose keep the layout [M, K], and so do their scales. The
    # product reads the scales along its inner dimension, so they are transposed here.
    needs_transpose = columnwise and weight.format.columnwise is not Columnwise.TRANSPOSE
    swizzled: Tensor = weight.cached_per_cast(
        ("swizzled", columnwise), lambda: swizzle(scale_inv.t().contiguous() if needs_transpose else scale_inv)
    )
    return swizzled
