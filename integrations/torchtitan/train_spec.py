"""The extensions of torchtitan up to 0.2: the model converter, and TrainSpecs with zerocast's
optimizers and with weights prepared between slices and shards.

torchtitan builds a model on the meta device, lets converters change it, then wraps blocks for
activation checkpointing, compiles and shards them, and finally allocates and initializes the
parameters. `zerocast.fsdp2.prepare` has to come before `fully_shard`, so the converter calls it.
A step of any torch optimizer marks a cast as due, and the next forward pass begins with it. So
torchtitan's hook after the step does nothing.

With tensor parallelism a weight has to be prepared after it was sliced and before it is sharded. A
model's parallelize_fn does both in one call: tensor and context parallelism, then activation
checkpointing, compilation and FSDP2. It skips each step that `parallel_dims` does not enable, so
`Parallelize` calls it twice, first with the steps before the preparation enabled and then with the
others.
"""

import dataclasses
from typing import Any

from torch import nn

from zerocast.integrations import overrides

from . import host
from .optimizer import build_optimizers
from .section import NAME, prepare_model, recipe_of
from .validate import validate_job

_Converter: Any = host.QuantizationConverter

# The kinds of parallelism that are applied before the weights are prepared.
FIRST = ("tp", "cp")


@overrides()
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


class Parallelize:
    """Replaces `parallelize_fn` of a TrainSpec. It calls that unchanged unless a job has tensor
    parallelism and zerocast's converter.
    """

    prepares_slices = True

    def __init__(self, parallelize_fn: Any) -> None:
        self._parallelize_fn = parallelize_fn

    def __call__(self, model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
        """Slice, prepare and shard the model. Raises as `prepare_model`; slices that divide a block
        raise at the first gather.
        """
        if parallel_dims.tp == 1 or NAME not in job_config.model.converters:
            parallelized: nn.Module = self._parallelize_fn(model, parallel_dims, job_config)
            return parallelized
        # The first call slices only. These two steps are not part of `parallel_dims`.
        slicing_only = dataclasses.replace(
            job_config,
            activation_checkpoint=dataclasses.replace(job_config.activation_checkpoint, mode="none"),
            compile=dataclasses.replace(job_config.compile, enable=False),
        )
        model = self._parallelize_fn(model, _Enabled(parallel_dims, first=True), slicing_only)
        slices = parallel_dims.get_mesh(["fsdp", "tp"])._flatten("zerocast_slices")
        prepare_model(model, job_config.quantize.linear.zerocast, slices)
        sharded: nn.Module = self._parallelize_fn(model, _Enabled(parallel_dims, first=False), job_config)
        return sharded


class _Enabled:
    """`parallel_dims` with only the steps of one of the two calls enabled. Sizes and meshes are
    unchanged.
    """

    def __init__(self, parallel_dims: Any, first: bool) -> None:
        self._parallel_dims = parallel_dims
        self._first = first

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._parallel_dims, name)
        if name.endswith("_enabled"):
            return value and (name.removesuffix("_enabled") in FIRST) is self._first
        return value
