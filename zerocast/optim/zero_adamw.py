"""ZeroAdamW: AdamW over FP32 master shards; the step itself is in `zero_optimizer.py`."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from zerocast.distributed.group import GroupLike
from zerocast.optim.config import ZeroConfig
from zerocast.optim.update_rule import ADAMW, rule_of
from zerocast.optim.zero_optimizer import ZeroOptimizer


class ZeroAdamW(ZeroOptimizer):
    """AdamW that owns FP32 masters and moments in flat buckets, sharded over `group`.

    Args:
        params: `model.named_parameters()`, or parameter groups whose "params" are (name, parameter)
            pairs. QuantizedWeights, bf16, fp16 and fp32 parameters may be mixed. All are on one
            device. Parameters that need no gradient or are empty are left out.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW. Each parameter group may have its own
            values, and schedulers may change them.
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group, or for
            one process if there is none.
        stage: 2 frees this rank's gradients as they are reduced. 1 keeps them, and reduces the sum
            of several backward passes.
        config: how to communicate.

    Gradients are averaged over the ranks, and the gradient of a parameter without one counts as
    zero. All ranks start from rank 0's initial values. Frozen parameters are not broadcast, nor
    are, in a model that `quantize_` has changed, buffers and parameters that the optimizer was not
    given: if they differ between ranks, this is logged once.

    If one ZeroAdamW or ZeroMuon is built over parameters of another, it takes ownership of them,
    and the older one raises before it would write weights. `add_param_group` adds parameter groups
    between steps.

    Raises on every rank if on any: ValueError for a name that occurs twice, values out of range and
    settings that differ between ranks; TypeError for parameters without names; RuntimeError for a
    QuantizedWeight that was never cast, or that another owner writes, such as an attached CastPlan.
    """

    NAME = "ZeroAdamW"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        group: GroupLike = None,
        stage: int = 2,
        config: ZeroConfig | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, group, stage, config)

    def _with_rules(self, given: list[Any]) -> list[Any]:
        for group in given:
            if isinstance(group, dict) and rule_of(group) is not ADAMW:
                raise ValueError(
                    "use_muon=True in a parameter group of a ZeroAdamW: use zerocast.ZeroMuon for such groups"
                )
        return given
