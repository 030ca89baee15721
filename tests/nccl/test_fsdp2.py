"""FSDP2 over NCCL: the cases of `tests/fsdp2`, which compute on GPUs where their group is NCCL's, and gathers beside compute."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile

import zerocast
from tests.devices import gpus
from tests.fsdp2 import (
    models,
    test_bits,
    test_freshness,
    test_fused_adamw,
    test_gradient_wire,
    test_loops,
    test_moments_8bit,
    test_optimizers,
    test_replicas,
    test_shard_placement,
    test_tensor_parallel,
    test_views,
    test_wire,
)
from tests.fsdp2.models import FORMATS, SMALL
from tests.observed import logged

pytestmark = gpus(2)
SECONDS = 120.0  # the first case compiles Triton's kernels
LARGEST = {"shard_placement_fn": models.largest}
CLEAN: dict[str, tuple[Any, ...]] = {  # cases that assert, or return complaints
    "every format": (test_bits.trained, FORMATS, 64, 96, {}),
    "boundaries on blocks": (test_bits.trained, FORMATS, 64, 64, {}),
    "empty shards": (test_bits.trained, SMALL, 130, 1, {}),
    "columns": (test_shard_placement.matrices, FORMATS, 64, 512, "FusedAdamW", LARGEST),
    "experts in slices": (test_shard_placement.experts, FORMATS, "FusedAdamW"),
    "left gathered": (test_bits.trained, FORMATS, 64, 96, {"reshard_after_forward": False}),
    "replicas": (test_bits.on_mesh, (2, 1)),
    "meta": (test_bits.from_meta,),
    "optimizers": (test_optimizers.compare_all, "default", "foreach", "fused", "capturable", "capturable foreach"),
    **{f"{name} on all ranks": (test_freshness.changed, name, FORMATS, True) for name in test_freshness.CHANGES},
    "views": (test_views.written_everywhere, True),
    "views, left gathered": (test_views.written_everywhere, False),
    "views taken earlier": (test_views.written_later,),
    "compiled writes": (test_views.compiled_writes, True),
    "compiled optimizer": (test_optimizers.compare, "AdamW", ("default",), "aot_eager"),
    "refresh after one rank": (test_freshness.refreshed_after_one_rank,),
    "fused step": (test_fused_adamw.stepped, False),
    "fused step, codes kept": (test_fused_adamw.stepped, True),
    "steps within a backward pass": (test_loops.stepped_within, "sgd", False),
    "fused steps within a backward pass": (test_loops.stepped_within, "fused", True),
    "loops": (test_loops.changes, False, tuple(test_loops.DETOURS)),
    "8-bit moments in host memory": (test_moments_8bit.trained_on_the_host,),
}


def formats_of(case: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the formats that a case is known to cover."""
    if case[0] is test_bits.on_mesh:
        return test_bits.SOME
    return case[1] if case[0] is test_bits.trained else ()


@pytest.mark.shows(
    host="FSDP2",
    parallel=lambda case: "replicas" if case[0] is test_bits.on_mesh else "data",
    formats=formats_of,
    ranks=2,
)
@pytest.mark.parametrize("case", CLEAN.values(), ids=CLEAN)
def test_bytes_are_the_unsharded_cast(gpu_ranks, case):
    assert not any(gpu_ranks(2)(*case, timeout=SECONDS))


