"""The work that is timed, as jobs: casts, their stages, columnwise copies, Adam steps. Shard has
one rank's tensors of a workload.

A SimulatedGroup replaces the other ranks, so that one device does exactly one rank's share of a
cast.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from zerocast.backends import ops
from zerocast.bench.traffic import NOMINAL
from zerocast.bench.workload import BenchEnv, Job, Workload
from zerocast.cast.adam_update import AdamUpdate, Hyperparameters
from zerocast.cast.partition import MasterShard
from zerocast.cast.plan import CastPlan
from zerocast.cast.tables import WeightTable, WeightTables
from zerocast.distributed.group import Group
from zerocast.distributed.ownership import whole_sums
from zerocast.formats import get_format
from zerocast.formats.layout import BUFFERS, GradientMessage, elements_per_scale
from zerocast.optim.moments_8bit import CutGroups, Moments8bit, OwnedPart
from zerocast.weight import QuantizedWeight
from zerocast.weight.buffers import into_flat_buffer


@dataclass(frozen=True)
class SimulatedGroup(Group):
    """A group whose other members are simulated: same weights, the other shards.

    A plan in it has amaxes and scales for every weight, as on a cluster. Collectives move nothing:
    their time belongs to the network and is not measured here.
    """

    workload: Workload

    @staticmethod
    def of_workload(workload: Workload) -> "SimulatedGroup":
        """Return the group of the workload's rank."""
        return SimulatedGroup(None, workload.rank, workload.world, workload)

    def all_reduce_sum(self, tensor: Tensor, what: str = "") -> None:
        """Fill in the sums over all ranks, which are known: when a plan is built, ranks add up the
        elements that they own, and together they own each element once.
        """
        tensor.copy_(whole_sums([math.prod(shape) for shape in self.workload.shapes]))

    def all_reduce_max(self, tensor: Tensor, what: str = "", async_op: bool = False) -> None:
        """Do nothing. When a plan is built all ranks have the same values; in a cast the amaxes of
        this rank are used.
        """


# The standard deviation of the masters, about the same as of a trained weight.
STANDARD_DEVIATION = 0.02


class Shard:
    """Weights of random bytes, and random masters of the owned spans, on `env.device`.

    A flat workload has all masters in `flat` and each kind of weight buffer in one tensor. A
    scattered one has separate tensors for each weight. With `gathers_scales` the plan only makes
    the scales of the owned elements, if the format allows it.
    """

    def __init__(self, workload: Workload, fmt: str, env: BenchEnv, gathers_scales: bool = False) -> None:
        random = env.generator()
        self.spans = list(workload.spans(workload.rank))
        self.weights = [QuantizedWeight.empty(shape, fmt, NOMINAL, env.device) for shape in workload.shapes]
        if workload.flat:
            for name in BUFFERS:
                into_flat_buffer([weight for weight in self.weights if weight.state.buffers[name] is not None], name)
        for tensor in self.written():
            _fill(tensor, random)
        self.flat = torch.empty(workload.owned, device=env.device).normal_(0, STANDARD_DEVIATION, generator=random)
        masters = self.flat.split([span.numel for span in self.spans])
        self.masters = [master if workload.flat else master.clone() for master in masters]
        starts = [span.start for span in self.spans]
        cuts = [
            cuts if gathers_scales and elements_per_scale(weight.format, weight.shape) else None
            for weight, cuts in zip(self.weights, workload.cuts(), strict=True)
        ]
        group = SimulatedGroup.of_workload(workload)
        self.plan = CastPlan(self.weights, self.masters, starts, group, backend=env.backend, scale_cuts=cuts)

    @property
    def packed(self) -> Tensor:
        """The packed buffer of all amaxes."""
        return self.plan.amaxes.buffer

    def written(self) -> list[Tensor]:
        """Return all buffers of all weights, in a fixed order."""
        buffers = chain.from_iterable(weight.state.buffers.values() for weight in self.weights)
        return [buffer for buffer in buffers if buffer is not None]

    def table(self) -> WeightTable:
        """Return the plan's weights as a table, to run the stages of a cast one at a time."""
        tables = WeightTables(self.flat.device, self.plan.backend)
        for index, (weight, master, span) in enumerate(zip(self.weights, self.masters, self.spans, strict=True)):
            shard = MasterShard(weight, master if span.numel else None, span)
            tables.of(weight).add_shard(shard, self.plan.amaxes.offsets[index])
        (table,) = tables.freeze()
        return table


def _fill(tensor: Tensor, random: torch.Generator) -> None:
    """Fill a tensor with random bytes, or with floats between 0.5 and 1. A kernel that omits an
    element then writes different bytes than the reference.
    """
    if tensor.dtype is torch.uint8:
        tensor.random_(0, 256, generator=random)
    else:
        tensor.uniform_(0.5, 1.0, generator=random)


