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
    for is_set, setting in (
        (optimizer_config.name != "AdamW", f"optimizer.name={optimizer_config.name}"),
        (optimizer_config.early_step_in_backward, "optimizer.early_step_in_backward"),
        (ft_manager is not None and ft_manager.enabled, "TorchFT"),
    ):
        if is_set:
            raise ValueError(
                f"optimizer.implementation=zerocast is an AdamW that steps after the backward pass, not with {setting}"
            )
    options = {name: getattr(optimizer_config, name) for name in ("lr", "eps", "weight_decay")}
    return FusedOptimizers(model_parts, options | {"betas": (optimizer_config.beta1, optimizer_config.beta2)})


def with_fused_optimizers(spec: Any) -> Any:
    """A copy of `spec` that knows `optimizer.implementation=zerocast`.

    ValueError for a spec with other optimizers than torchtitan's plain ones, such as those of
    mixtures of experts, which also balance load.
    """
    build = spec.build_optimizers_fn
    if build is not host.build_optimizers:
        raise ValueError(
            f"this TrainSpec builds optimizers with {build.__module__}.{build.__qualname__}, whose work would be lost: zerocast's "
            f"take the place of {host.build_optimizers.__module__}.{host.build_optimizers.__qualname__}"
        )
    return dataclasses.replace(spec, build_optimizers_fn=build_optimizers)


def with_tensor_parallelism(spec: Any) -> Any:
    """A copy of `spec` whose weights may be quantized with a tensor_parallel_degree above 1.

    Its parallelize_fn must read from `parallel_dims` which steps are enabled, and slice before it
    shards, as those of torchtitan's language models do: it is called once to slice and once to
    shard.
    """
    return dataclasses.replace(spec, parallelize_fn=Parallelize(spec.parallelize_fn))
