"""Optimizer CPU offload, on the ranks of a pool."""

import contextlib
import gc
import importlib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from tests import casts
from tests.megatron import host_memory, training
from tests.megatron.attached import Attached
from tests.megatron.ranks_host import device
from tests.megatron.training import MIXED, Case, Run, build, build_attached
from tests.workers import error_of
from zerocast import verify
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import host as megatron_names
from zerocast.integrations.megatron import offload
from zerocast.integrations.megatron.offload import CpuMaster


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


def _copies(run: Run) -> list[Tensor]:
    """The copies of masters in host memory, as the host has them."""
    own = run.optimizer.chained_optimizers
    return [copy for one in own for copy in offload.cpu_copies(one.optimizer).values()]


def count_offloaded(run: Run, attached: Any) -> int:
    """Count the masters that the host says that it has offloaded. As many tensors stand for one in host memory, and a plan or a
    rounded parameter reads as many there.
    """
    copies = _copies(run)
    shards = [shard for plan in attached.plans for shard in plan._partition.shards]
    plain = [shard.master for share in attached._shares for shard in share.driver.host.plain]
    read = [shard.master for shard in shards if shard.on_cpu]
    read += [master for master in plain if master is not None and any(master is copy for copy in copies)]
    standing = sum(isinstance(master, CpuMaster) for _, master in _masters(run))
    cast_there = sum(any(master is copy for copy in copies) for master in read)
    assert len(copies) == standing == cast_there
    return len(copies)


def on_host(tensor: Tensor) -> bool:
    return host_memory.on_host(tensor) if device().type == "cpu" else not tensor.is_cuda


def _masters(run: Run) -> Iterator[tuple[Any, Tensor]]:
    """Parameters with the masters of this rank."""
    for one in run.optimizer.chained_optimizers:
        for params, masters in (
            (one.model_float16_groups, one.shard_fp32_from_float16_groups),
            (one.model_fp32_groups, one.shard_fp32_groups),
        ):
            for group, mains in zip(params, masters, strict=True):
                yield from zip(group, mains, strict=True)


def train(case: Case) -> int:
    """Train an attached model, and check its bytes. Returns the number of masters in host memory."""
    with case.host():
        run, attached = build_attached(case)
        run.train()
        assert verify(attached).ok
        return count_offloaded(run, attached)


@contextlib.contextmanager
def on_the_device() -> Iterator[None]:
    """Inside, masters come back from the host after each update, as Megatron does it, and are cast on the device."""
    with made_on_the_device(), mock.patch.object(offload, "keep_on_cpu", return_value=None):
        yield


def made_on_the_device() -> AbstractContextManager[Any]:
    """Inside, `attach` brings masters to the host, as those of TransformerEngine's tensors."""
    return mock.patch.object(offload, "one_by_one", lambda build: build)


def compare_with_the_device(case: Case) -> None:
    """After some steps all is as in a run whose masters are copied to the device and cast there, to the bit."""
    with case.host():
        ours = Attached(case)
        with on_the_device():
            theirs = Attached(case)
            their_losses = [theirs.run.step(number) for number in range(3)]
            expected = theirs.everything()
        assert [ours.run.step(number) for number in range(3)] == their_losses
        found = ours.everything()
        assert found.keys() == expected.keys()
        casts.assert_same_bytes(found, expected)
        assert count_offloaded(ours.run, ours.attachment) > 0


class Memory(NamedTuple):
    """Bytes of a GPU between steps: in use, and predicted from the tensors that a run needs there; how many more a step of the
    optimizer takes; and those of the masters that the host updates.
    """

    live: int
    predicted: int
    step: int
    masters: int


def memory(case: Case) -> tuple[Memory, Memory]:
    """Measure a run of 16.8 million elements with masters in host memory, and one where they are on the device as well."""
    found = []
    with case.host(), mock.patch.object(training, "WIDTHS", (2048,) * 5):
        for way in (on_the_device(), contextlib.nullcontext(), on_the_device()):  # once for the workspaces of products
            gc.collect()
            before = torch.cuda.memory_allocated()
            with way:
                run, _ = build_attached(case)
                for number in range(2):
                    run.step(number)
                run.force_sync()
                torch.cuda.synchronize()
                live, predicted = torch.cuda.memory_allocated() - before, _needed_on_the_device(run)
                run.forward_and_backward(2)
                start = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                run.optimizer.step()
                step = torch.cuda.max_memory_allocated() - start
            found.append(Memory(live, predicted, step, sum(copy.nbytes for copy in _copies(run))))
            del run, _
    return found[1], found[2]


