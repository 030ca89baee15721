"""Apex's optimizer and ZeroAdamW side by side, with the same gradients: masters, moments and bytes."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests import casts
from tests.apex import kernels
from tests.apex.host_on_cpu import WHY_NOT, device, host_on_cpu
from tests.apex.training import Case, Run
from tests.optim.probe import FP32, PLAIN, Probe, Spec
from tests.optim.runs import TWO_GROUPS, boxes, weight_bytes
from zerocast import ZeroAdamW, ZeroConfig

if not WHY_NOT:
    from tests.apex.host_on_cpu import apex

Values = dict[str, dict[str, Tensor]]  # by name and field
ULP = 2.0**-24
FIELDS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@dataclass(frozen=True)
class Exact(Spec):
    """Gradients of few bits: sums over ranks are exact in any order, and so is their mean."""

    def mean(self, step: int) -> Tensor:
        return (super().gradient(step, 0).float() * 4096).round().clamp(-100, 100) / 4096

    def gradient(self, step: int, rank: int) -> Tensor | None:
        """The mean, and what adds up to nothing over the ranks."""
        away = rank - (dist.get_world_size() - 1) / 2
        return (self.mean(step) + away * 2 / 4096).to(self.dtype)


SPECS = (
    Exact("plain", (50, 24), PLAIN, FP32),
    Exact("delayed", (48, 80), "fp8_delayed:amax_history_len=3"),
    Exact("current", (13, 7), "fp8_current", FP32),
    Exact("block", (130, 33), "fp8_block", group=1),
    Exact("mx", (64, 96), "mxfp8"),
    Exact("square", (64, 96), "mxfp8:block=32x32"),
    Exact("nv", (48, 112), "nvfp4", group=1),
)


@dataclass
class Both:
    """The two after the same steps."""

    apex: Values
    zero: Values
    apex_bytes: dict[str, casts.Bytes]
    zero_bytes: dict[str, casts.Bytes]
    bound: Values = field(default_factory=dict)


@contextlib.contextmanager
def _update(of_zerocast: bool) -> Iterator[None]:
    """With Apex's formula, or with zerocast's in its place."""
    extension = apex.distributed_adam_cuda
    chosen = kernels.zerocast_adam if of_zerocast else extension.multi_tensor_fused_adam
    with mock.patch.object(extension, "multi_tensor_fused_adam", chosen):
        yield


def _train(steps: int, of_zerocast: bool) -> Both:
    with host_on_cpu(), _update(of_zerocast):
        run = Run(Case(SPECS))
        for number in range(steps):
            run.step(number)
        ours = {name: {field: state[field] for field in FIELDS} for name, state in run.state().items()}
        probe = Probe(SPECS).to(device())
        config = ZeroConfig(bucket_size=4096, deterministic=True, grad_dtype=torch.float32)
        zero = ZeroAdamW(probe.param_groups(TWO_GROUPS), config=config)
        for number in range(steps):
            probe.backward(number, run.rank)
            zero.step()
            zero.zero_grad()
        return Both(ours, _gathered(zero, ours), weight_bytes(run.probe), weight_bytes(probe))


def _gathered(zero: ZeroAdamW, like: Values) -> Values:
    """Whole tensors on every rank: the bits are summed as integers, to which whoever owns nothing adds zero."""
    state, found = zero.state_dict(), {}
    for name, fields in like.items():
        found[name] = {}
        for theirs, ours in FIELDS.items():
            leaf = state["model"][name] if ours == "master" else state["optim"]["state"][name][ours]
            whole = torch.zeros_like(fields[theirs], device=device())
            for where, values in boxes(leaf):
                whole[where] = values
            dist.all_reduce(whole.view(torch.int32))
            found[name][theirs] = whole.cpu()
    return found


def unequal(steps: int) -> list[str]:
    """With zerocast's formula in the place of Apex's kernel: what is not the same, to the bit."""
    both = _train(steps, of_zerocast=True)
    wrong = [
        f"{name}.{key}"
        for name, values in both.zero.items()
        for key, value in values.items()
        if not torch.equal(value.view(torch.int32), both.apex[name][key].view(torch.int32))
    ]
    for name, held in both.zero_bytes.items():
        wrong += [f"{name}.{key}" for key, value in held.items() if (both.apex_bytes[name][key] != value).any()]
    return wrong


def beyond(steps: int) -> tuple[list[str], float]:
    """With Apex's own formula: what differs by more than the two formulas explain, and the largest part of that in use."""
    both, worst, wrong = _train(steps, of_zerocast=False), 0.0, []
    for spec in SPECS:
        for key, bound in _bounds(spec, steps).items():
            difference = (both.apex[spec.name][key].double() - both.zero[spec.name][key].double()).abs()
            worst = max(worst, float((difference / bound.clamp_min(1e-300)).max()))
            if (difference > bound).any():
                wrong.append(f"{spec.name}.{key}: {difference.max():.3g}")
    return wrong, worst


def _bounds(spec: Exact, steps: int) -> dict[str, Tensor]:
    """How far the two formulas may lie apart after `steps`, an element.

    In exact arithmetic they are the same but for the betas: Apex rounds each to f32 and takes 1 - beta from that, ZeroAdamW rounds
    1 - beta. That part is worked out in f64. The rest is rounding: at most 8 operations a moment and 16 a master, each off by half
    an ulp of the largest value on its way, carried from step to step.
    """
    options: Any = TWO_GROUPS[spec.group]
    rounded = [kernels.f32(beta) for beta in options["betas"]]
    apart = [_Exactly(spec, options, betas) for betas in (rounded, options["betas"])]
    moments = {"exp_avg": torch.zeros(spec.shape), "exp_avg_sq": torch.zeros(spec.shape)}
    slack = {"param": torch.zeros(spec.shape, dtype=torch.float64)}
    for number in range(steps):
        for one in apart:
            one.step(number + 1, spec.mean(number).double())
        ours = apart[1]
        moments = {"exp_avg": ours.size * 8 * ULP * (number + 1), "exp_avg_sq": ours.v * 8 * ULP * (number + 1)}
        reach = ours.size / ours.c[0] / ((ours.v / ours.c[1]).sqrt() + options["eps"])
        one_step = 2 * ours.p.abs() + options["lr"] * 16 * (number + 1) * (reach + 1)
        slack["param"] = slack["param"] + ULP * one_step
    theirs, ours = apart
    exact = {"param": theirs.p - ours.p, "exp_avg": theirs.m - ours.m, "exp_avg_sq": theirs.v - ours.v}
    return {key: exact[key].abs() + {**moments, **slack}[key] for key in FIELDS}


class _Exactly:
    """AdamW in f64. `size` is the first moment of the gradients' absolute values."""

    def __init__(self, spec: Exact, options: Any, betas: Any) -> None:
        self.options, self.betas = options, betas
        self.p = spec.initial().double()
        self.m, self.v, self.size = (torch.zeros_like(self.p) for _ in range(3))
        self.c = (1.0, 1.0)

    def step(self, count: int, g: Tensor) -> None:
        (beta1, beta2), lr = self.betas, self.options["lr"]
        self.c = 1 - beta1**count, 1 - beta2**count
        self.m = beta1 * self.m + (1 - beta1) * g
        self.size = beta1 * self.size + (1 - beta1) * g.abs()
        self.v = beta2 * self.v + (1 - beta2) * g * g
        update = self.m / self.c[0] / ((self.v / self.c[1]).sqrt() + self.options["eps"])
        self.p = self.p * (1 - lr * self.options["weight_decay"]) - lr * update
