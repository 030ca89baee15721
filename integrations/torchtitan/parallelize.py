"""A model's own parallelize_fn, with the weights prepared between tensor parallelism and FSDP2.

A weight is prepared after it was sliced and before it is sharded. torchtitan's functions do both in
one go: tensor and context parallelism, then activation checkpointing, compilation and FSDP2.

* `Parallelize`, for a TrainSpec: each step is taken where `parallel_dims` says that it is enabled,
  so that two calls, with some of it enabled each time, do the same in the same order.
* `prepare_between`, for a ModelSpec: activation checkpointing is a policy, which the function is
  given and builds once weights are sliced. Weights are prepared when it does.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .section import NAME, Zerocast, prepare_model

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


def prepare_between(parallelize_fn: Any, section: Zerocast) -> Any:
    """`parallelize_fn` of a ModelSpec, with the weights prepared that the section's recipe matches.

    As torchtitan calls it, and raises as `prepare_model`; RuntimeError for a function that builds
    no policy of activation checkpointing, as flux's. Slices of parts of blocks raise at the first
    gather.
    """

    def parallelize(model: nn.Module, *, parallel_dims: Any, ac_config: Any, **given: Any) -> nn.Module:
        policy = _PreparingPolicy(ac_config, lambda: prepare_model(model, section, _mesh_of_slices(parallel_dims)))
        sharded: nn.Module = parallelize_fn(model, parallel_dims=parallel_dims, ac_config=policy, **given)
        if not policy.has_prepared:
            raise RuntimeError(
                f"{parallelize_fn.__module__}.{parallelize_fn.__qualname__} builds no activation checkpointing from its "
                "configuration between slices and shards, which is when zerocast prepares weights: call "
                "zerocast.fsdp2.prepare in a parallelize_fn of your own"
            )
        return sharded

    return parallelize


class _PreparingPolicy:
    """Stands for the configuration of activation checkpointing, or for None."""

    def __init__(self, ac_config: Any, prepare: Callable[[], None]) -> None:
        self._ac_config, self._prepare, self.has_prepared = ac_config, prepare, False

    def build(self, **given: Any) -> Any:
        self._prepare()
        self.has_prepared = True
        return self if self._ac_config is None else self._ac_config.build(**given)

    def apply(self, model: nn.Module) -> None:
        """Nothing is recomputed without a configuration."""


def _mesh_of_slices(parallel_dims: Any) -> DeviceMesh | None:
    """All ranks that hold parts of one weight, where tensor parallelism slices it."""
    if parallel_dims.tp == 1:
        return None
    axes = ["fsdp", "tp"] if parallel_dims.spmd_backend == "partial_dtensor" else ["dp_shard", "cp", "tp"]
    mesh: DeviceMesh = parallel_dims.get_activated_mesh(axes)._flatten("zerocast_slices")
    return mesh
