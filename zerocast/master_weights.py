"""The two calls that an optimizer makes after its step, with the names and arguments of
TransformerEngine.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zerocast import backends
from zerocast.cast.columnwise import ColumnwiseCopies
from zerocast.cast.partition import ShardData
from zerocast.cast.plan import CastPlan
from zerocast.distributed.group import GroupLike
from zerocast.weight import QuantizedWeight


def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: GroupLike = None,
    fsdp_shard_model_weights: Sequence[ShardData | None] | None = None,
    manual_post_all_gather_processing: bool = True,
) -> None:
    """Cast master shards into their weights once, through a CastPlan that is built for this call.

    Collective: the ranks compare their arguments and reduce the amaxes. The caller then all-gathers
    the bytes. A training loop should keep a CastPlan and call `plan.cast()` instead. The weights
    are QuantizedWeights; `zerocast.integrations.transformer_engine` has the call for
    TransformerEngine's own tensors.

    The first five arguments, with shapes and dtypes, are those of CastPlan. Pass
    `manual_post_all_gather_processing=True` to make the columnwise copies after the all-gather by
    `post_all_gather_processing`. With False the old copies are dropped, and the first backward pass
    that reads a copy makes it. That pass must come after the all-gather.

    Raises the errors of CastPlan. Raises RuntimeError on every rank if a master is NaN or Inf; the
    weights are written by then. A plan that is kept raises this in its next cast. This call raises
    it at once, for which the CPU waits for the device.
    """
    plan = CastPlan(
        model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights=fsdp_shard_model_weights
    )
    plan.cast()
    # This plan makes no further cast, which would raise for masters that are NaN or Inf.
    plan.check_call()
    if not manual_post_all_gather_processing:
        for weight in plan.weights:
            weight.state.drop_columnwise()
        plan.validity.rebuild = lambda weight: post_all_gather_processing([weight])


def post_all_gather_processing(model_weights: Sequence[QuantizedWeight]) -> None:
    """Make the columnwise copies of weights whose rowwise bytes have been gathered.

    Raises TypeError for anything but a QuantizedWeight, ValueError for weights on several devices,
    and RuntimeError for a weight that was never cast. Nothing is written in these cases.
    """
    for index, weight in enumerate(model_weights):
        if not isinstance(weight, QuantizedWeight):
            raise TypeError(f"model weight {index} is a {type(weight).__name__}, a QuantizedWeight is needed")
        if not weight.state.ever_cast:
            raise RuntimeError(f"model weight {index} ({weight!r}) was never cast: there is nothing to transpose yet")
    devices = {weight.device for weight in model_weights}
    if len(devices) > 1:
        raise ValueError(f"the weights of one call are on one device, got {sorted(map(str, devices))}")
    if not devices:
        return
    ColumnwiseCopies(model_weights, backends.choose(devices.pop())).make()
