"""ZeroAdamW: AdamW over FP32 master shards. ZeroMuon: Muon over FP32 masters of whole matrices,
AdamW over shards of the rest. The step itself is in `zero_optimizer.py`.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from zerocast.cast.captured_step import CapturedStep
from zerocast.distributed.bucket import Layout
from zerocast.distributed.group import GroupLike
from zerocast.distributed.lpt_assignment import MUON_DIMS, newton_schulz_flops
from zerocast.optim.config import Named, ZeroConfig
from zerocast.optim.flat_masters import FlatMasters
from zerocast.optim.update_rule import ADAMW, MUON, rule_of
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


logger = logging.getLogger(__name__)
# Further options of groups, with the defaults of torch.optim.Muon and of torch.optim.AdamW.
MUON_OPTIONS: Mapping[str, Any] = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "eps": 1e-7, "ns_steps": 5}
ADAM_OPTIONS: Mapping[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
# Padding that is a larger share of the matrices is logged.
LOGGED_PADDING = 1 / 4


class ZeroMuon(ZeroOptimizer):
    """Muon for the matrices of hidden layers, AdamW for the rest, over FP32 masters whose weights
    are cast, and gathered as bytes, after each step.

    Args:
        params: parameter groups whose "params" are (name, parameter) pairs, each of which says
            `"use_muon": True` or `"use_muon": False`. Muon takes matrices, QuantizedWeights or not,
            and stacks of them `[experts, m, n]`, each matrix by itself. Embeddings, heads, norms
            and biases are for AdamW.
        lr, weight_decay: the values of all groups that do not set them. momentum, nesterov,
        adjust_lr_fn: the values of Muon's groups, as in torch.optim.Muon, as are
            "ns_coefficients", "ns_steps" (5) and "eps" (1e-7), which groups may have. The rate of a
            matrix `[m, n]` is `lr * sqrt(max(1, m / n))` (None or "original", Jordan et al. 2024,
            https://kellerjordan.github.io/posts/muon/) or `0.2 * lr * sqrt(max(m, n))`
            ("match_rms_adamw", Liu et al. 2025, https://arxiv.org/abs/2502.16982), with which
            AdamW's rate and decay serve all groups. AdamW's groups may have "betas" and "eps".
        group, stage, config: as in ZeroAdamW. Momentum is FP32, or in 8 bits if `moment_dtype` is
            "8bit".

    torch.optim.Muon itself makes the update: momentum and decay in FP32, Newton-Schulz in bf16. It
    needs the full matrix, so one rank owns each weight. That rank has its masters and momentum and
    casts it, and other ranks get its bytes. Gradients are reduced as in ZeroAdamW, a part of each
    on every rank. A step sends the parts to the owners in FP32
    (`zerocast.optim.muon_step`). Weights are assigned to ranks so that memory and the work
    of Newton-Schulz are spread (`zerocast.distributed.lpt_assignment`). With fewer matrices than
    ranks some ranks own none, and buffers are padded, which is logged. AdamW's parameters are
    sharded as in ZeroAdamW. Since one rank orthogonalizes a matrix, any number of ranks gives the
    same bits for the same reduced gradients.

    A gradient that is not finite skips the step. Everything else is as in ZeroAdamW, except that a
    step cannot be captured in a CUDA graph: `capture` raises. Raises ValueError for a group without
    "use_muon", and for a parameter in a group of Muon's that is not a matrix.
    """

    NAME = "ZeroMuon"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: str | None = None,
        group: GroupLike = None,
        stage: int = 2,
        config: ZeroConfig | None = None,
    ) -> None:
        # As in torch, defaults have all options of the constructor. AdamW's groups also get Muon's
        # options, and do not use them.
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults, group, stage, config)

    def _with_rules(self, given: list[Any]) -> list[Any]:
        groups = []
        for number, group in enumerate(given, len(self.param_groups) if self._is_built else 0):
            if not isinstance(group, dict):
                raise ValueError(
                    "a ZeroMuon expects parameter groups that set use_muon, got parameters only: "
                    '[{"params": [(name, parameter), ...], "use_muon": True}, {"params": ..., "use_muon": False}]'
                )
            if not isinstance(group.get("use_muon"), bool):
                raise ValueError(
                    f"parameter group {number} of a ZeroMuon has use_muon={group.get('use_muon')}: set True for matrices of hidden "
                    "layers, False for embeddings, heads, norms and biases, which AdamW updates"
                )
            groups.append({**(MUON_OPTIONS if group["use_muon"] else ADAM_OPTIONS), **group})
        return groups

    def _check_parameters(self, named: list[Named]) -> None:
        for name, parameter, index in named:
            if rule_of(self.param_groups[index]) is MUON and parameter.dim() not in MUON_DIMS:
                raise ValueError(
                    f"{name} of shape {tuple(parameter.shape)} is in a group with use_muon=True, and Muon updates matrices [m, n] "
                    "and stacks of them [experts, m, n]: put it into a group with use_muon=False"
                )

    def _build(self, named: list[Named], layout: Layout, masters: FlatMasters) -> None:
        super()._build(named, layout, masters)
        buckets = [buffer.bucket for buffer in self._weights.buffers if buffer.bucket.storage.single_owner]
        slots = [slot for bucket in buckets for slot in bucket.slots]
        numel = sum(slot.numel for slot in slots)
        padding = sum(bucket.numel for bucket in buckets) - numel
        if padding > LOGGED_PADDING * numel and self._group.rank == 0:
            logger.warning(
                "the matrices of a ZeroMuon, %d elements in %d, need %d more elements of padding on every rank: equal parts for %d "
                "ranks, each of which owns whole matrices, are as large as the largest one",
                numel,
                len(slots),
                padding,
                self._group.size,
            )

    def _costs(self, named: list[Named]) -> dict[str, int]:
        groups = self.param_groups
        return {
            name: newton_schulz_flops(tuple(parameter.shape), groups[index]["ns_steps"])
            for name, parameter, index in named
            if rule_of(groups[index]) is MUON
        }

    def _adam_groups(self) -> list[dict[str, Any]]:
        return [{"betas": (0.0, 0.0), **group} for group in super()._adam_groups()]

    def _other_hyperparameters(self) -> str:
        groups = [group for group in self.param_groups if rule_of(group) is MUON]
        return "".join(f"; Muon with {', '.join(f'{name} {group[name]}' for name in MUON.others)}" for group in groups)

    def capture(self, max_norm: float | None = None) -> CapturedStep:
        """Raise RuntimeError. Muon's scalars are computed on the CPU, so a graph would repeat the
        scalars of its recording.
        """
        raise RuntimeError(
            "a step of a ZeroMuon cannot be captured, since Muon's learning rates are read on the CPU: call step()"
        )