def cast(workload: Workload, fmt: str, env: BenchEnv) -> Job:
    """Return the job of a complete `CastPlan.cast()`: amaxes, scales and codes."""
    shard = Shard(workload, fmt, env)
    return Job(shard.plan.cast, shard.written)


def cast_of_own_scales(workload: Workload, fmt: str, env: BenchEnv) -> Job:
    """Return the job of a cast whose scales are gathered with the codes, so that each rank only
    makes the scales of the elements that it owns.
    """
    shard = Shard(workload, fmt, env, gathers_scales=True)
    return Job(shard.plan.cast, shard.written)


def partial_amax(workload: Workload, fmt: str, env: BenchEnv) -> Job:
    """Return the job of the amaxes of the owned elements, into a buffer that starts as zeros."""
    shard = Shard(workload, fmt, env)
    table, packed = shard.table(), shard.packed
    shard.plan.amaxes.begin()
    return Job(lambda: table.measure(packed), lambda: [packed])


def compute_scales(workload: Workload, fmt: str, env: BenchEnv) -> Job:
    """Return the job of the scales of all weights, from random amaxes."""
    shard = Shard(workload, fmt, env)
    table, packed = shard.table(), shard.packed
    packed.uniform_(0, 0.1, generator=env.generator())
    return Job(lambda: table.compute_scales(packed, None), shard.written)


def _after_amaxes(stages: Callable[[Shard, WeightTable], None]) -> Callable[[Workload, str, BenchEnv], Job]:
    def build(workload: Workload, fmt: str, env: BenchEnv) -> Job:
        shard = Shard(workload, fmt, env)
        # The cast computes the amaxes and scales that the stages read.
        shard.plan.cast()
        table = shard.table()
        return Job(lambda: stages(shard, table), shard.written)

    return build


partial_cast = _after_amaxes(lambda shard, table: table.partial_cast(shard.packed, None))


@_after_amaxes
def amax_and_cast(shard: Shard, table: WeightTable) -> None:
    """Run the two stages whose work is proportional to the shard and not to the full weight."""
    table.measure(shard.packed)
    table.partial_cast(shard.packed, None)


@_after_amaxes
def transpose(shard: Shard, table: WeightTable) -> None:
    """Run `CastPlan.post_all_gather()` over all weights. Elements of other ranks have random
    bytes.
    """
    shard.plan.post_all_gather()


def _upcast(transposed: bool) -> Callable[[Workload, str, BenchEnv], Job]:
    def build(workload: Workload, fmt: str, env: BenchEnv) -> Job:
        shard = Shard(workload, fmt, env)
        shard.plan.cast()
        operands: list[Tensor] = []  # of the last layer

        def run() -> None:
            in_layer = len(workload.layer)
            for first in range(0, len(shard.weights), in_layer):
                layer = shard.weights[first : first + in_layer]
                data = [weight.rowwise_data for weight in layer]
                scale_inv = [weight.rowwise_scale_inv for weight in layer if weight.rowwise_scale_inv is not None]
                amaxes = [weight.amax for weight in layer if weight.amax is not None and get_format(fmt).exact_scales]
                shapes = tuple(weight.matrix_shape for weight in layer)
                made = ops.upcast_together(env.backend, fmt, data, scale_inv, amaxes, shapes, transposed)
                operands[:] = chain.from_iterable(made)

        return Job(in_a_graph(run, env.device), lambda: operands)

    return build


