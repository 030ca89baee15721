"""A TrainSpec with zerocast's optimizers, for `register_train_spec`."""

import dataclasses
from typing import Any

from . import host
from .optimizer import build_optimizers


def with_fused_optimizers(spec: Any) -> Any:
    """`spec`, whose optimizers may be those of `optimizer.implementation=zerocast`.

    ValueError for a spec whose optimizers are not torchtitan's plain ones, as those of mixtures of experts, which balance load.
    """
    found = spec.build_optimizers_fn
    if found is not host.build_optimizers:
        raise ValueError(
            f"this TrainSpec builds optimizers with {found.__module__}.{found.__qualname__}, whose work would be lost: zerocast's "
            f"take the place of {host.build_optimizers.__module__}.{host.build_optimizers.__qualname__}"
        )
    return dataclasses.replace(spec, build_optimizers_fn=build_optimizers)
