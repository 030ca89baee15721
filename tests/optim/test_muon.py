"""ZeroMuon: torch.optim.Muon to the bit on any number of ranks, whole matrices dealt to ranks, and what it refuses.

The reference is one process: torch.optim.Muon over FP32 masters, AdamW and casts as in `undistributed.py`. Resuming, faults in the
middle of a step and `verify` are asked by tests/hosts, whose ZeroAdamW has the variant "Muon"; other numbers of ranks in
`test_added_groups.py`, skipped steps in `test_skipped_steps.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import casts
from tests.optim.probe import BF16, FP32, MIXED, Spec
from tests.optim.runs import ADAM, DETERMINISTIC, EIGHT_BIT_MOMENTS, Run, Trainer, check, refused, snapshot
from tests.selection import some, worlds
from tests.workers import error_of, on_ranks
from zerocast import ZeroAdamW, ZeroConfig, ZeroMuon
from zerocast.distributed.bucket import lay_out
from zerocast.distributed.lpt_assignment import newton_schulz_flops
from zerocast.optim import load, save

MUON: Mapping[str, Any] = {"lr": 1e-2, "use_muon": True}
OPTIONS = (MUON, {**ADAM, "use_muon": False})
# Matrices that AdamW is tested on as well.
SHARED = ("delayed", "block", "mx", "nv", "nv_late", "unused")
SPECS = (
    Spec("embedding", (50, 24), group=1),
    Spec("norm", (37,), dtype=FP32, group=1),
    Spec("cut", (64, 96), "nvfp4", group=1),
    *(spec for spec in MIXED if spec.name in SHARED),
    Spec("plain", (24, 40), dtype=FP32),
    Spec("stack", (3, 24, 40)),
)
RUN = Run(SPECS, options=OPTIONS, optimizer=ZeroMuon)
SMALL = dataclasses.replace(RUN, specs=tuple(s for s in SPECS if s.name in ("norm", "cut", "block", "nv")))
TUNED = {"weight_decay": 0.0, "momentum": 0.8, "nesterov": False, "ns_coefficients": (3.0, -3.2, 1.2)}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_norm": 0.1, "schedule": True},
    "stage 1": {"stage": 1, "accumulate": 2, "config": ZeroConfig(bucket_size=1, deterministic=True)},
    "overlap": {
        "config": dataclasses.replace(DETERMINISTIC, overlap_all_gather=True, bucket_size=2**20),
        "accumulate": 2,
    },
    "FP32 gradients": {
        "config": dataclasses.replace(DETERMINISTIC, grad_dtype=FP32),
        "accumulate": 2,
        "no_sync": False,
    },
    "moments in bf16": {"config": dataclasses.replace(DETERMINISTIC, moment_dtype=BF16, keep_columnwise=True)},
    "moments in 8 bits": {"config": EIGHT_BIT_MOMENTS, "max_norm": 1.0},
    "tuned": {
        "options": ({**MUON, **TUNED, "eps": 1e-5, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}, OPTIONS[1])
    },
    "FP8 wire": {"config": ZeroConfig(bucket_size=4096, grad_wire="fp8_1x128", deterministic=True), "accumulate": 2},
    "FP8 wire, stage 1": {
        "config": ZeroConfig(bucket_size=1, grad_wire="fp8_1x128", deterministic=True),
        "stage": 1,
        "accumulate": 2,
        "no_sync": False,
    },
    "one round": {"config": dataclasses.replace(DETERMINISTIC, bucket_size=2**22), "accumulate": 3},
    "gradients put on parameters": {"assign": True, "max_norm": 0.1},
    # One matrix on several ranks, and nothing for AdamW.
    "ranks without a matrix": {"specs": (Spec("block", (130, 33), "fp8_block"),), "options": (MUON,)},
}
QUICK = ("clipped", "moments in 8 bits", "stage 1", "FP8 wire", "gradients put on parameters", "ranks without a matrix")


@pytest.mark.parametrize("options", some(RUNS, *QUICK))
@on_ranks(*worlds(3, slow=(1, 2, 4)))
def test_equals_torch(options: dict[str, Any]) -> None:
    """Masters, momentum, moments and bytes after every step are those of one process."""
    check(dataclasses.replace(RUN, **options))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", RUNS)
def test_on_a_gpu(name: str) -> None:
    """One rank on a GPU equals the reference, whose torch.optim.Muon steps on the GPU too."""
    check(dataclasses.replace(RUN, device="cuda", **RUNS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@on_ranks(2)
def test_backends(backend: str) -> None:
    """Each backend's kernels of Adam take moments that end where Muon's masters begin."""
    check(dataclasses.replace(RUN, config=dataclasses.replace(DETERMINISTIC, backend=backend)))


@on_ranks(*worlds(1, slow=(2,)))
def test_states_of_another_update(tmp_path: Path) -> None:
    folder = str(tmp_path)
    muon = Trainer(SMALL)
    adam = Trainer(dataclasses.replace(SMALL, optimizer=ZeroAdamW, options=(ADAM, ADAM)))
    muon.step(0)
    save(adam.optimizer, f"{folder}/adam")
    save(muon.optimizer, f"{folder}/muon")
    files = refused(muon, lambda: load(muon.optimizer, f"{folder}/adam"))
    back = refused(adam, lambda: load(adam.optimizer, f"{folder}/muon"))
    memory = refused(muon, lambda: muon.optimizer.load_state_dict(adam.optimizer.state_dict()))
    muon.step(1)
    assert "ValueError" in files and "optim.state.nv.momentum_buffer is missing" in files
    assert "ValueError" in back and "optim.state.block.exp_avg is missing" in back
    assert "nv has ['exp_avg', 'exp_avg_sq', 'step'] in the state, and its update keeps ['momentum_buffer']" in memory


class Net(nn.Module):
    """A matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.vector = nn.Parameter(torch.ones(8, 16)), nn.Parameter(torch.ones(8))


