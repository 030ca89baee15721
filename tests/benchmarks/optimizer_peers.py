"""AdamW with moments in 8 bits beside its peers: torchao's, bitsandbytes' and FlashOptim's, where they are installed.

    python -m tests.benchmarks.optimizer_peers step              # one GPU: state, memory and time of a step
    python -m tests.benchmarks.optimizer_peers loss text.bin     # one GPU: the loss of 500 steps of the GPT example
    python -m tests.benchmarks.optimizer_peers shards            # whose weights depend on the number of ranks

All take FP32 parameters and gradients, but FlashOptim's with its 24 bits of weights: bf16 parameters and gradients. `shards`
starts 1, 2 and 3 ranks, which share the GPUs that there are; each owns rows of the same weights, and has the same gradients.
"""

import argparse
import contextlib
import gc
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from examples.gpt_pretrain.data import Corpus
from examples.gpt_pretrain.model import GPT, GPTConfig
from zerocast.bench.llama import SHAPES, Llama
from zerocast.fsdp2 import FusedAdamW

Named = Sequence[tuple[str, nn.Parameter]]
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WORLDS = (1, 2, 3)
# Shapes that three ranks share evenly, and shapes that they do not. Rows of 256 elements are whole blocks of every peer.
EVEN = {"rows of 256": (96, 256), "rows of 264": (96, 264), "vector": (6144,)}
UNEVEN = {"rows of 256": (100, 256), "rows of 264": (100, 264), "vector": (6145,)}


def torchao_adamw(named: Named, lr: float) -> torch.optim.Optimizer:
    """Return torchao's AdamW8bit: blocks of 256 elements of a local shard whose size they divide."""
    from torchao.optim import AdamW8bit

    return AdamW8bit([parameter for _, parameter in named], lr=lr, **OPTIONS)


def bitsandbytes_adamw(named: Named, lr: float) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW8bit: blocks of 256 elements of a local shard of 4,096 or more."""
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit([parameter for _, parameter in named], lr=lr, **OPTIONS)


def flashoptim_adamw(named: Named, lr: float) -> torch.optim.Optimizer:
    """Return FlashOptim's AdamW: groups of 32 elements of a local shard, companded; bf16 parameters have 8 more bits."""
    from flashoptim import FlashAdamW

    parameters = [parameter for _, parameter in named]
    bits = 24 if parameters[0].dtype == torch.bfloat16 else None
    return FlashAdamW(parameters, lr=lr, master_weight_bits=bits, **OPTIONS)


@dataclass(frozen=True)
class Peer:
    """An optimizer, the dtype of the parameters that it is given, and whether it takes DTensors."""

    make: Callable[[Named, float], torch.optim.Optimizer]
    dtype: torch.dtype = torch.float32
    takes_dtensors: bool = True


PEERS = {
    "torch AdamW, fused": Peer(
        lambda named, lr: torch.optim.AdamW([parameter for _, parameter in named], lr=lr, fused=True, **OPTIONS)
    ),
    "zerocast FusedAdamW": Peer(lambda named, lr: FusedAdamW(named, lr=lr, **OPTIONS)),
    "zerocast FusedAdamW, 8 bits": Peer(lambda named, lr: FusedAdamW(named, lr=lr, moment_dtype="8bit", **OPTIONS)),
    "torchao AdamW8bit": Peer(torchao_adamw),
    "bitsandbytes AdamW8bit": Peer(bitsandbytes_adamw, takes_dtensors=False),
    "FlashOptim AdamW": Peer(flashoptim_adamw),
    "FlashOptim AdamW, 24-bit weights": Peer(flashoptim_adamw, torch.bfloat16),
}


@contextlib.contextmanager
def said(name: str) -> Iterator[None]:
    """Print why a row cannot be made, and go on with the others."""
    try:
        yield
    except Exception as error:
        print(f"{name:34} {type(error).__name__}: {str(error)[:160]}", flush=True)


