"""The scalars of an AdamW step, on the device: one row a parameter group, each rounded once to f32."""

from typing import Any

import torch
from torch import Tensor


def scalars(param_groups: list[dict[str, Any]], step: Tensor) -> Tensor:
    """f32 `[groups, 8]` for step number `step` (int64[1], counted from 1), in the order of `zerocast/backends/README.md`.

    Bias corrections are taken in f64 on the device, so a skipped step needs no host synchronisation.
    """
    t = step.double()
    rows = []
    for group in param_groups:
        beta1, beta2 = group["betas"]
        c1, c2 = 1 - torch.pow(beta1, t), 1 - torch.pow(beta2, t)
        lr = group["lr"].to(t).view(1) if isinstance(group["lr"], Tensor) else torch.full_like(t, group["lr"])
        ones = torch.ones_like(t)
        rows.append(
            torch.cat(
                [
                    1 - lr * group["weight_decay"],
                    ones * beta1,
                    ones * (1 - beta1),
                    ones * beta2,
                    ones * (1 - beta2),
                    lr / c1,
                    c2.sqrt(),
                    ones * group["eps"],
                ]
            )
        )
    return torch.stack(rows).float()
