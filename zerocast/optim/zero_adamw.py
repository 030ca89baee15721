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
            pairs. QuantizedWeights, bf16, fp16 and fp32 parameters in any mix, on one device;
            parameters that need no gradient or are empty are left out.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; each parameter group may have its
            own, schedulers may change them.
        group: ProcessGroup, one-dimensional DeviceMesh, or None for the default group, or one
            process without any.
        stage: 2 frees the gradients of this rank as they are reduced; 1 keeps them, and reduces the
            sum of several backward passes.
        config: how to communicate.

    Gradients are averaged over the ranks; a parameter without one counts as zero. Rank 0's initial
    values are everyone's; of what it does not train (frozen parameters; in a model that `quantize_`
    has changed also buffers, and parameters that it was not given) it logs once where ranks have
    others. Raises ValueError for doubly named parameters, for values out of range
    and for settings that differ between ranks, TypeError for unnamed parameters, RuntimeError for a
    QuantizedWeight that was never cast and for one that another owner writes, such as an attached
    CastPlan, on every rank if on any. The last ZeroAdamW or ZeroMuon that is built over a parameter
    takes it over; the one before raises at whatever would write weights. More parameter groups can
    be added between steps (`add_param_group`).
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
                    "use_muon=True in a parameter group of a ZeroAdamW: zerocast.ZeroMuon takes such groups"
                )
        return given
