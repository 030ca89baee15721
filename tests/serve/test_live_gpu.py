"""Live weights between processes on GPUs: through CUDA IPC handles, without a copy by way of the host."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

import zerocast
from tests.devices import gpus
from tests.serve.test_export import model
from tests.serve.test_live import assert_same, collected, set_gradients, step
from zerocast.serve import Message, Receiver, Sender

NAMINGS = [("fp8_block", "deepseek"), ("nvfp4", "modelopt")]


def raw(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The bytes on the CPU: torch pickles FP8 tensors in a way that it cannot read."""
    return {name: tensor.cpu().contiguous().view(-1).view(torch.uint8) for name, tensor in tensors.items()}


def broadcast(value: Any = None) -> Any:
    """From rank 0 to rank 1, over NCCL or gloo."""
    values = [value]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else None
    dist.broadcast_object_list(values, src=0, device=device)
    return values[0]


def hand_over(messages: Iterable[Message]) -> None:
    """Send from rank 0 the headers of a refit with the handles of its tensors, each until the other process has copied them."""
    for message in messages:
        torch.cuda.synchronize()
        broadcast((dict(message.header), [reduce_tensor(t) if t.numel() else None for t in message.tensors]))
        dist.barrier()


def take(receiver: Receiver, device: torch.device) -> None:
    """Open the tensors on rank 1 where they are, and copy what is applied."""
    kind = ""
    while kind != "end":
        header, handles = broadcast()
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        tensors = [empty if handle is None else handle[0](*handle[1]) for handle in handles]
        receiver.accept(header, [tensor.to(device) for tensor in tensors])
        torch.cuda.synchronize()
        del tensors
        dist.barrier()
        kind = header["kind"]


def by_handles(fmt: str, naming: str) -> None:
    """Rank 0 trains; rank 1 receives, on the same GPU or on its own."""
    device = torch.device("cuda", torch.cuda.current_device())
    if dist.get_rank() == 1:
        receiver = Receiver(device=device)
        for _ in range(4):
            take(receiver, device)
            assert_same(raw(receiver.tensors), broadcast())
        return
    alone = dist.new_group([0], use_local_synchronization=True)
    source = model(fmt).to(device)
    optimizer = zerocast.ZeroAdamW(source.named_parameters(), lr=1e-3, group=alone)
    sender = Sender(source, naming, group=alone, bucket_bytes=30_000)
    for number in range(4):
        for _ in range(number):  # more and more casts between two refits
            step(source, optimizer)
        hand_over(sender.named_deltas(number) if number else sender.named_tensors())
        broadcast(raw(collected(source, naming)))


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "naming"), NAMINGS)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_ipc_on_one_gpu(ranks: Any, fmt: str, naming: str) -> None:
    """Two processes, one GPU, a process group of gloo for the headers."""
    ranks(2)(by_handles, fmt, naming)


@pytest.mark.parametrize(("fmt", "naming"), [pytest.param(*case, marks=gpus(2)) for case in NAMINGS])
def test_cuda_ipc(gpu_ranks: Any, fmt: str, naming: str) -> None:
    gpu_ranks(2)(by_handles, fmt, naming)


def on_a_gpu(fmt: str, naming: str, is_captured: bool = False) -> None:
    """What is sent, on ranks over NCCL, is what the live bytes are; a delta finds what captured steps have changed."""
    device = torch.device("cuda", torch.cuda.current_device())
    source = model(fmt).to(device)
    optimizer = zerocast.ZeroAdamW(source.named_parameters(), lr=1e-3)
    take_step = optimizer.capture() if is_captured else optimizer.step
    sender = Sender(source, naming, bucket_bytes=30_000)
    receiver = Receiver(device=device)
    for number in range(4):
        for _ in range(number):
            set_gradients(source)
            take_step()
        for message in sender.named_deltas(number) if number else sender.named_tensors():
            receiver.accept(message.header, message.tensors)
        assert_same(dict(receiver.tensors), collected(source, naming))


@pytest.mark.parametrize(
    ("fmt", "naming"), [pytest.param(*case, marks=gpus(2)) for case in [*NAMINGS, ("nvfp4", "bf16")]]
)
def test_deltas_over_nccl(gpu_ranks: Any, fmt: str, naming: str) -> None:
    gpu_ranks(2)(on_a_gpu, fmt, naming)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp4", "nvfp4", "fp8_current"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_changes_of_captured_steps(fmt: str) -> None:
    on_a_gpu(fmt, "bf16", is_captured=True)
