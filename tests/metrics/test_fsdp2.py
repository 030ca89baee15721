"""A meter of a model under FSDP2: counts are those of its unsharded masters, and its gathers are counted."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerocast
from tests import casts
from tests.fsdp2 import models
from tests.fsdp2.models import FEW, FORMATS, Net
from tests.metrics import numpy_counts
from tests.metrics.test_cast_meter import agrees
from tests.observed import Dispatched
from tests.workers import on_ranks
from zerocast.metrics import Meter, Sample

Found = dict[str, numpy_counts.Buffers]


def buffers(model: Any) -> tuple[dict[str, Any], Found]:
    """Return whole masters by name, and their unsharded cast by the scales of the last cast."""
    masters, found = {}, {}
    for name, (parameter, owner) in models.masters(model).items():
        masters[name] = parameter.full_tensor().detach().numpy().copy()
        scale = models.cast_scale(owner)
        cast = casts.cast_whole(str(owner.format), torch.from_numpy(masters[name]), owner.geometry.nominal, scale=scale)
        found[name] = numpy_counts.buffers_of(cast)
    return masters, found


def check(model: Any, sample: Sample, before: Found) -> None:
    """Check that the counts are those of plain numpy."""
    masters, now = buffers(model)
    assert set(sample.weights) == set(masters)
    for name, (_, owner) in models.masters(model).items():
        expected = numpy_counts.counts(str(owner.format), masters[name], before[name], now[name])
        agrees(sample.weights[name], expected, name)


@pytest.mark.parametrize(
    ("world", "formats", "hidden", "reshard", "fused", "by_model"),
    [
        (2, FEW, 96, True, True, True),
        models.slow(2, FORMATS, 96, False, False, False),
        models.slow(3, FORMATS, 64, True, False, True),
    ],
)
@on_ranks()
def test_counts_are_those_of_the_unsharded_masters(
    formats: tuple[str, ...], hidden: int, reshard: bool, fused: bool, by_model: bool
) -> None:
    """A meter of every second step counts what the unsharded masters give."""
    model = models.sharded(Net(formats, 64, hidden), reshard_after_forward=reshard)
    make: Any = zerocast.fsdp2.FusedAdamW if fused else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=1e-2)
    meter = Meter(model if by_model else optimizer, every=2)
    _, before = buffers(model)
    for step in range(4):
        with meter.step() as metered:
            with metered.phase("forward"):
                loss = model(models.batch(step, 64)).float().square().mean()
            with metered.phase("backward"):
                loss.backward()
            with metered.phase("step"):
                optimizer.step()
        optimizer.zero_grad()
        if metered.sample:
            check(model, metered.sample, before)
            models.check(model, f"step {step}")
            _, before = buffers(model)
            check_stages(metered.sample, fused)
        assert metered.sample or step % 2 == 0


def check_stages(sample: Sample, fused: bool) -> None:
    """Check the times and bytes of a measured step, whose forward pass casts the step before."""
    wanted = {"forward/all_reduce", "forward/scales_and_cast", *(["step/adam"] if fused else ["forward/amax"])}
    found = {name for name in sample.milliseconds if "/" in name}
    assert wanted <= found
    assert not any("all_gather" in name for name in found)
    assert {"weight_gather", "allreduce_", "_reduce_scatter_base_"} <= set(sample.nbytes)


@pytest.mark.slow
@on_ranks(4)
def test_slices_add_up() -> None:
    """Counts under tensor parallelism are those of all slices together, after a step on 2x2 ranks."""
    mesh = models.mesh((2, 2), ("shard", "tp"))
    model: Any = Net(("nvfp4", "fp8_current"), 64, 128)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe), weight_mesh=mesh["shard", "tp"]._flatten("weight"))
    models.sharded(model, mesh=mesh["shard"], prepare=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    meter = Meter(model, every=1)
    _, before = buffers(model)
    with meter.step() as metered:
        models.train(model, optimizer, range(1), 64, rank=0)
    assert metered.sample and all(isinstance(p, DTensor) for p, _ in models.masters(model).values())
    check(model, metered.sample, before)


@on_ranks(2)
def test_steps_that_are_not_measured_do_nothing_more() -> None:
    """Two steps with a meter that does not measure them call the same operators as two without."""
    seen = []
    for metered in (True, False):
        model = models.sharded(Net(("nvfp4",), 64, 96))
        optimizer = zerocast.fsdp2.FusedAdamW(model.parameters())
        meter = Meter(model, every=100)
        models.train(model, optimizer, range(1), 64)
        with Dispatched() as operators:
            for step in (1, 2):
                if metered:
                    with meter.step():
                        models.train(model, optimizer, range(step, step + 1), 64)
                else:
                    models.train(model, optimizer, range(step, step + 1), 64)
        seen.append(operators.counts)
    metered, without = seen
    assert metered == without


def test_what_owns_no_masters_is_refused() -> None:
    for what, name in ((torch.nn.Linear(2, 2), "Linear"), (np.zeros(1), "ndarray")):
        with pytest.raises(TypeError, match=f"a meter expects a model or an optimizer that owns masters, got {name}"):
            Meter(what)
