"""Captured steps on GPUs, NCCL's collectives in the graph: the bits of ordinary steps."""

import contextlib
import dataclasses
import functools

import pytest
import torch
from torch import Tensor, nn

import zerocast
from tests.devices import worlds_of_gpus
from tests.fsdp2 import test_captured as under_fsdp2
from tests.fsdp2.models import FORMATS
from tests.gemm.test_compiled import Mlp
from tests.optim.runs import compare_with_captured, rank
from tests.optim.test_captured import CASES, graphs_after_a_move

pytestmark = pytest.mark.parametrize("world", worlds_of_gpus(1, 2))
SECONDS = 180.0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_replaying_equals_stepping(gpu_ranks, world, case):
    """The result of the comparison is the number of skipped steps."""
    assert (
        gpu_ranks(world)(compare_with_captured, dataclasses.replace(case, device="cuda"), timeout=SECONDS)
        == [1] * world
    )


def test_storage_that_moves_on_the_last_rank(gpu_ranks, world):
    """The rank whose storage moves takes one step without a graph, with the collectives of the others' graphs."""
    others = [[True] * 4] * (world - 1)
    found = gpu_ranks(world)(graphs_after_a_move, "cuda", world - 1, timeout=SECONDS)
    assert found == [*others, [True, False, True, True]]


@pytest.mark.parametrize("keep_codes", [False, True])
@pytest.mark.parametrize("moment_dtype", [torch.float32, "8bit"], ids=str)
def test_replaying_equals_stepping_under_fsdp2(gpu_ranks, world, keep_codes, moment_dtype):
    """Gradients lie elsewhere at every step, and the all-reduce of amaxes is in the graph."""
    found = gpu_ranks(world)(under_fsdp2.compared, keep_codes, FORMATS, moment_dtype, timeout=SECONDS)
    assert found == [["1 graphs, casts {6}, works at 1 addresses"]] * world


def test_what_has_changed_is_recorded_again_under_fsdp2(gpu_ranks, world):
    assert gpu_ranks(world)(under_fsdp2.after_changes, timeout=SECONDS) == [[2] * len(under_fsdp2.CHANGES)] * world


def test_what_has_changed_on_the_last_rank_under_fsdp2(gpu_ranks, world):
    found = gpu_ranks(world)(under_fsdp2.after_changes, under_fsdp2.OF_ONE_RANK, [world - 1], timeout=SECONDS)
    assert found == [*[[1, 1, 1]] * (world - 1), [2, 2, 2]]


def trained(fmt: str, mode: str | None, device: str) -> list[Tensor]:
    """Return the masters after four steps of two micro-batches, with two blocks that are compiled one by one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = nn.ModuleList([Mlp(256, 512), Mlp(256, 512)]).to(device, torch.bfloat16)
    zerocast.quantize_(blocks, zerocast.Recipe({f"*.{name}.weight": fmt for name in ("gate", "up", "down")}, fast=True))
    for block in blocks:
        block.compile(fullgraph=True, mode=mode)
    config = zerocast.ZeroConfig(deterministic=True, overlap_all_gather=True)
    optimizer = zerocast.ZeroAdamW(blocks.named_parameters(), lr=1e-2, config=config)
    random = torch.Generator(device).manual_seed(rank())
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        for context in (optimizer.no_sync(), contextlib.nullcontext()):
            x = torch.randn(128, 256, generator=random, device=device).bfloat16()
            with context:
                functools.reduce(lambda x, block: block(x), blocks, x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # Each of several ranks returns its own part.
    return [getattr(master, "flat", master).clone() for master in optimizer.state_dict()["model"].values()]


def trained_with_and_without_graphs(fmt: str, device: str) -> tuple[bool, bool]:
    """Return whether masters are equal, and whether the compiler has recorded graphs."""
    pairs = list(zip(trained(fmt, None, device), trained(fmt, "reduce-overhead", device), strict=True))
    manager = torch._inductor.cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return len(pairs) == 10 and all(torch.equal(*pair) for pair in pairs), manager is not None


@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_block", "nvfp4:exact_in_fp8"])
def test_compiled_blocks_in_cuda_graphs(gpu_ranks, world, fmt):
    """The compiler's graphs read weights that ZeroAdamW writes in place, and their gradients stay in the graphs' memory."""
    assert gpu_ranks(world)(trained_with_and_without_graphs, fmt, "cuda", timeout=SECONDS) == [(True, True)] * world