def _needed_on_the_device(run: Run) -> int:
    """Bytes of parameters, copies by columns, scales and gradients, and of the masters that are on the device."""
    buffers = [buffer for one in run.optimizer.chained_optimizers for buffer in one.buffers]
    tensors = [t for buffer in buffers for bucket in buffer.buckets for t in (bucket.param_data, bucket.grad_data)]
    tensors += [t for weight in run.weights.values() for t in weight.state.buffers.values()]
    tensors += [param.data for name, param in run.ddp.module.named_parameters() if name not in run.weights]
    tensors += [master for _, master in _masters(run) if not isinstance(master, CpuMaster)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def build_one_by_one(case: Case) -> None:
    """Check that building an optimizer makes the masters in CPU memory, which Megatron chooses, on the device one by one."""
    with case.host():
        kind, alive, most = importlib.import_module(megatron_names.OPTIMIZER).DistributedOptimizer, [], 0
        original = kind._build_model_and_main_param_groups

        def build_and_look(*args: Any) -> Any:
            nonlocal most
            result = original(*args)
            alive.extend(weakref.ref(master) for group in result[-1] for master in group)
            most = max(most, sum(ref() is not None for ref in alive))
            return result

        looking = mock.patch.object(kind, "_build_model_and_main_param_groups", build_and_look)
        with looking, integration.quantized_params():
            ours = build(case)
        with made_on_the_device(), integration.quantized_params():
            theirs = build(case)
        copies = [master for one in theirs.optimizer.chained_optimizers for master in offload.cpu_copies(one.optimizer)]
        chosen = [any(master is copied for copied in copies) for _, master in _masters(theirs)]
        hosted = [isinstance(master, CpuMaster) for _, master in _masters(ours)]
        assert hosted == chosen and any(hosted)
        assert most <= 2 + chosen.count(False)


def reattach(case: Case) -> None:
    """Steps with a detached moment between them, in which all is as Megatron made it, are those of an uninterrupted run. An
    attachment that fails half-way leaves nothing changed.
    """
    with case.host():
        straight, broken = Attached(case), Attached(case)
        for number in range(2):
            straight.run.step(number)
            broken.run.step(number)
        before, offloads = broken.run.masters(), count_offloaded(broken.run, broken.attachment)
        broken.attachment.detach()
        masters = list(_masters(broken.run))
        copies = [offload.cpu_copies(one.optimizer) for one in broken.own]
        inner = [p for one in broken.own for group in one.optimizer.param_groups for p in group["params"]]
        assert not any(isinstance(m, CpuMaster) or on_host(m) for m in [m for _, m in masters] + inner)
        assert {id(m) for _, m in masters} == {id(p) for p in inner}
        for param, master in masters:
            if param.dtype == torch.float32:
                assert master.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()
            else:
                assert param.main_param is master
        after = broken.run.masters()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        for master, copy in (pair for pairs in copies for pair in pairs.items()):
            assert on_host(copy) and torch.equal(master.detach().cpu(), copy)
        assert sum(map(len, copies)) == offloads > 0
        assert {id(p) for one in broken.own for p in one.optimizer.state} == {id(p) for p in inner}
        with mock.patch.object(integration.attachment, "build_share", side_effect=MemoryError("no memory")):
            assert "no memory" in error_of(lambda: integration.attach(broken.run.optimizer, broken.run.ddp))
        assert not any(isinstance(master, CpuMaster) for _, master in _masters(broken.run))
        broken.attachment = integration.attach(broken.run.optimizer, broken.run.ddp)
        for number in range(2, 4):
            straight.run.step(number)
            broken.run.step(number)
        casts.assert_same_bytes(broken.everything(), straight.everything())


def restore(case: Case) -> None:
    """The host's offload_to_cpu and restore_from_cpu between steps move to the device the state of the masters there, and nothing
    of an offloaded master's.
    """
    with case.host():
        run, _ = build_attached(case)
        run.step(0)
        run.optimizer.offload_to_cpu()
        moved: list[Tensor] = []
        with mock.patch.object(Tensor, "cuda", lambda tensor: moved.append(tensor) or tensor):
            run.optimizer.restore_from_cpu()
        others = 0
        for one in run.optimizer.chained_optimizers:
            for master, state in one.optimizer.state.items():
                names = [name for name, value in state.items() if any(value is tensor for tensor in moved)]
                if master in offload.cpu_copies(one.optimizer):
                    assert not names
                others += len(names)
        assert others > 0
        run.step(1)
        assert not run.stale_bytes()
