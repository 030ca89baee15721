"""On one GPU a model of transformers generates, in a process of its own, the tokens of the trainer's own forward pass, from bytes
that came through CUDA IPC handles.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocast
import zerocast.gemm
from tests.serve.models import in_bf16, made, quantized
from tests.serve.test_live_gpu import hand_over, take
from zerocast.serve import Receiver, Sender, dequantized

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@torch.no_grad()
def spoken(model: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits of a sequence, and what follows a prompt: whole forward passes, on the CPU."""
    ids = torch.arange(5, 13, device=device).view(1, 8)
    for _ in range(12):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return model(torch.arange(24, device=device).view(2, 12)).logits.float().cpu(), ids.cpu()


def generator(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    model = in_bf16(made("llama")).to(device)
    parameters, receiver, found = dict(model.named_parameters()), Receiver(device=device), []
    for _ in range(3):
        take(receiver, device)
        for name, value in dequantized(receiver.tensors):
            parameters[name].data.copy_(value)
        found.append(spoken(model, device))
    return found


def trainer(device: torch.device, fmt: str, naming: str) -> list[tuple[Tensor, Tensor]]:
    alone = dist.new_group([0], use_local_synchronization=True)
    source: nn.Module = in_bf16(quantized("llama", fmt, "llama").to(device))
    optimizer = zerocast.ZeroAdamW(source.named_parameters(), lr=1e-3, group=alone)
    sender = Sender(source, naming, group=alone, bucket_bytes=10**6)
    ids, found = torch.arange(24, device=device).view(2, 12), []
    for number in range(3):
        for turn in range(2 * number):
            source(ids, labels=ids.roll(number + turn, 1)).loss.backward()
            optimizer.step()
        hand_over(sender.named_deltas(number) if number else sender.named_tensors())
        found.append(spoken(source, device))
    return found


def rollout(fmt: str, naming: str) -> list[tuple[Tensor, Tensor]]:
    device = torch.device("cuda", torch.cuda.current_device())
    with zerocast.gemm.use(
        "dequantize"
    ):  # the generator computes in bf16: so has the trainer, to be compared to the bit
        return generator(device) if dist.get_rank() else trainer(device, fmt, naming)


@pytest.mark.parametrize(("fmt", "naming"), [("fp8_block", "deepseek"), ("nvfp4", "modelopt")])
def test_a_generator_beside_its_trainer(ranks: Any, fmt: str, naming: str) -> None:
    own, other = ranks(2)(rollout, fmt, naming)
    for number, ((wanted, tokens), (found, generated)) in enumerate(zip(own, other, strict=True)):
        assert torch.equal(found, wanted), number
        assert torch.equal(generated, tokens)
    assert not torch.equal(own[0][0], own[1][0])
