"""Stage adam_step: AdamW on flat shards, each line one f32 operation an element (design: "One ZeRO step")."""

from torch import Tensor


def adam_step(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    segments: Tensor,
    scalars: Tensor,
    clip: Tensor,
    skip: Tensor | None,
) -> None:
    """Run Adam over the segments of one flat shard: masters and moments in place."""
    if skip is not None and bool(skip):
        return
    for offset, numel, group in segments.tolist():
        s = slice(offset, offset + numel)
        p, m, v = adamw(master[s], grad[s].float(), exp_avg[s].float(), exp_avg_sq[s].float(), scalars[group], clip)
        master[s], exp_avg[s], exp_avg_sq[s] = p, m, v  # bf16 moments are rounded here


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, scalars: Tensor, clip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The update as a pure function of f32 tensors; returns the new (p, m, v)."""
    decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, root_c2, eps = scalars.unbind()
    g = g * clip
    p = p * decay
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + (one_minus_beta2 * g) * g
    p = p - step_size * (m / (_sqrt(v) / root_c2 + eps))
    return p, m, v


def _sqrt(x: Tensor) -> Tensor:
    """Correctly rounded f32 square root; torch.sqrt on the CPU is off by one ulp for one number in six."""
    return x.double().sqrt().float()