def passes_after_a_change_on_one(grad: bool) -> tuple[int, str]:
    """Return the number of forward passes that succeed after a change on one rank, and the error of the next."""
    model = models.sharded(models.Net(models.FEW, 64, 96))
    zerocast.fsdp2.refresh(model)
    if dist.get_rank() == 1:
        test_freshness.write_data(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for done in range(3):
        try:
            with torch.set_grad_enabled(grad):
                loss = model(models.batch(0, 64)).float().square().mean()
            if grad:
                loss.backward()
                optimizer.step()
        except RuntimeError as error:
            return done, str(error)
    return 3, "nothing"


@pytest.mark.parametrize("grad", [False, True])
def test_a_change_on_one_rank_raises_on_both_at_once(gpu_ranks, grad):
    """The host reads what ranks said of their bytes a step late, before the same cast on each. An evaluation
    reads it in its pass.
    """
    first, second = gpu_ranks(2)(passes_after_a_change_on_one, grad, timeout=SECONDS)
    assert first == second
    assert first[0] == grad and "was changed on ranks [1] of its shard group and not on ranks [0]" in first[1]


OPTIMIZERS = {"torch": torch.optim.AdamW, "fused": zerocast.fsdp2.FusedAdamW}
CYCLES = 2_000_000_000  # about a second of a GPU


def waits_of(host: str, optimizer: str) -> tuple[bool, list[str]]:
    """Return whether a step was issued while the device was busy, and the copies of pageable memory in three steps."""
    model = models.Net(models.FEW, 256, 512)
    if host == "FSDP2":
        models.sharded(model)
        steps = OPTIMIZERS[optimizer](model.parameters(), lr=1e-3)
    else:
        model = zerocast.quantize_(model.to("cuda", torch.bfloat16), zerocast.Recipe(model.recipe))
        steps = zerocast.ZeroAdamW(model.named_parameters(), lr=1e-3)
    dtype = torch.float32 if host == "FSDP2" else torch.bfloat16
    batches = [models.batch(step, 256).to(dtype) for step in range(6)]

    def train(inputs: list[torch.Tensor]) -> None:
        for x in inputs:
            model(x).float().square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.step()
            steps.zero_grad()

    train(batches[:3])
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        torch.cuda._sleep(CYCLES)
        before = torch.cuda.Event()
        before.record()
        train(batches[3:4])
        is_ahead = not before.query()
        train(batches[4:])
    return is_ahead, [event.name for event in profiler.events() if "Pageable" in event.name]


@pytest.mark.parametrize(("host", "optimizer"), [("FSDP2", "torch"), ("FSDP2", "fused"), ("ZeroAdamW", "")])
def test_the_host_does_not_wait_within_a_step(gpu_ranks, host, optimizer):
    assert gpu_ranks(2)(waits_of, host, optimizer, timeout=SECONDS) == [(True, [])] * 2


@pytest.mark.shows(host="FSDP2", parallel="tensor", formats=lambda fmt: [fmt], ranks=2)
@pytest.mark.parametrize(("fmt", "hidden"), test_tensor_parallel.SLICED)
def test_slices(gpu_ranks, fmt, hidden):
    gpu_ranks(2)(test_tensor_parallel.slices, fmt, hidden, timeout=SECONDS)


@pytest.mark.parametrize("event", test_replicas.EVENTS)
def test_all_replicas_raise(gpu_ranks, event):
    test_replicas.check(gpu_ranks, event, (2, 1), late=False, timeout=SECONDS)


@pytest.mark.parametrize("reshard", [True, False])
def test_accumulation(gpu_ranks, reshard):
    gpu_ranks(2)(test_bits.gradients, test_bits.Checkpointed, reshard, 3, timeout=SECONDS)


@pytest.mark.parametrize("fmt", test_wire.PER_ELEMENT)
def test_bytes_an_element(gpu_ranks, fmt):
    found = gpu_ranks(2)(test_wire.gathered_bytes, fmt, timeout=SECONDS)
    assert found == pytest.approx([test_wire.PER_ELEMENT[fmt]] * 2, abs=5e-4)


def test_gradients_travel_as_fp8(gpu_ranks):
    for kinds, equal in gpu_ranks(2)(test_gradient_wire.reduced, torch.float32, 1, timeout=SECONDS):
        assert equal and kinds.count("all-to-all") == 1


PATHS = {"fp8_current": "per_tensor", models.DELAYED: "per_tensor", "fp8_block": "block_128"}
OPS = {"aten::_scaled_mm", "aten::_scaled_mm_v2", "zerocast::dequantize"}


Found = tuple[list[float], dict[str, tuple[str, str]], set[str]]


def on_tensor_cores(formats: tuple[str, ...], how: str, setting: str = "") -> Found:
    """Return the losses of three steps, what the report says of the gathered weights, and the operators that
    computed products.
    """
    torch._dynamo.reset()
    model = (test_bits.Checkpointed if setting == "checkpointed" else models.Net)(formats, 256, 512)
    zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe))
    for block in model.blocks if how == "blocks" else ():
        block.compile(fullgraph=True)
    replicas = {"mesh": models.mesh((2, 1), ("replicate", "shard"))}
    models.sharded(model, prepare=False, **(replicas if setting == "replicas" else {}))
    function = torch.compile(model) if how == "whole" else model
    return products_of(model, function, [models.batch(step, 256, rows=64) for step in range(3)])


def slices_on_tensor_cores(fmt: str, how: str) -> Found:
    """Train two slices of tensor parallelism. Return what `products_of` does."""
    torch._dynamo.reset()
    model = test_tensor_parallel.parallel(fmt, hidden=512)
    inputs = [models.batch(step, test_tensor_parallel.WIDTH, rank=0, rows=64) for step in range(3)]
    return products_of(model, torch.compile(model) if how else model, inputs)


