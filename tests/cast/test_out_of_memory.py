"""Memory that runs out at any operator of a cast: the next one writes all of it."""

import pytest
import torch

from tests import casts
from tests.optim.out_of_memory import OutOfMemory
from zerocast import CastPlan, QuantizedWeight


def test_a_cast_is_cast_again() -> None:
    """A plan's cast that died is not read; the next one writes all of it, as if nothing had been."""
    formats = ("nvfp4", "fp8_block", "mxfp8", "fp8_delayed:amax_compute_algo=most_recent,amax_history_len=3")
    weights, twins = ([QuantizedWeight.empty((64, 96), fmt) for fmt in formats] for _ in range(2))
    masters = [torch.randn(64 * 96) for _ in weights]
    plan, twin = (CastPlan(held, masters, [0] * len(held)) for held in (weights, twins))
    partial = 0
    for attempt in range(400):
        for master in masters:
            master.normal_()
        memory = OutOfMemory(attempt // 2, afterwards=attempt % 2 == 1)
        try:
            with memory:
                plan.cast()
        except torch.OutOfMemoryError:
            partial += plan.validity.partial is not None
            if plan.validity.partial:
                with pytest.raises(RuntimeError, match=r"a cast raised half-way: .* cast again"):
                    weights[0].dequantize()
            plan.cast()
        plan.post_all_gather()
        twin.cast()
        twin.post_all_gather()
        for weight, other in zip(weights, twins, strict=True):
            casts.assert_same_bytes(casts.bytes_of(weight), casts.bytes_of(other), f"{weight.format}, {attempt}")
        if memory.count <= attempt // 2:
            break
    assert partial > 10
