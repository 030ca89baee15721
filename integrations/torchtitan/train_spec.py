"""The extensions of torchtitan up to 0.2: the model converter, and TrainSpecs with zerocast's
optimizers and with weights prepared between slices and shards.

torchtitan builds a model on the meta device, lets converters change it, then wraps blocks for
activation checkpointing, compiles and shards them, and finally allocates and initializes the
parameters. `zerocast.fsdp2.prepare` has to come before `fully_shard`, so the converter calls it.
With tensor parallelism weights are sliced first, and prepared after that (`parallelize.py`). A step
of any torch optimizer marks a cast as due, and the next forward pass begins with it. So
torchtitan's hook after the step does nothing.
"""

import dataclasses
from typing import Any

from torch import nn

from . import host
from .optimizer import build_optimizers
from .parallelize import Parallelize
from .section import prepare_model, recipe_of
from .validate import validate_job

_Converter: Any = host.QuantizationConverter


class MasterWeightConverter(_Converter):  # type: ignore[misc]
    """`quantize.linear.zerocast` of `model.converters`.

    Raises, on every rank: RuntimeError for a JobConfig without the section of that name, ValueError
    for an option of torchtitan that is not supported, with the reason, and for a recipe that cannot
    be read.
    """

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        # A seed checkpoint is written by one rank, which shards nothing, and has only the masters.
        self.enabled = not job_config.checkpoint.create_seed_checkpoint
        self._sliced = parallel_dims.tp > 1
        if not self.enabled:
            return
        validate_job(job_config, parallel_dims)
        super().__init__(job_config, parallel_dims)
        self._section = job_config.quantize.linear.zerocast
        recipe_of(self._section)

    def convert(self, model: nn.Module) -> None:
        """Make FP32 masters of the weights that the recipe matches. Raises as `prepare_model`."""
        if self.enabled and not self._sliced:
            prepare_model(model, self._section)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Do nothing: the optimizer's step has marked a cast as due."""


def with_fused_optimizers(spec: Any) -> Any:
    """Return a copy of `spec` that knows `optimizer.implementation=zerocast`.

    Raises ValueError for a spec with other optimizers than torchtitan's plain ones, such as
    optimizers for mixtures of experts, which also balance load.
    """
    build = spec.build_optimizers_fn
    if build is not host.build_optimizers:
        raise ValueError(
            f"this TrainSpec builds optimizers with {build.__module__}.{build.__qualname__}, whose work would be lost: zerocast's "
            f"take the place of {host.build_optimizers.__module__}.{host.build_optimizers.__qualname__}"
        )
    return dataclasses.replace(spec, build_optimizers_fn=build_optimizers)


def with_tensor_parallelism(spec: Any) -> Any:
    """Return a copy of `spec` whose weights may be quantized with a tensor_parallel_degree above 1.

    Its parallelize_fn must read from `parallel_dims` which steps are enabled, and slice before it
    shards, as in torchtitan's language models: it is called once to slice and once to shard.
    """
    return dataclasses.replace(spec, parallelize_fn=Parallelize(spec.parallelize_fn))