def time_steps(peers: Mapping[str, Peer], device: torch.device, runs: int = 20) -> None:
    """Print bytes of state an element, the most memory that a step takes beside, and its time, for two blocks of
    Llama-3-8B.
    """
    with torch.device("meta"):
        model = Llama(SHAPES["llama3-8b"], 2, 256, 128)
    shapes = {name: p.shape for name, p in model.named_parameters() if "block" in name or "layers" in name}
    numel = sum(shape.numel() for shape in shapes.values())
    print(f"{numel:,} elements, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, peer in peers.items():
        with said(name):
            _time_steps(name, peer, shapes, numel, device, runs)
        gc.collect()
        torch.cuda.empty_cache()


def _time_steps(
    name: str, peer: Peer, shapes: dict[str, torch.Size], numel: int, device: torch.device, runs: int
) -> None:
    torch.cuda.reset_peak_memory_stats()
    named = [
        (key, nn.Parameter(torch.empty(shape, dtype=peer.dtype, device=device).normal_(0, 0.02)))
        for key, shape in shapes.items()
    ]
    for _, parameter in named:
        parameter.grad = torch.empty_like(parameter).normal_(0, 1e-3)
    before = torch.cuda.memory_allocated()
    optimizer = peer.make(named, 1e-5)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    state = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    times, host = [], []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        began = time.perf_counter()
        optimizer.step()
        host.append(1e3 * (time.perf_counter() - began))
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    beside = torch.cuda.max_memory_allocated() - before - state
    print(
        f"{name:34} {state / numel:6.3f} bytes of state, {beside / numel:6.3f} beside, {statistics.median(times):7.3f} ms, "
        f"host {statistics.median(host):6.2f} ms",
        flush=True,
    )


def compare_losses(
    peers: Mapping[str, Peer], text: Path, device: torch.device, steps: int = 500, batch: int = 16
) -> None:
    """Print validation losses of a GPT of 13 M parameters after `steps` steps of the same batches."""
    config = GPTConfig(n_layer=4, n_head=8, n_embd=512, context=1024)
    if device.type == "cpu":
        config = GPTConfig(n_layer=1, n_head=2, n_embd=128, context=64)
    corpus = Corpus(text.read_bytes(), config.context)
    for name, peer in peers.items():
        with said(name):
            loss = _train(peer, corpus, config, device, steps, batch)
            print(f"{name:34} validation loss {loss:.4f} after {steps} steps", flush=True)


def _train(peer: Peer, corpus: Corpus, config: GPTConfig, device: torch.device, steps: int, batch: int) -> float:
    torch.manual_seed(0)
    model = GPT(config).to(device)
    if peer.dtype != torch.float32:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data = parameter.data.to(peer.dtype)
    optimizer = peer.make(list(model.named_parameters()), 1e-3)
    peak = 1e-3
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=peer.dtype == torch.float32)
    for step in range(steps):
        for group in optimizer.param_groups:
            lr = peak * min(1.0, (step + 1) / 50, 2 * (steps - step) / steps)
            # torchao's is a tensor, which is filled.
            group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], Tensor) else lr
        trained = corpus.batch_once(batch, seed=0, index=step).to(device)
        with autocast:
            loss = model.loss(trained.tokens, trained.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    sequences = 64 * batch if device.type == "cuda" else batch
    held_out = (part.to(device) for part in corpus.validation_batches(batch, sequences, rank=0, ranks=1))
    with torch.no_grad(), autocast:
        losses = [model.loss(part.tokens, part.targets) for part in held_out]
    return float(torch.stack(losses).mean())


def compare_shards(peers: Sequence[str], device: str) -> None:
    """Print for each optimizer whether 1, 2 and 3 ranks end with the same weights after 20 steps."""
    with tempfile.TemporaryDirectory() as folder:
        for world in WORLDS:
            torch.multiprocessing.spawn(_train_shards, (peers, world, device, folder), nprocs=world)
        for name in peers:
            verdicts = []
            for kind, shapes in (("even", EVEN), ("uneven", UNEVEN)):
                digests = {key: [_digest(Path(folder), name, kind, key, world) for world in WORLDS] for key in shapes}
                differ = [key for key, found in digests.items() if len(set(found)) > 1]
                errors = sorted({error for found in digests.values() for error in found if error.startswith("!")})
                verdict = f"differ in {', '.join(differ)}" if differ else "the same"
                verdicts.append(f"{kind} shards: {' '.join(errors)[:150] if errors else verdict}")
            print(f"{name:34} {'; '.join(verdicts)}", flush=True)


def _train_shards(rank: int, peers: Sequence[str], world: int, device_type: str, folder: str) -> None:
    """Run a rank of `compare_shards`. It writes its rows of each weight, or why there are none."""
    store = dist.FileStore(f"{folder}/store{world}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device_type, (world,))
    for name in peers:
        for kind, shapes in (("even", EVEN), ("uneven", UNEVEN)):
            result: Any
            try:
                result = _shards(PEERS[name], shapes, mesh, rank, world, device)
            except Exception as error:
                result = f"!{type(error).__name__}: {error}"
            torch.save(result, Path(folder) / f"{name}-{kind}-{world}-{rank}")
            dist.barrier()
    dist.destroy_process_group()


def _shards(
    peer: Peer, shapes: dict[str, Any], mesh: Any, rank: int, world: int, device: torch.device
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def sharded(whole: Tensor) -> Tensor:
        rows = -(-whole.shape[0] // world)
        own = whole[rank * rows : (rank + 1) * rows].to(device, peer.dtype).contiguous()
        if not peer.takes_dtensors:
            return own
        return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    named = [
        (key, nn.Parameter(sharded(torch.randn(shape, generator=generator) / 50))) for key, shape in shapes.items()
    ]
    optimizer = peer.make(named, 1e-3)
    for _ in range(20):
        for (_, parameter), shape in zip(named, shapes.values(), strict=True):
            sizes = torch.randn(shape, generator=generator).exp()
            parameter.grad = sharded(torch.randn(shape, generator=generator) * sizes / 100)
        optimizer.step()
    return {key: _local(parameter).float().cpu() for key, parameter in named}


def _local(parameter: Tensor) -> Tensor:
    return parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()


def _digest(folder: Path, name: str, kind: str, key: str, world: int) -> str:
    parts = [torch.load(folder / f"{name}-{kind}-{world}-{rank}") for rank in range(world)]
    errors = [part for part in parts if isinstance(part, str)]
    if errors:
        return errors[0]
    return hashlib.sha256(torch.cat([part[key] for part in parts]).numpy().tobytes()).hexdigest()


def main() -> None:
    """Print the rows that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=("step", "loss", "shards"))
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS))
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if arguments.question == "shards":
        return compare_shards(arguments.only, arguments.device)
    device = torch.device(arguments.device)
    peers = {name: PEERS[name] for name in arguments.only}
    if arguments.question == "step":
        return time_steps(peers, device)
    if arguments.text is None:
        parser.error("loss takes a text")
    return compare_losses(peers, arguments.text, device, arguments.steps)


if __name__ == "__main__":
    main()