def groups(**muon: Any) -> list[dict[str, Any]]:
    net = Net()
    return [{"params": [("matrix", net.matrix)], **muon}, {"params": [("vector", net.vector)], "use_muon": False}]


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "parameters alone": (
        lambda: ZeroMuon(Net().named_parameters()),
        "a ZeroMuon expects parameter groups that set use_muon",
    ),
    "a group that does not say": (lambda: ZeroMuon(groups()), "parameter group 0 of a ZeroMuon has use_muon=None"),
    "a vector": (
        lambda: ZeroMuon([{"params": Net().named_parameters(), "use_muon": True}]),
        r"vector of shape \(8,\) is in a group",
    ),
    "too many steps": (lambda: ZeroMuon(groups(use_muon=True, ns_steps=100)), "ns_steps is out of range: 100"),
    "momentum": (lambda: ZeroMuon(groups(use_muon=True, momentum=1.0)), "momentum is out of range: 1.0"),
    "two coefficients": (
        lambda: ZeroMuon(groups(use_muon=True, ns_coefficients=(1.0, 2.0))),
        "ns_coefficients is out of range",
    ),
    "an unknown adjustment": (
        lambda: ZeroMuon(groups(use_muon=True), adjust_lr_fn="rms"),
        "adjust_lr_fn is out of range: rms",
    ),
    "ZeroAdamW": (lambda: ZeroAdamW(groups(use_muon=True)), "use zerocast.ZeroMuon for such groups"),
    "a graph": (lambda: ZeroMuon(groups(use_muon=True)).capture(), "a step of a ZeroMuon cannot be captured"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises((ValueError, RuntimeError), match=message):
        call()


def test_values_that_become_invalid() -> None:
    """Invalid values, and a change of `use_muon`, are refused before anything is written."""
    trainer = Trainer(SMALL)
    trainer.backward(0)
    before, group = snapshot(trainer), trainer.optimizer.param_groups[0]
    for name, value, message in (
        ("ns_steps", 200, "ns_steps is out of range: 200"),
        ("use_muon", False, "the param_groups of this ZeroMuon were modified"),
    ):
        kept, group[name] = group[name], value
        said = error_of(trainer.optimizer.step)
        group[name] = kept
        assert message in said
        casts.assert_same_bytes(snapshot(trainer), before, name)
    trainer.optimizer.step()


def llama_8b() -> list[tuple[str, Tensor, int]]:
    """Return the matrices of Llama 3 8B's layers."""
    shapes = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}
    shapes |= {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}
    return [
        (f"layers.{n}.{key}", torch.empty(s, dtype=BF16, device="meta"), 0)
        for n in range(32)
        for key, s in shapes.items()
    ]


@pytest.mark.parametrize("world", [1, 3, 8, 64])
def test_balance(world: int) -> None:
    """Every matrix has one owner. No rank works more than 4/3 of what the busiest must, and buffers have little padding."""
    named = llama_8b()
    costs = {name: newton_schulz_flops(tuple(p.shape), 5) for name, p, _ in named}
    buckets, _ = lay_out(named, ZeroConfig().bucket_size, world, None, costs)
    loads, farthest = [0] * world, 0
    for bucket in buckets:
        before = loads.copy()
        for slot in bucket.slots:
            (owner,) = [rank for rank in range(world) if bucket.owned(slot, rank)[0].numel]
            assert bucket.owned(slot, owner)[0].numel == slot.numel
            loads[owner] += costs[slot.name]
        parts = [after - then for after, then in zip(loads, before, strict=True)]
        farthest = max(farthest, max(parts) - min(parts))
    assert max(loads) - min(loads) <= farthest  # for any number of buckets
    assert sum(loads) == sum(costs.values())
    assert {slot.name for bucket in buckets for slot in bucket.slots} == costs.keys()
    # the optimum is no less than the mean, nor than what the rank does that has ceil(matrices / ranks) of the largest
    largest = sorted(costs.values())[-96:]
    optimum = max(sum(loads) / world, largest[0] * -(-len(largest) // world))
    assert max(loads) <= 4 / 3 * optimum
    assert sum(bucket.numel for bucket in buckets) <= 9 / 8 * sum(p.numel() for _, p, _ in named)
    assert world == 1 or len(buckets) > 1  # one after the other while the backward pass runs
    held = sorted((bucket.start, bucket.shard_numel) for bucket in buckets)
    assert all(start + numel == after for (start, numel), (after, _) in zip(held, held[1:], strict=False))


def test_schedulers_cycle_the_momentum() -> None:
    trainer = Trainer(SMALL)
    optimizer = trainer.optimizer
    betas = [group["betas"] for group in optimizer.param_groups if not group["use_muon"]]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)
    momenta = set()
    for step in range(4):
        trainer.step(step)
        scheduler.step()
        momenta.add(optimizer.param_groups[0]["momentum"])
    assert len(momenta) >= 3
    assert [group["betas"] for group in optimizer.param_groups if not group["use_muon"]] == betas
