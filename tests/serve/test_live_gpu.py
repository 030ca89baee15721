"""Live weights between processes on GPUs: through CUDA IPC handles, without a copy by way of the host."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

import zerocast
from tests.devices import gpus
from tests.serve.test_export import model
from tests.serve.test_live import assert_same, collected
from zerocast.serve import Receiver, Sender

pytestmark = gpus(2)


def raw(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The bytes on the CPU: torch pickles FP8 tensors in a way that it cannot read."""
    return {name: tensor.cpu().contiguous().view(-1).view(torch.uint8) for name, tensor in tensors.items()}


def by_handles(fmt: str, naming: str) -> None:
    """Rank 0 trains; rank 1 opens its tensors where they lie, and copies what it applies."""
    alone = dist.new_group([0], use_local_synchronization=True) if dist.get_rank() == 0 else None
    device = torch.device("cuda", torch.cuda.current_device())
    source = model(fmt).to(device)
    optimizer = zerocast.ZeroAdamW(source.named_parameters(), lr=1e-3, group=alone) if alone is not None else None
    sender = Sender(source, naming, group=alone, bucket_bytes=30_000) if alone is not None else None
    receiver = Receiver(device=device)
    for number in range(3):
        if sender is not None and optimizer is not None:
            if number:
                for parameter in source.parameters():
                    parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, device=device)
                optimizer.step()
            for message in sender.named_deltas(number) if number else sender.named_tensors():
                torch.cuda.synchronize()
                handles = [reduce_tensor(t) if t.numel() else None for t in message.tensors]
                dist.broadcast_object_list([[dict(message.header), handles]], src=0, device=device)
                dist.barrier()  # the receiver has copied them
            dist.broadcast_object_list([raw(collected(source, naming))], src=0, device=device)
            continue
        kind = ""
        while kind != "end":
            received: list[Any] = [None]
            dist.broadcast_object_list(received, src=0, device=device)
            header, handles = received[0]
            empty = torch.empty(0, dtype=torch.uint8, device=device)
            tensors = [empty if handle is None else handle[0](*handle[1]) for handle in handles]
            receiver.accept(header, [tensor.to(device) for tensor in tensors])
            torch.cuda.synchronize()
            del tensors
            dist.barrier()
            kind = header["kind"]
        expected: list[Any] = [None]
        dist.broadcast_object_list(expected, src=0, device=device)
        assert_same(raw(receiver.tensors), expected[0])


@pytest.mark.parametrize(("fmt", "naming"), [("fp8_block", "deepseek"), ("nvfp4", "modelopt")])
def test_cuda_ipc(gpu_ranks: Any, fmt: str, naming: str) -> None:
    gpu_ranks(2)(by_handles, fmt, naming)


def on_a_gpu(fmt: str, naming: str) -> None:
    """What ranks find over NCCL is what the live bytes are."""
    device = torch.device("cuda", torch.cuda.current_device())
    source = model(fmt).to(device)
    optimizer = zerocast.ZeroAdamW(source.named_parameters(), lr=1e-4)
    sender, receiver = Sender(source, naming, bucket_bytes=30_000), Receiver(device=device)
    for number in range(3):
        if number:
            for parameter in source.parameters():
                parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, device=device)
            optimizer.step()
        for message in sender.named_deltas(number) if number else sender.named_tensors():
            receiver.accept(message.header, message.tensors)
        assert_same(dict(receiver.tensors), collected(source, naming))


@pytest.mark.parametrize(("fmt", "naming"), [("fp8_block", "deepseek"), ("nvfp4", "modelopt"), ("nvfp4", "bf16")])
def test_deltas_over_nccl(gpu_ranks: Any, fmt: str, naming: str) -> None:
    gpu_ranks(2)(on_a_gpu, fmt, naming)
