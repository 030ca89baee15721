"""A model's own parallelize_fn, with the weights prepared between tensor parallelism and FSDP2.

A weight has to be prepared after it was sliced and before it is sharded. torchtitan's functions do
both in one call: tensor and context parallelism, then activation checkpointing, compilation and
FSDP2.

* `Parallelize`, for a TrainSpec: the function skips each step that `parallel_dims` does not enable.
  It is called twice, first with the steps before the preparation enabled and then with the others.
* `prepare_between`, for a ModelSpec: the function gets a policy of activation checkpointing, and
  calls its `build` between the two. A policy that prepares the weights in `build` is passed to it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .section import NAME, Zerocast, prepare_model

# The kinds of parallelism that are applied before the weights are prepared.
FIRST = ("tp", "cp")


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
        self._parallel_dims, self._first = parallel_dims, first

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._parallel_dims, name)
        if name.endswith("_enabled"):
            return value and (name.removesuffix("_enabled") in FIRST) is self._first
        return value


def prepare_between(parallelize_fn: Any, section: Zerocast) -> Any:
    """Wrap `parallelize_fn` of a ModelSpec: it prepares the weights that the section's recipe
    matches.

    The wrapped function raises as `prepare_model` does, and RuntimeError if `parallelize_fn` builds
    no policy of activation checkpointing, as flux's. Slices that divide a block raise at the first
    gather.
    """

    def parallelize(model: nn.Module, *, parallel_dims: Any, ac_config: Any, **given: Any) -> nn.Module:
        policy = _PreparingPolicy(ac_config, lambda: prepare_model(model, section, _mesh_of_slices(parallel_dims)))
        sharded: nn.Module = parallelize_fn(model, parallel_dims=parallel_dims, ac_config=policy, **given)
        if not policy.has_prepared:
            raise RuntimeError(
                f"{parallelize_fn.__module__}.{parallelize_fn.__qualname__} builds no activation checkpointing from its "
                "configuration between slices and shards, which is when zerocast prepares weights: call "
                "zerocast.fsdp2.prepare in your own parallelize_fn"
            )
        return sharded

    return parallelize


class _PreparingPolicy:
    """Replaces the configuration of activation checkpointing, which may be None.

    Attributes:
        has_prepared: True once `build` was called and the weights are prepared.
    """

    def __init__(self, ac_config: Any, prepare: Callable[[], None]) -> None:
        self._ac_config = ac_config
        self._prepare = prepare
        self.has_prepared = False

    def build(self, **given: Any) -> Any:
        self._prepare()
        self.has_prepared = True
        return self if self._ac_config is None else self._ac_config.build(**given)

    def apply(self, model: nn.Module) -> None:
        """Do nothing: without a configuration no activation is recomputed."""


def _mesh_of_slices(parallel_dims: Any) -> DeviceMesh | None:
    """Return the mesh of all ranks with parts of one weight; None without tensor parallelism."""
    if parallel_dims.tp == 1:
        return None
    axes = ["fsdp", "tp"] if parallel_dims.spmd_backend == "partial_dtensor" else ["dp_shard", "cp", "tp"]
    mesh: DeviceMesh = parallel_dims.get_activated_mesh(axes)._flatten("zerocast_slices")
    return mesh
