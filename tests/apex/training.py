"""A probe under Apex's optimizer, trained on every rank of a pool, saved in Apex's state dict, loaded, and what is held then."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import zerocast
from tests import casts
from tests.apex.host_on_cpu import WHY_NOT, device, host_on_cpu
from tests.optim import probe
from tests.optim.probe import Probe, Spec
from tests.optim.runs import TWO_GROUPS
from zerocast import QuantizedWeight
from zerocast.distributed.bucket import Bucket
from zerocast.distributed.group import Group
from zerocast.formats import Columnwise
from zerocast.formats.element import torch_dtype

if not WHY_NOT:
    from zerocast.integrations.apex import DistributedFusedAdam

# Apex's reductions start alike on all ranks only where all ranks have the same gradients.
MIXED = tuple(spec if spec.used == "never" else dataclasses.replace(spec, used="always") for spec in probe.MIXED)
BF16, FP32 = torch.bfloat16, torch.float32
EVERY_FORMAT = (
    tuple(  # some of them larger than a small bucket, some sharing one; identity stays a plain FP32 parameter
        Spec(f"{index}", (64, 96), fmt, FP32 if index % 2 or fmt == "identity" else BF16, index % 2)
        for index, fmt in enumerate(casts.FORMATS)
    )
)
SMALL = 0.01  # MiB a bucket, in gradients: 2,621 FP32 elements


@dataclass(frozen=True)
class Case:
    specs: tuple[Spec, ...] = MIXED
    steps: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)
    max_norm: float | None = None
    no_sync: bool = False
    replicas: int = 1
    frozen: tuple[str, ...] = ()  # parameters that need no gradient, which Apex does not take


class Run:
    """One rank's probe and optimizer of a case. Inside `host_on_cpu`."""

    def __init__(self, case: Case) -> None:
        self.case, self.probe, self.rank = case, Probe(case.specs).to(device()), dist.get_rank()
        groups = self.probe.param_groups(TWO_GROUPS, case.frozen)
        options = {"bucket_cap_mb": SMALL, **case.options, **_groups(case.replicas)}
        self.optimizer = DistributedFusedAdam(groups, **options)

    @property
    def weights(self) -> dict[str, QuantizedWeight]:
        named = self.probe.named_parameters()
        return {name: weight for name, weight in named if isinstance(weight, QuantizedWeight)}

    def step(self, number: int) -> None:
        if self.case.no_sync:
            with self.optimizer.no_sync():
                self.probe.backward(number + 100, self.rank)
        self.probe.backward(number, self.rank)
        if self.case.max_norm is not None:
            self.optimizer.clip_grad_norm(self.case.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return full masters, moments and delayed scaling by name, on the CPU."""
        saved = self.optimizer.state_dict()
        return {name: saved["state"][key] for name, key in self.optimizer._keys(saved).items()}

    def wrong(self) -> list[str]:
        """Return the live bytes that differ from the unsharded cast of the gathered masters, stale copies included."""
        found = []
        state = self.state()
        for name, weight in self.weights.items():
            if weight.format.columnwise is not Columnwise.NONE and not weight.state.columnwise_is_fresh():
                found.append(f"{name}: stale")
            scale = float(state[name].get("cast_scale", torch.ones(1)))
            expected = casts.unsharded(str(weight.format), state[name]["param"], weight.dtype, scale)
            held = casts.bytes_of(weight)
            found += [f"{name}.{key}" for key, value in expected.items() if (held[key] != value).any()]
        stepped = self.optimizer.state["step"] > 0
        sent = self.optimizer.param_sync_dtype if stepped else FP32
        for name, parameter in self.probe.named_parameters():
            expected_plain = state[name]["param"].to(sent).to(parameter.dtype)
            if name not in self.weights and not torch.equal(parameter.detach().cpu(), expected_plain):
                found.append(name)
        return found + [str(difference) for difference in zerocast.verify(self.probe).differences]


def _groups(replicas: int) -> dict[str, Any]:
    """Return process groups for this number of replicas of the masters. Ranks of a shard group are consecutive."""
    if replicas == 1:
        return {}
    size, rank = dist.get_world_size() // replicas, dist.get_rank()
    shard = [dist.new_group(list(range(first, first + size))) for first in range(0, size * replicas, size)]
    redundant = [dist.new_group(list(range(place, size * replicas, size))) for place in range(size)]
    return {"distributed_process_group": shard[rank // size], "redundant_process_group": redundant[rank % size]}


def train(case: Case) -> list[str]:
    """Return the differences before the first step and after each step."""
    with host_on_cpu():
        run = Run(case)
        wrong = run.wrong()
        for number in range(case.steps):
            run.step(number)
            wrong += [f"step {number}: {what}" for what in run.wrong()]
        return wrong


def traffic() -> tuple[int, list[int], list[int]]:
    """Return the all-reduces of one step, the bytes of each all-gather of quantized buckets, and those of their
    codes.
    """
    with host_on_cpu():
        run = Run(Case())
        run.probe.backward(0, run.rank)
        run.optimizer.grad_sync()
        buckets = run.optimizer._quantized.values()
        sent, reduce, gather = [], mock.Mock(wraps=dist.all_reduce), Group.all_gather_into

        def counted(group: Group, whole: Tensor, part: Tensor, **kwargs: Any) -> Any:
            sent.append(whole.nbytes)
            return gather(group, whole, part, **kwargs)

        with mock.patch.object(dist, "all_reduce", reduce), mock.patch.object(Group, "all_gather_into", counted):
            run.optimizer.step()
        return reduce.call_count, sorted(sent), sorted(size for bucket in buckets for size in _sizes(bucket.bucket))


def _sizes(bucket: Bucket) -> list[int]:
    return [bucket.numel // flat.elements * torch_dtype(flat.dtype).itemsize for flat in bucket.storage.gathered]


def started_apart(named: bool) -> tuple[list[str], list[bool], list[str]]:
    """Start from models that ranks initialised differently. Return the names, whether masters are rank 0's
    values, and the differences.
    """
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 64)).to(device())
    start = [model[0].weight.detach().clone(), model[1].weight.detach().clone(), model[1].bias.detach().clone()]
    for value in start:
        dist.broadcast(value, 0)
    recipe = zerocast.Recipe({"0.weight": "fp8_delayed", "1.weight": "nvfp4"}, default="identity")
    zerocast.quantize_(model, recipe)
    with host_on_cpu():
        optimizer = DistributedFusedAdam(model.named_parameters() if named else model.parameters(), bucket_cap_mb=SMALL)
        saved = optimizer.state_dict()
        keys = optimizer._keys(saved)
        masters = [state["param"] for key, state in saved["state"].items() if key != "step"]
        optimizer.load_state_dict(saved)
    found = [torch.equal(masters[0], start[0].cpu()), torch.equal(masters[2], start[1].cpu())]
    found.append(torch.equal(model[1].bias, start[2]))
    return list(keys), found, [str(difference) for difference in zerocast.verify(model).differences]


def held(run: Run) -> dict[str, Any]:
    """Return everything that a step changes, as bytes."""
    found = {f"{name} {key}": casts.raw(value) for name, state in run.state().items() for key, value in state.items()}
    for name, parameter in run.probe.named_parameters():
        weight = run.weights.get(name)
        bytes_of = {"data": casts.raw(parameter).copy()} if weight is None else casts.bytes_of(weight)
        found |= {f"live {name} {key}": value for key, value in bytes_of.items()}
    return found


def different(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    assert set(ours) == set(theirs)
    return [name for name, value in ours.items() if not (value == theirs[name]).all()]


def save(run: Run, path: str) -> None:
    """Save masters and moments, and the plain parameters, which Apex leaves to the model."""
    plain = {name: p.detach() for name, p in run.probe.named_parameters() if name not in run.weights}
    state = {"optimizer": run.optimizer.state_dict(), "plain": plain}
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def load(run: Run, path: str) -> None:
    """Load the optimizer, then the plain parameters, which Apex leaves to the model, where no memory runs out."""
    state = torch.load(path, weights_only=True)
    run.optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad(), _disable_current_modes():
        for name, value in state["plain"].items():
            run.probe.get_parameter(name).copy_(value)


def without_delayed() -> list[str]:
    """Return what is wrong with the bytes after a load of Apex's own state, whose missing scales are seeded
    from the masters.
    """
    with host_on_cpu():
        run = Run(Case())
        for number in range(2):
            run.step(number)
        state = run.optimizer.state_dict()
        for saved in state["state"].values():
            for name in ("scale", "amax_history", "cast_scale"):
                if isinstance(saved, dict):
                    saved.pop(name, None)
        run.optimizer.load_state_dict(state)
        return run.wrong()
