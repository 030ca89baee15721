"""TrainSpecs with zerocast's optimizers, and with weights prepared between slices and shards,
for `register_train_spec`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from zerocast import fsdp2

from . import host
from .optimizer import DelayedStates
from .parallelize import Parallelize


class FusedOptimizers(DelayedStates):
    """One FusedAdamW for each model part, with the state of torchtitan's AdamW under the same
    keys.
    """

    def __init__(self, model_parts: list[nn.Module], options: Mapping[str, Any]) -> None:
        super().__init__(model_parts, fsdp2.FusedAdamW, dict(options))
        self.leave_amaxes()


def build_optimizers(
    model_parts: list[nn.Module], optimizer_config: Any, parallel_dims: Any, ft_manager: Any = None
) -> Any:
    """Replaces torchtitan's `build_optimizers` and also takes `implementation="zerocast"`.

    ValueError for that with another optimizer than AdamW, with a step in the backward pass or with
    TorchFT.
    """
    if optimizer_config.implementation != "zerocast":
        return host.build_optimizers(model_parts, optimizer_config, parallel_dims, ft_manager)
    for wrong, what in (
        (optimizer_config.name != "AdamW", f"optimizer.name={optimizer_config.name}"),
        (optimizer_config.early_step_in_backward, "optimizer.early_step_in_backward"),
        (ft_manager is not None and ft_manager.enabled, "TorchFT"),
    ):
        if wrong:
            raise ValueError(
                f"optimizer.implementation=zerocast is an AdamW that steps after the backward pass, not with {what}"
            )
    options = {name: getattr(optimizer_config, name) for name in ("lr", "eps", "weight_decay")}
    return FusedOptimizers(model_parts, options | {"betas": (optimizer_config.beta1, optimizer_config.beta2)})


def with_fused_optimizers(spec: Any) -> Any:
    """`spec`, whose optimizers may be those of `optimizer.implementation=zerocast`.

    ValueError for a spec whose optimizers are not torchtitan's plain ones, as those of mixtures of
    experts, which balance load.
    """
    found = spec.build_optimizers_fn
    if found is not host.build_optimizers:
        raise ValueError(
            f"this TrainSpec builds optimizers with {found.__module__}.{found.__qualname__}, whose work would be lost: zerocast's "
            f"take the place of {host.build_optimizers.__module__}.{host.build_optimizers.__qualname__}"
        )
    return dataclasses.replace(spec, build_optimizers_fn=build_optimizers)


def with_tensor_parallelism(spec: Any) -> Any:
    """`spec`, whose weights may be quantized with `parallelism.tensor_parallel_degree` above 1.

    For a spec whose parallelize_fn asks `parallel_dims` what is enabled and slices before it
    shards, as those of torchtitan's language models do: it is called once for the one and once for
    the other.
    """
    return dataclasses.replace(spec, parallelize_fn=Parallelize(spec.parallelize_fn))
