"""Parameter groups, process groups, schedulers, hooks of steps, and what an optimizer makes of unusual parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests import casts
from tests.optim.probe import FEW, Probe, Spec
from tests.optim.runs import ADAM, DETERMINISTIC, EIGHT_BIT_MOMENTS, KINDS, Compared, Run, build, weight_bytes
from tests.optim.undistributed import Undistributed, mean
from tests.workers import on_ranks
from zerocast import ZeroAdamW


def mean_over(members: list[int], run: Run, spec: Spec, step: int) -> Any:
    return mean([run.local(spec, range(step, step + 1), rank) for rank in members], spec)


@pytest.mark.parametrize("kind", ["mesh", "group"])
@on_ranks(4)
def test_groups(kind):
    """An optimizer trains over two ranks of four, given as a mesh dimension or a group. The others play no part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
    group = mesh if kind == "mesh" else mesh.get_group()
    trainer = Compared(group=group)
    run, members = trainer.run, dist.get_process_group_ranks(mesh.get_group())
    for step in range(3):
        trainer.step(step)
        trainer.reference.step({spec.name: [mean_over(members, run, spec, step)] for spec in run.specs}, run.options)
        trainer.check(f"step {step}")


@pytest.mark.parametrize("config", [DETERMINISTIC, EIGHT_BIT_MOMENTS], ids=["FP32 moments", "8-bit moments"])
def test_learning_rate_as_a_tensor(config):
    """A change in place counts; loading changes the tensor and does not replace it."""
    rate = torch.tensor(1e-2, dtype=torch.float64)
    options = ({**ADAM, "lr": rate}, {**ADAM, "lr": 3e-3})
    probe, reference = Probe(FEW), Undistributed(FEW, config.moment_dtype)
    optimizer = ZeroAdamW(probe.param_groups(options), config=config)
    run = Run()
    for step in range(3):
        rate.mul_(0.5)
        probe.backward(step, 0)
        optimizer.step()
        reference.step({s.name: run.rounds(s, step, 1) for s in FEW}, [{**ADAM, "lr": float(rate)}, options[1]])
    found = weight_bytes(probe)
    for name, wanted in reference.bytes.items():
        casts.assert_same_bytes(found[name], wanted, name)
    state = optimizer.state_dict()
    rate.fill_(7.0)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 1e-2 * 0.125


@on_ranks(2)
def test_rank_0_speaks_for_all():
    """Ranks that start from other values are given rank 0's."""
    probe = Probe(FEW)
    if dist.get_rank():
        for spec in FEW:
            parameter = probe.get_parameter(spec.name)
            if hasattr(parameter, "high_precision_init_val"):
                parameter.high_precision_init_val = torch.randn(spec.shape)
                if parameter.scale is not None:
                    parameter.scale.fill_(3.0)
            else:
                parameter.data = torch.randn(spec.shape, dtype=torch.float32).to(spec.dtype)
    trainer = Compared()
    trainer.probe = probe
    trainer.optimizer = ZeroAdamW(probe.param_groups(trainer.run.options), config=trainer.run.config)
    trainer.check("built")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_plays_no_part(dtype):
    """Models are often built and run under a default of bf16; masters are FP32 all the same."""
    specs = tuple(Spec(f"w{i}", (32, 64), fmt) for i, fmt in enumerate(("nvfp4", "fp8_block", "plain")))
    trainer = Compared(Run(specs, options=(ADAM,), max_norm=0.1))
    run, probe = trainer.run, Probe(specs)
    try:
        torch.set_default_dtype(dtype)
        trainer.probe, trainer.optimizer = probe, ZeroAdamW(probe.named_parameters(), **ADAM, config=run.config)
        for step in range(3):
            for name, parameter in probe.named_parameters():
                gradients = run.rounds(next(spec for spec in specs if spec.name == name), step, 1)
                parameter.grad = torch.from_numpy(gradients[0]).to(parameter.dtype)
            trainer.optimizer.clip_grad_norm_(0.1)
            trainer.optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    for step in range(3):
        trainer.follow(step)
    trainer.check(str(dtype))


def test_strides_do_not_matter():
    """A parameter that is not contiguous becomes so."""
    value = torch.randn(8, 16)
    strided, plain = nn.Parameter(value.t()), nn.Parameter(value.t().contiguous())
    assert not strided.is_contiguous()
    for parameter in (strided, plain):
        optimizer = ZeroAdamW([("w", parameter)], lr=0.1)
        for _ in range(2):
            (parameter * torch.arange(8.0)).square().sum().backward()
            optimizer.step()
    assert torch.equal(strided, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_steps_run_once_a_step(kind: str) -> None:
    """Hooks before a step see the old values, those after it the new ones. A hook that was removed sees nothing."""
    model = nn.Linear(16, 16)
    optimizer = build(kind, model.named_parameters())
    seen: list[tuple[str, object, bool]] = []
    before = model.weight.detach().clone()

    def note(when: str) -> Callable[..., None]:
        return lambda who, *_: seen.append((when, who, torch.equal(model.weight, before)))

    hooks: list[Any] = [
        register_optimizer_step_pre_hook(note("before any")),
        register_optimizer_step_post_hook(note("after any")),
        optimizer.register_step_pre_hook(note("before")),
        optimizer.register_step_post_hook(note("after")),
    ]
    try:
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
    finally:
        for hook in hooks:
            hook.remove()
    expected = [("before any", True), ("before", True), ("after", False), ("after any", False)]
    assert sorted((when, is_old) for when, _, is_old in seen) == sorted(expected)
    assert all(who is optimizer for _, who, _ in seen)
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    assert len(seen) == len(expected)
