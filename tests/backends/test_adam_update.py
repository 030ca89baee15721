"""AdamW of the reference: that of zerocast/backends/README.md, operation by operation. Other backends: test_adam_stages.py."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.casts import F32, bit_patterns
from zerocast.backends.reference.adam import adamw

SIZE = 40_000


def scalars(step: int = 3) -> F32:
    """Three rows of (1-lr*wd, beta1, 1-beta1, beta2, 1-beta2, lr/c1, sqrt(c2), eps), each rounded once."""
    rows = []
    for lr, wd, beta1, beta2, eps in (
        (1e-3, 0.1, 0.9, 0.95, 1e-8),
        (3e-2, 0.0, 0.8, 0.999, 1e-6),
        (1.0, 0.5, 0.0, 0.5, 0.0),
    ):
        c1, c2 = 1 - beta1**step, 1 - beta2**step
        rows.append([1 - lr * wd, beta1, 1 - beta1, beta2, 1 - beta2, lr / c1, np.sqrt(c2), eps])
    return np.array(rows, np.float64).astype(np.float32)


def update(p: F32, g: F32, m: F32, v: F32, row: F32, clip: np.float32) -> tuple[F32, F32, F32]:
    """One f32 operation after the other, in the order of zerocast/backends/README.md."""
    decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, root_c2, eps = row
    with np.errstate(all="ignore"):
        g = g * clip
        p = p * decay
        m = beta1 * m + one_minus_beta1 * g
        v = beta2 * v + (one_minus_beta2 * g) * g
        p = p - step_size * (m / (np.sqrt(v) / root_c2 + eps))
    return p, m, v


def state(seed: int, wild: bool) -> list[F32]:
    """Master, gradient and moments: ordinary, or drawn by bit pattern."""
    rng = np.random.default_rng(seed)
    if wild:
        return [np.abs(x) if i == 3 else x for i, x in enumerate(bit_patterns(SIZE, seed + i) for i in range(4))]
    values = [rng.standard_normal(SIZE, np.float32) for _ in range(4)]
    return [values[0], (values[1] * 10.0 ** rng.integers(-20, 3)).astype(np.float32), values[2], values[3] ** 2]


def words(x: F32) -> NDArray[np.uint32]:
    """Bit patterns, with all NaN alike."""
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)


@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("clip", [1.0, 0.3])
def test_every_operation_in_order(wild: bool, clip: float, seed: int) -> None:
    p, g, m, v = state(seed, wild)
    tensors = torch.from_numpy(p), torch.from_numpy(g), torch.from_numpy(m), torch.from_numpy(v)
    for row in scalars():
        expected = update(p, g, m, v, row, np.float32(clip))
        found = adamw(*tensors, torch.from_numpy(row), torch.tensor([clip]))
        for name, a, b in zip(("master", "exp_avg", "exp_avg_sq"), found, expected, strict=True):
            assert np.array_equal(words(a.numpy()), words(b)), name


def test_near_torch_adamw(seed: int) -> None:
    """torch.optim.AdamW rounds in another order: the update agrees to a few units in the last place of master and update."""
    rng = np.random.default_rng(seed)
    start = torch.from_numpy(rng.standard_normal(1000, np.float32))
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    p, m, v = start.clone(), torch.zeros(1000), torch.zeros(1000)
    for step in range(1, 21):
        gradient = torch.from_numpy(rng.standard_normal(1000, np.float32))
        theirs.grad = gradient.clone()
        optimizer.step()
        p, m, v = adamw(p, gradient, m, v, torch.from_numpy(scalars(step))[0], torch.ones(1))
    bound = 20 * (2.0**-23 * theirs.detach().abs() + 8 * 2.0**-23 * 1e-3)
    assert ((p - theirs.detach()).abs() <= bound).all()
