"""accelerate's `fsdp_version: 2` with fsdp2_recipe, by accelerate's own functions on a CPU.

accelerate chooses FSDP on GPUs alone, so its choice is made for it here (`AcceleratorState.is_fsdp2`). Everything behind that is
its own code: `prepare`, clipping, accumulation, saving and loading. `tests/nccl/test_accelerate.py` runs these cases on GPUs, where
the choice is its own too.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zerocast
from tests import casts
from tests.fsdp2 import models
from tests.workers import Ranks, error_of

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: make readers")

from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin  # noqa: E402

from zerocast.integrations.huggingface import Accelerator  # noqa: E402

FORMAT = "nvfp4"
RECIPE = {"*.weight": FORMAT}
STEPS, ACCUMULATED, CLIP = 2, 2, 0.05


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))


def batch(number: int) -> Tensor:
    seed = number * dist.get_world_size() + dist.get_rank()
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).to(models.place())


def whole(model: nn.Module) -> dict[str, Tensor]:
    found: Any = model.named_parameters()
    return {name: parameter.full_tensor().clone() for name, parameter in found}


@contextlib.contextmanager
def configured(**options: Any) -> Iterator[FullyShardedDataParallelPlugin]:
    """Let accelerate be configured for FSDP2 in the ranks of a pool, and on a CPU choose it."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1, **options
    )
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    # torchrun sets these. The process group is there already.
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    AcceleratorState._reset_state(reset_partial_state=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, launched))
        stack.callback(AcceleratorState._reset_state, reset_partial_state=True)
        if models.place() == "cpu":
            stack.enter_context(mock.patch.object(AcceleratorState, "is_fsdp2", new=True))
            stack.enter_context(mock.patch.object(AcceleratorState, "fsdp_plugin", new=plugin, create=True))
            stack.enter_context(mock.patch.object(Accelerator, "distributed_type", new=DistributedType.FSDP))
        yield plugin


def accelerator_of(plugin: FullyShardedDataParallelPlugin, **options: Any) -> Accelerator:
    """Return the Accelerator of a rank. On a GPU accelerate chooses FSDP2 by its plugin."""
    on_cpu = models.place() == "cpu"
    found = Accelerator(cpu=on_cpu, fsdp_plugin=None if on_cpu else plugin, fsdp2_recipe=RECIPE, **options)
    assert found.is_fsdp2
    assert found.distributed_type is DistributedType.FSDP
    return found


def by_accelerate(folder: str, fused: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], bool, Tensor]:
    """Return the masters after some steps, and after more steps, a load and those steps again; whether the
    weights verify; and the losses.
    """
    with configured(cpu_ram_efficient_loading=False) as plugin:
        accelerator = accelerator_of(plugin, gradient_accumulation_steps=ACCUMULATED)
        # On a CPU, from where FSDP2 moves it.
        made, losses = net(), []
        kind: Any = zerocast.fsdp2.FusedAdamW if fused else torch.optim.AdamW
        # Built before the model is sharded, as accelerate asks for.
        model, optimizer = accelerator.prepare(made, kind(made.parameters(), lr=1e-2))

        def train(first: int) -> dict[str, Tensor]:
            for number in range(first, first + STEPS * ACCUMULATED):
                with accelerator.accumulate(model):
                    loss = model(batch(number)).square().mean()
                    losses.append(loss.detach())
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
            return whole(model)

        before = train(0)
        ok = zerocast.verify(model).ok
        accelerator.save_state(folder)
        once = train(STEPS * ACCUMULATED)
        accelerator.load_state(folder)
        assert all(torch.equal(value, before[name]) for name, value in whole(model).items())
        again = train(STEPS * ACCUMULATED)
        state = accelerator.get_state_dict(model)
        # On a GPU, accelerate copies the state to the host.
        assert not state or all(torch.equal(state[name].cpu(), value.cpu()) for name, value in again.items())
        assert all(torch.equal(once[name], value) for name, value in again.items())
        return before, again, ok, torch.stack(losses)[: STEPS * ACCUMULATED]


def by_hand(fused: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Return masters and losses of the same steps in a hand-written loop. The first loss is that of the plain
    model with the dequantized weights.
    """
    model: Any = zerocast.fsdp2.prepare(net().to(models.place()), RECIPE)
    mesh, losses = models.mesh(), []
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    kind: Any = zerocast.fsdp2.FusedAdamW if fused else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2)
    for number in range(STEPS * ACCUMULATED):
        ends = number % ACCUMULATED == ACCUMULATED - 1
        model.set_requires_gradient_sync(ends)
        loss = model(batch(number)).square().mean()
        losses.append(loss.detach())
        (loss / ACCUMULATED).backward()
        if ends:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return whole(model), torch.stack(losses)


def of_dequantized() -> Tensor:
    """Return the first loss of a plain model whose weights are the dequantized ones."""
    plain = net().to(models.place())
    for layer in plain:
        weight = casts.cast_whole(FORMAT, layer.weight.detach().cpu(), torch.float32).dequantize()
        layer.weight.data = weight.to(layer.weight.device)
    with torch.no_grad():
        return plain(batch(0)).square().mean()


def compared(folder: str, fused: bool) -> tuple[bool, float, float, float]:
    """Return whether weights verify, the largest differences of masters and losses from a hand-written loop,
    and of the first loss from that of dequantized weights.
    """
    before, _, ok, losses = by_accelerate(folder, fused)
    masters, expected = by_hand(fused)
    of_masters = max(float((before[name] - value).abs().max()) for name, value in masters.items())
    return ok, of_masters, float((losses - expected).abs().max()), float((losses[0] - of_dequantized()).abs())


@pytest.mark.parametrize("fused", [False, True])
def test_trains_saves_and_loads(ranks: Ranks, tmp_path: Any, fused: bool) -> None:
    check(ranks(2)(compared, str(tmp_path / "state"), fused))


def check(results: list[tuple[bool, float, float, float]]) -> None:
    """Assert what `compared` found on all ranks."""
    for ok, *differences in results:
        assert ok
        # accelerate computes the clip's factor from groups of gradients.
        assert max(differences) <= 1e-6, differences


def refused() -> list[str]:
    said = []
    with configured(cpu_ram_efficient_loading=True):
        said.append(error_of(lambda: Accelerator(cpu=True, fsdp2_recipe=RECIPE)))
    with configured(cpu_ram_efficient_loading=False):
        quantized = zerocast.quantize_(net(), RECIPE)
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        said.append(error_of(lambda: Accelerator(cpu=True).prepare(quantized, optimizer)))
        model = net()
        optimizers = (
            zerocast.ZeroAdamW(model.named_parameters()),
            zerocast.fsdp2.FusedAdamW(model.named_parameters(), moment_dtype="8bit"),
        )
        accelerator = Accelerator(cpu=True, fsdp2_recipe=RECIPE)
        said += [error_of(functools.partial(accelerator.prepare, model, optimizer)) for optimizer in optimizers]
    return said


def test_what_is_refused(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="fsdp2_recipe needs accelerate configured with fsdp_version: 2"):
        Accelerator(cpu=True, fsdp2_recipe=RECIPE)
    for loading, quantized, *laid_out in ranks(2)(refused):
        assert "set fsdp_cpu_ram_efficient_loading: false" in loading
        assert "pass this Accelerator fsdp2_recipe=recipe and a model in FP32" in quantized
        for error, name in zip(laid_out, ("ZeroAdamW", "FusedAdamW"), strict=True):
            assert f"for which this {name} is laid out" in error
