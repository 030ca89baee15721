"""Ranks send tensors of the device that NCCL serves, and compute on the device of the weights.

The accelerator of these runs is played on a CPU, where gloo itself would take a tensor of any device.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import zerocast
from tests import accelerator, casts
from tests.casts import Outcome, Sharded, Weight, assert_unsharded, every_format
from tests.fsdp2 import models, test_bits, test_shard_placement, test_tensor_parallel
from tests.hosts import under_test
from tests.nccl import test_fsdp2, test_optimizer
from tests.optim import runs
from tests.workers import Ranks
from zerocast import CastPlan, metrics
from zerocast.export import export_safetensors
from zerocast.fsdp2 import FusedAdamW
from zerocast.serve import Receiver, Sender

FORMATS = ("nvfp4", models.DELAYED, "fp8_block", "mxfp8")
FSDP2: dict[str, tuple[Any, ...]] = {
    "left gathered": (test_bits.trained, FORMATS, 64, 96, {"reshard_after_forward": False}),
    "experts in slices": (test_shard_placement.experts, FORMATS, "FusedAdamW"),
    **{name: test_fsdp2.CLEAN[name] for name in ("replicas", "8-bit moments in host memory")},
}
ZERO = ("fp8 wire", "stage 1", "Muon, ranks without a matrix")


def played(case: Callable[..., Any], *arguments: Any) -> Any:
    """Run a case of one rank on the accelerator."""
    with accelerator.playing(), patch.object(models, "place", lambda: accelerator.DEVICE):
        return case(*arguments)


def one_run(folder: str, host: str, variant: str) -> None:
    """Take steps, measure one, save, load, refit, export and verify, in debug mode as well."""
    kind = under_test.find(host)
    with kind.inside(variant):
        run = kind(f"{folder}/saved", variant)
        run.step(0)
        run.save(1)
        with metrics.Meter(run.verified, every=1).step():
            run.step(1)
        zerocast.set_debug(True)
        try:
            assert run.load() == 1
            run.step(1)
        finally:
            zerocast.set_debug(False)
        for call in (*run.refreshes().values(), run.whole, run.saved):
            call()
        sender, receiver = Sender(run.model, "bf16", bucket_bytes=30_000, group=dist.group.WORLD), Receiver()
        for message in sender.named_tensors():
            receiver.accept(message.header, message.tensors)
        run.step(2)
        for message in sender.named_deltas(receiver.refit):
            receiver.accept(message.header, message.tensors)
        export_safetensors(run.model, Path(folder, "exported"), "bf16", 20_000, group=dist.group.WORLD)
        assert zerocast.verify(run.verified).ok


RUNS = [
    under_test.param(host, variant, slow=index > 0)
    for host in ("ZeroAdamW", "FSDP2")
    for index, variant in enumerate(under_test.find(host).VARIANTS)
]


@pytest.mark.parametrize(("host", "variant"), RUNS)
def test_a_run(ranks: Ranks, tmp_path: Path, host: str, variant: str) -> None:
    ranks(2)(played, one_run, str(tmp_path), host, variant)


@pytest.mark.parametrize("name", FSDP2)
def test_fsdp2_cases(ranks: Ranks, name: str) -> None:
    assert not any(ranks(2)(played, *FSDP2[name]))


@pytest.mark.parametrize("name", ZERO)
def test_zero_adamw_cases(ranks: Ranks, name: str) -> None:
    ranks(2)(played, runs.check, dataclasses.replace(test_optimizer.RUNS[name], device=accelerator.DEVICE))


def test_slices(ranks: Ranks) -> None:
    ranks(2)(played, test_tensor_parallel.slices, models.DELAYED, 96)


def train_with_gradients_as_fp8() -> None:
    model = models.sharded(models.Net(("nvfp4",), 64, 96))
    zerocast.fsdp2.set_grad_wire(model, "fp8_1x128")
    models.train(model, FusedAdamW(model.parameters()), range(2), 64)


def test_gradients_as_fp8(ranks: Ranks) -> None:
    ranks(2)(played, train_with_gradients_as_fp8)


def cast(cases: tuple[Weight, ...], on_host: bool) -> Outcome:
    """Cast by a plan, whose masters are on the accelerator as the weights are, or in host memory."""
    of_rank = Sharded(cases, dist.get_rank(), accelerator.DEVICE)
    if on_host:
        of_rank.masters = [None if master is None else master.cpu() for master in of_rank.masters]
    plan = CastPlan(of_rank.weights, of_rank.masters, of_rank.starts, backend="reference")
    plan.cast()
    of_rank.gather()
    plan.post_all_gather()
    assert zerocast.verify(plan).ok
    return Outcome([[casts.bytes_of(weight) for weight in of_rank.weights]], of_rank.complaints)


@pytest.mark.parametrize("on_host", [False, True])
def test_plans(ranks: Ranks, seed: int, on_host: bool) -> None:
    cases = every_format(2, seed, models.EACH)
    for outcome in ranks(2)(played, cast, cases, on_host):
        assert_unsharded(outcome, cases, "a plan")
