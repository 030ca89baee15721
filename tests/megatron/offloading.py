"""Optimizer CPU offload, on the ranks of a pool."""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.megatron.attached import METADATA
from tests.megatron.host_memory import on_host
from tests.megatron.training import MIXED, Case, Run, build_attached
from tests.workers import error_of
from zerocast import verify
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import host as seams


def offloaded(
    formats: str = MIXED,
    fraction: float = 1.0,
    streams: bool = False,
    precise: bool = False,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Case:
    """A run that updates a fraction of its masters on the host; with `precise` what is left by TransformerEngine's FusedAdam."""
    settings = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": fraction,
        "overlap_cpu_optimizer_d2h_h2d": streams,
        "use_precision_aware_optimizer": precise,
        **(options or {}),
    }
    return Case(formats, fused_adam=precise, options=settings, **more)


def _copies(run: Run) -> list[Mapping[Any, Any]]:
    return [seams.host_copies(one.optimizer) for one in run.optimizer.chained_optimizers]


def train(case: Case) -> tuple[list[float], dict[str, int], bool, list[bool]]:
    """Losses, stale bytes, what verify says; by offloaded master whether its copy is another tensor of the same values."""
    with case.host():
        run, attached = build_attached(case)
        losses = [run.step(number) for number in range(3)]
        run.force_sync()
        pairs = [pair for copies in _copies(run) for pair in copies.items()]
        apart = [m.data_ptr() != c.data_ptr() and torch.equal(m.cpu(), c.cpu()) for m, c in pairs if m.numel()]
        return losses, run.stale_bytes(), verify(attached).ok, apart


def written_by_hand(case: Case) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Masters that were written by hand: stale bytes after a refresh and a step more, and the masters then."""
    with case.host():
        run, attached = build_attached(case)
        run.step(0)
        for one in run.optimizer.chained_optimizers:
            for master in (master for group in one.shard_fp32_from_float16_groups for master in group):
                master.mul_(1.5)
        attached.refresh()
        run.step(1)
        return run.stale_bytes(), run.masters()


def finetuned(case: Case, with_state: bool) -> tuple[bool, bool, dict[str, int]]:
    """Masters from values that are loaded into the model, or of a state dict: whether they, and what the next step starts from,
    are those values; and stale bytes.
    """
    with case.host():
        run, _ = build_attached(case)
        values = {name: torch.randn(p.shape).bfloat16() for name, p in run.ddp.module.named_parameters()}
        run.ddp.module.load_state_dict({**run.ddp.module.state_dict(), **values})
        cast = {name: weight.dequantize() for name, weight in run.weights.items()}
        run.optimizer.reload_model_params(**({"state_dict": dict(values)} if with_state else {}))
        expected = values if with_state else {**values, **cast}
        masters = run.masters()
        same = all(torch.equal(masters[name], expected[name].float()) for name in masters)
        copied = all(torch.equal(m, c) for copies in _copies(run) for m, c in copies.items())
        return same, copied, run.stale_bytes()


def moments_on_the_host(case: Case) -> tuple[set[bool], set[bool]]:
    """Whether moments lie on the host once inner optimizers have loaded their own state: of offloaded masters, and of others."""
    found: tuple[set[bool], set[bool]] = (set(), set())
    with case.host():
        run, _ = build_attached(case)
        run.step(0)
        for one in run.optimizer.chained_optimizers:
            one.optimizer.load_state_dict(one.optimizer.state_dict())
            for master, state in one.optimizer.state.items():
                offloads = master in seams.host_copies(one.optimizer)
                found[not offloads].update(on_host(state[key]) for key in ("exp_avg", "exp_avg_sq"))
        run.step(1)
        assert not run.stale_bytes()
    return found


def saved_alike(case: Case) -> list[set[str]]:
    """The keys of the parameter groups that all ranks save alike."""
    with case.host():
        run, _ = build_attached(case)
        run.step(0)
        states = [one.state_dict() for one in run.optimizer.chained_optimizers]
        return [set(group) for state in states for group in state["optimizer"]["param_groups"]]


def prepared(case: Case) -> bool:
    """Whether masters are as they were once a load was prepared, before any step."""
    with case.host():
        run, _ = build_attached(case)
        before = run.masters()
        model = run.ddp.module.sharded_state_dict(metadata=METADATA)
        run.optimizer.sharded_state_dict(model, is_loading=True, metadata=METADATA)
        integration.dequantize_(model, is_loading=True)
        return all(torch.equal(before[name], master) for name, master in run.masters().items())


def prepared_again(case: Case) -> tuple[str, bool]:
    """What is raised where memory runs out as a load is prepared, and whether learning rates are as they were once it is again."""
    with case.host():
        run, _ = build_attached(case)
        inner = run.optimizer.chained_optimizers[0].optimizer
        rates = [group["lr"] for group in inner.param_groups]
        model = run.ddp.module.sharded_state_dict(metadata=METADATA)

        def prepare() -> None:
            run.optimizer.sharded_state_dict(model, is_loading=True, metadata=METADATA)

        with mock.patch.object(inner, "step", side_effect=MemoryError("no memory")):
            failed = error_of(prepare)
        prepare()
        return failed, [group["lr"] for group in inner.param_groups] == rates