def in_a_graph(run: Callable[[], None], device: torch.device) -> Callable[[], object]:
    """Capture `run` in a CUDA graph, and return a function that replays it; on a CPU, `run` itself.
    For calls whose launches take the host longer than their kernels take the device.
    """
    if device.type != "cuda":
        return run
    # The first run compiles and allocates, which a capture must not do.
    warm_up_stream = torch.cuda.Stream(device)
    with torch.cuda.stream(warm_up_stream):
        run()
    torch.cuda.current_stream(device).wait_stream(warm_up_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


# Jobs that make the E4M3 operands of every weight, layer by layer, as if each layer was gathered by
# itself: for the forward pass, and for the input gradients.
upcast = _upcast(transposed=False)
upcast_transposed = _upcast(transposed=True)

HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEP = 10
GRADIENT = 1e-3


class Moments:
    """A gradient, both moments and the scalars of step `STEP` for `numel` masters."""

    def __init__(self, numel: int, device: torch.device, random: torch.Generator) -> None:
        def normal() -> Tensor:
            return torch.empty(numel, device=device).normal_(0, GRADIENT, generator=random)

        self.grad = normal()
        self.exp_avg = normal()
        self.exp_avg_sq = normal().square_()
        hyperparameters = Hyperparameters(1, device)
        hyperparameters.refresh([HYPERPARAMETERS])
        self.scalars = hyperparameters.scalars(torch.full((1,), STEP, device=device))
        self.clip = torch.ones(1, device=device)


def adam_8bit(workload: Workload, fmt: str, env: BenchEnv) -> Job:
    """Return the job of an update with moments in 8 bits, which begin as zeros, on the flat shard:
    with amaxes, and with the codes of local scales.
    """
    shard = Shard(workload, fmt, env)
    table, packed, numel = shard.table(), shard.plan.amaxes, workload.owned
    inputs = Moments(numel, env.device, env.generator())
    parts: list[OwnedPart] = []
    offset = 0
    for number, ((_, columns), span) in enumerate(zip(workload.shapes, shard.spans, strict=True)):
        if span.numel:
            parts.append(OwnedPart(f"weight {number}", columns, [span], offset, param_group=0, cut={}))
            offset += span.numel
    moments = Moments8bit(parts, numel, CutGroups(0, [], env.device))
    groups = moments.groups(torch.full((1,), STEP, device=env.device))
    update = AdamUpdate(inputs.grad, moments.exp_avg, moments.exp_avg_sq, inputs.scalars, inputs.clip, groups)

    def run() -> None:
        packed.begin()
        table.measure(packed.buffer, update, None)

    state = shard.flat, moments.exp_avg, moments.exp_avg_sq, moments.scales, packed.buffer
    return Job(run, lambda: [*state, *shard.written()])


def quantize_gradient(workload: Workload, fmt: str, env: BenchEnv) -> Job:
    """Return the job of `quantize_gradient`: a bf16 gradient with the shard's number of elements,
    to messages for all ranks.
    """
    parts = workload.world
    message = GradientMessage(workload.owned // workload.world)
    grad = torch.empty(parts * message.numel, device=env.device)
    grad = grad.normal_(0, GRADIENT, generator=env.generator()).bfloat16()
    messages = torch.empty(parts * message.nbytes, dtype=torch.uint8, device=env.device)
    run = functools.partial(ops.quantize_gradient, env.backend, grad=grad, parts=parts, messages=messages)
    return Job(run, lambda: [messages])


def add_gradients(workload: Workload, fmt: str, env: BenchEnv) -> Job:
    """Return the job of `add_gradients`, with which an owner sums the messages of all ranks."""
    quantized = quantize_gradient(workload, fmt, env)
    quantized.run()
    (messages,) = quantized.written()
    parts = workload.world
    out = torch.empty(workload.owned // parts, device=env.device)
    sums = {"messages": messages, "parts": parts, "divisor": parts, "adds": False, "out": out}
    return Job(functools.partial(ops.add_gradients, env.backend, **sums), lambda: [out])


def _step(stages: Callable[[WeightTable, AdamUpdate, Tensor], None]) -> Callable[[Workload, str, BenchEnv], Job]:
    def build(workload: Workload, fmt: str, env: BenchEnv) -> Job:
        shard = Shard(workload, fmt, env)
        table = shard.table()
        packed = shard.plan.amaxes
        moments = Moments(shard.flat.numel(), env.device, env.generator())
        update = AdamUpdate(moments.grad, moments.exp_avg, moments.exp_avg_sq, moments.scalars, moments.clip)

        def run() -> None:
            packed.begin()
            stages(table, update, packed.buffer)

        return Job(run, lambda: [shard.flat, moments.exp_avg, moments.exp_avg_sq, *shard.written()])

    return build


@_step
def step(table: WeightTable, update: AdamUpdate, packed: Tensor) -> None:
    """Run all work of a step after the reduce-scatter: Adam with amaxes, and with the codes of
    blocks that have one owner; then scales, and the other codes.
    """
    table.measure(packed, update, None)
    table.compute_scales(packed, None)
    table.cast_rest(packed, update, None)


_adam_of_plain_masters = _step(lambda table, update, packed: table.measure(packed, update, None))


def adam(workload: Workload, fmt: str, env: BenchEnv) -> Job:
    """Return the job of the update of plain parameters, which are not cast, on the flat shard."""
    return _adam_of_plain_masters(workload, "identity", env)


@_step
def step_in_two_passes(table: WeightTable, update: AdamUpdate, packed: Tensor) -> None:
    """Run the same work if all codes wait for reduced amaxes."""
    table.adam_each(update.inputs, packed)
    table.compute_scales(packed, None)
    table.partial_cast(packed, None)
