"""What `verify_every` and debug mode say of an attached host. What verify finds: tests/hosts/test_verify.py."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import zerocast
from tests.devices import gpus
from tests.megatron import muon
from tests.megatron.host_on_cpu import needs_megatron
from tests.megatron.ranks_host import host
from tests.megatron.training import FORMATS, MIXED, NARROW, Case, build_attached
from tests.observed import debug_mode
from tests.workers import Ranks, error_of, on_ranks
from zerocast import QuantizedWeight, verify
from zerocast.integrations import megatron as integration


def _flip_on_rank_1(tensor: Tensor, at: int) -> None:
    if dist.get_rank() == 1:
        tensor.view(-1).view(torch.uint8)[at] ^= 1


def _break(group: Any, weight: QuantizedWeight) -> None:
    """From now on, on rank 1, a byte of the weight is wrong after each of its gathers."""
    broken = weight.state.columnwise_cast

    def breaking(gather: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            nonlocal broken
            gather(*args, **kwargs)
            if weight.state.columnwise_cast != broken:
                _flip_on_rank_1(weight.state.rowwise_data, 5)
                broken = weight.state.columnwise_cast

        return call

    group.start_param_sync, group.finish_param_sync = map(breaking, (group.start_param_sync, group.finish_param_sync))


@on_ranks(2)
def test_debug_mode() -> None:
    advice = r".* call attachment.refresh\(\).*force_sync=True"
    with debug_mode(), host():
        run, _ = build_attached(Case(NARROW, overlap=True))
        weight = next(iter(run.weights.values()))
        (own,) = run.optimizer.chained_optimizers
        run.step(0)
        run.step(1)
        run.force_sync()
        weight.dequantize()
        original = own._copy_main_params_to_model_params

        def look_and_copy() -> None:
            with pytest.raises(RuntimeError, match=f"updated its masters since its last cast{advice}"):
                weight.dequantize()
            original()

        own._copy_main_params_to_model_params = mock.Mock(side_effect=look_and_copy)
        run.step(2)
        assert own._copy_main_params_to_model_params.called
        run.force_sync()
        weight.dequantize()


def offload_between_steps(whole_matrices: bool) -> None:
    """The host's offload_to_cpu frees the memory of masters, and no byte is stale after the next step."""
    case = Case("fp8_current")
    with muon.host(case) if whole_matrices else case.host():
        run, attached = (muon.build_attached if whole_matrices else build_attached)(case)
        masters = [m for one in run.optimizer.chained_optimizers for m in _masters_in(one)]
        run.step(0)
        memory = [StorageWeakRef(master.data.untyped_storage()) for master in masters]
        for master in masters if masters[0].device.type == "cpu" else ():  # which the host leaves where they are
            master.data = master.data.clone()
        run.optimizer.offload_to_cpu()
        assert all(storage.expired() for storage in memory)
        run.optimizer.restore_from_cpu()
        run.step(1)
        run.force_sync()
        assert not run.stale_bytes() and verify(attached).ok


def _masters_in(one: Any) -> list[Tensor]:
    parts = getattr(one, "chained_optimizers", [one])
    return [master for part in parts for group in part.optimizer.param_groups for master in group["params"]]


pytestmark = needs_megatron


@on_ranks(2)
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("every", [1, 2])
def test_verify_every(every: int, overlap: bool) -> None:
    """From the second of four steps on rank 1 flips a byte after each gather."""
    fmt = zerocast.Recipe(FORMATS[MIXED]).format_of("layers.1.weight")
    with host():
        run, _ = build_attached(Case(MIXED, overlap), verify_every=every)
        weight = dict(run.ddp.module.named_parameters())["layers.1.weight"]
        for number in range(4):
            if number == 1:
                (group,) = (g for g in run.ddp.bucket_groups if any(weight in b.params for b in g.buckets))
                _break(group, weight)
            said = error_of(lambda number=number: run.step(number))
            assert bool(said) == (number in (1, 3) or (number == 2 and every == 1))
            assert not said or f"layers.1.weight ({fmt}) on rank 1: rowwise_data differs in 1 of " in said


@pytest.mark.parametrize("whole_matrices", [False, True], ids=["slices", "whole matrices"])
def test_offloaded_masters_leave_no_memory_in_use(ranks: Ranks, whole_matrices: bool) -> None:
    if whole_matrices and muon.WHY_NO_MUON:
        pytest.skip(muon.WHY_NO_MUON)
    ranks(2)(offload_between_steps, whole_matrices)


@pytest.mark.parametrize("world", [pytest.param(1, marks=gpus(1))])
def test_offloaded_masters_leave_no_memory_of_a_gpu_in_use(gpu_ranks: Ranks, world: int) -> None:
    gpu_ranks(world)(offload_between_steps, False, timeout=240.0)


@pytest.mark.parametrize("every", [0, -1])
def test_every_is_checked(every: Any) -> None:
    with pytest.raises(ValueError, match=f"verify_every is None or at least 1, got {every}"):
        integration.attach(None, None, verify_every=every)
