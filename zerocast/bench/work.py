"""The work that the rows time, as jobs: casts, their stages, columnwise copies, Adam steps."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerocast.backends import ops
from zerocast.bench.shard import STANDARD_DEVIATION, Shard
from zerocast.bench.workload import Job, Place, Workload
from zerocast.cast.adam_update import AdamUpdate
from zerocast.cast.hyperparameters import Hyperparameters
from zerocast.cast.tables import WeightTable
from zerocast.formats.layout import GradientMessage


def cast(workload: Workload, fmt: str, place: Place) -> Job:
    """Job of a whole `CastPlan.cast()`: amaxes, scales and codes."""
    shard = Shard(workload, fmt, place)
    return Job(shard.plan.cast, shard.written)


def cast_of_own_scales(workload: Workload, fmt: str, place: Place) -> Job:
    """Job of the same where scales are gathered with the codes: each rank makes those of its own
    elements.
    """
    shard = Shard(workload, fmt, place, gathers_scales=True)
    return Job(shard.plan.cast, shard.written)


def partial_amax(workload: Workload, fmt: str, place: Place) -> Job:
    """Job of the amaxes of the owned elements, into a buffer that starts as zeros."""
    shard = Shard(workload, fmt, place)
    table, packed = shard.table(), shard.packed
    shard.plan.packed.begin()
    return Job(lambda: table.measure(packed), lambda: [packed])


def compute_scales(workload: Workload, fmt: str, place: Place) -> Job:
    """Job of the scales of all weights, from random amaxes."""
    shard = Shard(workload, fmt, place)
    table, packed = shard.table(), shard.packed
    packed.uniform_(0, 0.1, generator=place.generator())
    return Job(lambda: table.compute_scales(packed, None), shard.written)


def _after_amaxes(stages: Callable[[Shard, WeightTable], None]) -> Callable[[Workload, str, Place], Job]:
    def build(workload: Workload, fmt: str, place: Place) -> Job:
        shard = Shard(workload, fmt, place)
        shard.plan.cast()  # computes the amaxes and scales that the stages read
        table = shard.table()
        return Job(lambda: stages(shard, table), shard.written)

    return build


partial_cast = _after_amaxes(lambda shard, table: table.partial_cast(shard.packed, None))


@_after_amaxes
def amax_and_cast(shard: Shard, table: WeightTable) -> None:
    """The two stages whose work is proportional to the shard and not to the whole weight."""
    table.measure(shard.packed)
    table.partial_cast(shard.packed, None)


@_after_amaxes
def transpose(shard: Shard, table: WeightTable) -> None:
    """`CastPlan.post_all_gather()` over all weights; those owned elsewhere have random bytes."""
    shard.plan.post_all_gather()


def _upcast(transposed: bool) -> Callable[[Workload, str, Place], Job]:
    def build(workload: Workload, fmt: str, place: Place) -> Job:
        shard = Shard(workload, fmt, place)
        shard.plan.cast()
        made: list[Tensor] = []

        def run() -> None:
            for weight in shard.weights:
                codes = weight.rowwise_data, weight.rowwise_scale_inv
                made[:] = ops.upcast(place.backend, fmt, *codes, *weight.matrix_shape, transposed)

        return Job(in_a_graph(run, place.device), lambda: made)

    return build


def in_a_graph(run: Callable[[], None], device: torch.device) -> Callable[[], object]:
    """On a GPU a replay of what `run` launches, for calls whose launches take the host longer than
    the device; elsewhere `run`.
    """
    if device.type != "cuda":
        return run
    aside = torch.cuda.Stream(device)
    with torch.cuda.stream(aside):
        run()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


# Jobs of what products read of every weight, forward and in the backward pass, one after another.
upcast, upcast_transposed = _upcast(transposed=False), _upcast(transposed=True)

HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEP = 10
GRADIENT = 1e-3


class Moments:
    """A gradient, both moments and the scalars of step `STEP` for `numel` masters."""

    def __init__(self, numel: int, device: torch.device, random: torch.Generator) -> None:
        def normal() -> Tensor:
            return torch.empty(numel, device=device).normal_(0, GRADIENT, generator=random)

        self.grad, self.exp_avg, self.exp_avg_sq = normal(), normal(), normal().square_()
        hyperparameters = Hyperparameters(1, device)
        hyperparameters.refresh([HYPERPARAMETERS])
        self.scalars = hyperparameters.scalars(torch.full((1,), STEP, device=device))
        self.clip = torch.ones(1, device=device)


def adam(workload: Workload, fmt: str, place: Place) -> Job:
    """Job of `adam_step` on the flat shard."""
    random, numel = place.generator(), workload.owned
    master = torch.empty(numel, device=place.device).normal_(0, STANDARD_DEVIATION, generator=random)
    m = Moments(numel, place.device, random)
    segments = torch.tensor([[0, numel, 0]], device=place.device)
    state = {"master": master, "grad": m.grad, "exp_avg": m.exp_avg, "exp_avg_sq": m.exp_avg_sq}
    return Job(
        lambda: ops.adam_step(place.backend, **state, segments=segments, scalars=m.scalars, clip=m.clip, skip=None),
        lambda: (master, m.exp_avg, m.exp_avg_sq),
    )


def quantize_gradient(workload: Workload, fmt: str, place: Place) -> Job:
    """Job of `quantize_gradient`: a bf16 gradient of as many elements as the shard has, to messages
    for all ranks.
    """
    parts, part = workload.world, GradientMessage(workload.owned // workload.world)
    grad = torch.empty(parts * part.numel, device=place.device).normal_(0, GRADIENT, generator=place.generator())
    grad, messages = grad.bfloat16(), torch.empty(parts * part.nbytes, dtype=torch.uint8, device=place.device)
    run = functools.partial(ops.quantize_gradient, place.backend, grad=grad, parts=parts, messages=messages)
    return Job(run, lambda: [messages])


def add_gradients(workload: Workload, fmt: str, place: Place) -> Job:
    """Job of `add_gradients`, by which an owner sums the messages of all ranks."""
    quantized = quantize_gradient(workload, fmt, place)
    quantized.run()
    (messages,) = quantized.written()
    parts = workload.world
    out = torch.empty(workload.owned // parts, device=place.device)
    sums = {"messages": messages, "parts": parts, "divisor": parts, "adds": False, "out": out}
    return Job(functools.partial(ops.add_gradients, place.backend, **sums), lambda: [out])


def _step(stages: Callable[[WeightTable, AdamUpdate, Tensor], None]) -> Callable[[Workload, str, Place], Job]:
    def build(workload: Workload, fmt: str, place: Place) -> Job:
        shard = Shard(workload, fmt, place)
        table, packed = shard.table(), shard.plan.packed
        m = Moments(shard.flat.numel(), place.device, place.generator())
        update = AdamUpdate(m.grad, m.exp_avg, m.exp_avg_sq, m.scalars, m.clip)

        def run() -> None:
            packed.begin()
            stages(table, update, packed.buffer)

        return Job(run, lambda: [shard.flat, m.exp_avg, m.exp_avg_sq, *shard.written()])

    return build


@_step
def step(table: WeightTable, update: AdamUpdate, packed: Tensor) -> None:
    """All work after the reduce-scatter, as a cast with an update does it: Adam with amaxes, and
    with codes where scales are local; scales; the other codes.
    """
    table.measure(packed, update, None)
    table.compute_scales(packed, None)
    table.cast_rest(packed, update, None)


@_step
def step_in_two_passes(table: WeightTable, update: AdamUpdate, packed: Tensor) -> None:
    """The same where every code waits for reduced amaxes."""
    lists = [update.grad], [update.exp_avg], [update.exp_avg_sq]
    table.adam_each(*lists, scalars=update.scalars, clip=update.clip, packed=packed)
    table.compute_scales(packed, None)
    table.partial_cast(packed, None)
