"""The update of stage adam_amax: that of zerocast/backends/README.md, operation by operation, on every backend."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests import devices
from tests.backends import stages
from tests.casts import F32, bit_patterns
from zerocast import get_format

FORMAT = get_format("fp8_current")

# (first element, elements, row of scalars) of the weights in one flat tensor
SEGMENTS = [(7, 1, 0), (8, 40_000, 1), (40_009, 0, 0), (40_010, 333, 2), (40_400, 70_001, 0)]
SIZE = 110_500


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
    return [values[0], values[1] * 10.0 ** rng.integers(-20, 3), values[2], values[3] ** 2]


def arguments(state: list[Tensor], rows: F32, clip: float, segments: list[tuple[int, int, int]]) -> tuple[Any, ...]:
    """Those of the stage behind its format, for weights of one row."""
    table = stages.table(
        *(
            stages.row(
                rows=1, columns=max(1, numel), start=0, numel=numel, master_base=0, master_offset=offset, row_amax=0
            )
            for offset, numel, _ in segments
        )
    )
    groups = torch.tensor([group for _, _, group in segments])
    flats = ([flat] for flat in state)
    return torch.float32, *flats, table, groups, torch.from_numpy(rows), torch.tensor([clip]), torch.zeros(1)


def run(
    backend: str,
    arrays: list[F32],
    dtype: torch.dtype,
    clip: float,
    skip: Tensor | None = None,
    moment: torch.dtype = torch.float32,
) -> list[F32]:
    p, g, m, v = (torch.from_numpy(x.copy()) for x in arrays)
    m, v = m.to(moment), v.to(moment)
    given = arguments([p, g.to(dtype), m, v], scalars(), clip, SEGMENTS)
    devices.stage(backend, "adam_amax")(FORMAT, *given, skip)
    return [t.float().numpy() for t in (p, m, v)]


def words(x: F32) -> NDArray[np.uint32]:
    """Bit patterns, with all NaN alike."""
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)


def rounded(x: F32, dtype: torch.dtype) -> F32:
    """What a tensor of this dtype keeps of f32 values."""
    return torch.from_numpy(x).to(dtype).float().numpy()


@pytest.mark.long_interpreted
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [1.0, 0.3])
def test_every_operation_in_order(
    any_backend: str, wild: bool, dtype: torch.dtype, moment: torch.dtype, clip: float, seed: int
) -> None:
    """A bf16 moment is rounded when it is stored, after the master was updated with it."""
    p, g, m, v = arrays = state(seed, wild)
    found = run(any_backend, arrays, dtype, clip, moment=moment)
    g, m, v = rounded(g, dtype), rounded(m, moment), rounded(v, moment)
    expected = [p.copy(), m.copy(), v.copy()]
    for offset, numel, group in SEGMENTS:
        s = slice(offset, offset + numel)
        new_p, new_m, new_v = update(p[s], g[s], m[s], v[s], scalars()[group], np.float32(clip))
        new = new_p, rounded(new_m, moment), rounded(new_v, moment)
        for whole, part in zip(expected, new, strict=True):
            whole[s] = part
    for name, a, b in zip(("master", "exp_avg", "exp_avg_sq"), found, expected, strict=True):
        assert np.array_equal(words(a), words(b)), name


def test_skip(any_backend: str, seed: int) -> None:
    arrays = state(seed, wild=False)
    left = run(any_backend, arrays, torch.float32, 1.0, torch.tensor([True]))
    assert all(np.array_equal(a, b) for a, b in zip(left, (arrays[0], *arrays[2:]), strict=True))
    made = run(any_backend, arrays, torch.float32, 1.0, torch.tensor([False]))
    assert all(np.array_equal(a, b) for a, b in zip(made, run(any_backend, arrays, torch.float32, 1.0), strict=True))


def test_near_torch_adamw(any_backend: str, seed: int) -> None:
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
        given = arguments([p, gradient, m, v], scalars(step), 1.0, [(0, 1000, 0)])
        devices.stage(any_backend, "adam_amax")(FORMAT, *given, None)
    bound = 20 * (2.0**-23 * theirs.detach().abs() + 8 * 2.0**-23 * 1e-3)
    assert ((p - theirs.detach()).abs() <= bound).all()
