"""TrainSpecs with zerocast's optimizers, and with weights prepared between slices and shards,
for `register_train_spec`.
"""

import dataclasses
from typing import Any

from . import host
from .optimizer import build_optimizers
from .parallelize import Parallelize


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
