"""Parallelize: a model's own parallelize_fn in two passes, with the weights prepared between tensor
parallelism and FSDP2.

A weight is prepared after it was sliced and before it is sharded. torchtitan's functions do both in
one go: tensor and context parallelism, then activation checkpointing, compilation and FSDP2, each
where `parallel_dims` says that it is enabled. Called twice, with some of it enabled each time, they
do the same in the same order.
"""

import dataclasses
from typing import Any

from torch import nn

from .section import NAME, prepare_model

FIRST = ("tp", "cp")  # what comes before the weights are prepared


class Parallelize:
    """Stands for `parallelize_fn` of a TrainSpec, and differs from it with tensor parallelism
    and zerocast's converter alone.
    """

    prepares_slices = True

    def __init__(self, parallelize_fn: Any) -> None:
        self._parallelize_fn = parallelize_fn

    def __call__(self, model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
        """As torchtitan calls it. Raises as `prepare_model`; slices of parts of blocks raise at
        the first gather.
        """
        if parallel_dims.tp == 1 or NAME not in job_config.model.converters:
            whole: nn.Module = self._parallelize_fn(model, parallel_dims, job_config)
            return whole
        bare = dataclasses.replace(
            job_config,
            activation_checkpoint=dataclasses.replace(job_config.activation_checkpoint, mode="none"),
            compile=dataclasses.replace(job_config.compile, enable=False),
        )
        model = self._parallelize_fn(model, _Enabled(parallel_dims, first=True), bare)
        slices = parallel_dims.get_mesh(["fsdp", "tp"])._flatten("zerocast_slices")
        prepare_model(model, job_config.quantize.linear.zerocast, slices)
        sharded: nn.Module = self._parallelize_fn(model, _Enabled(parallel_dims, first=False), job_config)
        return sharded


class _Enabled:
    """`parallel_dims`, of which only what belongs to one pass is enabled; its sizes and meshes
    are what they are.
    """

    def __init__(self, parallel_dims: Any, first: bool) -> None:
        self._parallel_dims, self._first = parallel_dims, first

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._parallel_dims, name)
        if name.endswith("_enabled"):
            return value and (name.removesuffix("_enabled") in FIRST) is self._first
        return value
