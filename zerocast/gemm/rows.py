"""Products of matrices for inputs of any number of dimensions."""

from collections.abc import Callable

from torch import Tensor


def over_rows(product: Callable[[Tensor], Tensor], x: Tensor, features: int) -> Tensor:
    """`product` of `x [..., k]` seen as `[rows, k]`, as `[..., features]`.

    An input without rows is not multiplied: it has no amax.
    """
    rows = x.reshape(-1, x.shape[-1])
    y = product(rows) if rows.shape[0] else x.new_empty(0, features)
    return y.view(*x.shape[:-1], features)