def products_of(model: Any, function: Any, inputs: list[torch.Tensor]) -> Found:
    """Return the losses, reported paths by format, and operators, of steps on these inputs."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for x in inputs:
            loss = function(x.requires_grad_()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    rows = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            rows |= {row.format: (row.path, row.reason) for row in zerocast.backends.report(module).layers}
            module.reshard()
    return losses, rows, {event.name for event in profiler.events()} & OPS


@pytest.fixture
def hopper() -> None:
    """Hopper's paths to tensor cores are what is expected."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper's paths")


def assert_products(runs: list[list[Found]], formats: tuple[str, ...], compiled: set[str]) -> None:
    """Check that runs agree with the first one, which is eager, and that all multiply on tensor cores and report it."""
    expected = {fmt.split(":")[0]: (PATHS[fmt], "") for fmt in formats}
    for run in runs:
        for (losses, rows, operators), (eager, *_) in zip(run, runs[0], strict=True):
            assert losses == pytest.approx(eager, rel=0.05)
            assert {fmt.split(":")[0]: row for fmt, row in rows.items()} == expected
            assert operators == compiled


def test_products_run_on_tensor_cores_compiled_too(gpu_ranks, hopper):
    """Products run on tensor cores, compiled by block without a graph break and whole, from the gathered weights."""
    runs = [gpu_ranks(2)(on_tensor_cores, tuple(PATHS), how, timeout=SECONDS) for how in ("", "blocks", "whole")]
    assert_products(runs, tuple(PATHS), {"aten::_scaled_mm", "aten::_scaled_mm_v2"})


@pytest.mark.parametrize("setting", ["replicas", "checkpointed"])
def test_products_of_a_setting_run_on_tensor_cores(gpu_ranks, hopper, setting):
    """Hybrid sharding, and blocks that are recomputed, multiply on tensor cores, eager and compiled by block."""
    runs = [gpu_ranks(2)(on_tensor_cores, tuple(PATHS), how, setting, timeout=SECONDS) for how in ("", "blocks")]
    assert_products(runs, tuple(PATHS), {"aten::_scaled_mm", "aten::_scaled_mm_v2"})


@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_block"])
def test_products_of_slices_run_on_tensor_cores(gpu_ranks, hopper, fmt):
    runs = [gpu_ranks(2)(slices_on_tensor_cores, fmt, how, timeout=SECONDS) for how in ("", "whole")]
    assert_products(runs, (fmt,), {"aten::_scaled_mm" if fmt == "fp8_current" else "aten::_scaled_mm_v2"})


def fallbacks() -> list[str]:
    """Return the log of two steps with weights whose rows no product on tensor cores takes."""
    with logged("zerocast.gemm") as said:
        model = models.sharded(models.Net(("fp8_current",), 64, 90))
        models.train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2), 64)
    return said


def test_a_fallback_names_its_layer_once(gpu_ranks, hopper):
    for said in gpu_ranks(2)(fallbacks, timeout=SECONDS):
        assert [line.split(" are dequantized on a GPU that has tensor cores")[0] for line in said] == [
            "the products of blocks.0.1.weight",
            "the products of blocks.0.3.weight",
        ]


def overlap() -> float:
    """Return the microseconds in which a kernel of NCCL's all-gather ran beside another one, over three steps.

    So many rows that the devices are the slower ones: where the hosts are, the slower of them issues each gather to an idle device.
    """
    model = models.sharded(models.Net(("nvfp4",) * 6, 2048, 8192))
    optimizer = zerocast.fsdp2.FusedAdamW(model.parameters())
    batches = [models.batch(step, 2048, rows=32768) for step in range(5)]

    def train(inputs: list[torch.Tensor]) -> None:
        for x in inputs:
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(batches[:2])
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        train(batches[2:])
        torch.cuda.synchronize()
    kernels = [(event.name, event.time_range) for event in profiler.events() if event.device_type.name == "CUDA"]
    gathers = [time for name, time in kernels if "AllGather" in name]
    others = [time for name, time in kernels if "nccl" not in name.lower()]
    shared = (min(a.end, b.end) - max(a.start, b.start) for a in gathers for b in others)
    assert gathers and others, {name for name, _ in kernels}
    return float(sum(max(0.0, both) for both in shared))


def test_gathers_run_beside_compute(gpu_ranks):
    assert all(microseconds > 0 for microseconds in gpu_ranks(2)(overlap, timeout=SECONDS))
