"""GPT pre-training on megatron-core's own model, DistributedDataParallel and DistributedOptimizer,
with quantized weights.

    torchrun --nproc-per-node 8 -m examples.megatron.pretrain_gpt --format nvfp4  # one GPU per rank
    torchrun --nproc-per-node 2 -m examples.megatron.pretrain_gpt --format nvfp4 --cpu

The text is drawn from a first-order Markov chain, so that there is something to learn and nothing
to download.
"""

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor

import zerocast
from zerocast.integrations.megatron import attach, quantized_params

VOCABULARY = 64


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--format", default="nvfp4", help="fp8_current, fp8_block, nvfp4, or bf16 for none")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--overlap", action="store_true", help="overlap gradient reduction and weight gathers with computation"
    )
    parser.add_argument("--cpu", action="store_true", help="gloo and the CPU, by the stand-ins of tests/megatron")
    return parser.parse_args()


@contextlib.contextmanager
def ranks(cpu: bool) -> Iterator[torch.device]:
    """The process group and Megatron's groups of it; the device of this rank."""
    dist.init_process_group("gloo" if cpu else "nccl")
    parallel_state.initialize_model_parallel()
    with contextlib.ExitStack() as stack:
        if cpu:
            from tests.megatron.host_on_cpu import host_on_cpu  # noqa: PLC0415

            stack.enter_context(host_on_cpu())
            device = torch.device("cpu")
        else:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield device
    dist.destroy_process_group()


def build(args: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    """Return (DistributedDataParallel, optimizer) over a model whose attention and MLP weights are
    quantized.
    """
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=4,
        use_cpu_initialization=args.cpu,
        params_dtype=torch.bfloat16,
        bf16=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, args.sequence).to(device, torch.bfloat16)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=args.overlap,
        overlap_param_gather=args.overlap,
        grad_reduce_in_fp32=True,
    )
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        overlap_param_gather=args.overlap,
    )
    with quantized_params():
        if args.format != "bf16":
            zerocast.quantize_(model, zerocast.Recipe({"*.linear_*.weight": args.format}))
        ddp = DistributedDataParallel(config, ddp_config, model)
        optimizer = get_megatron_optimizer(optimizer_config, [ddp])
    attach(optimizer, ddp)
    return ddp, optimizer


def text(args: argparse.Namespace, step: int, device: torch.device) -> Tensor:
    """int64 `[batch, sequence + 1]` from a chain that prefers a few successors of each token."""
    chain = torch.rand(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)).pow(12)
    generator = torch.Generator().manual_seed(1 + step * dist.get_world_size() + dist.get_rank())
    tokens = [torch.randint(VOCABULARY, (args.batch,), generator=generator)]
    for _ in range(args.sequence):
        tokens.append(torch.multinomial(chain[tokens[-1]], 1, generator=generator).view(-1))
    return torch.stack(tokens, 1).to(device)


def train(args: argparse.Namespace, device: torch.device) -> list[float]:
    """Return the loss of each step, the mean over all ranks."""
    torch.manual_seed(1)
    ddp, optimizer = build(args, device)
    positions = torch.arange(args.sequence, device=device).expand(args.batch, -1)
    mask = torch.ones(args.sequence, args.sequence, device=device).tril().logical_not()[None, None]
    losses = []
    for step in range(args.steps):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        tokens = text(args, step, device)
        loss = ddp(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous()).float().mean()
        loss.backward()
        ddp.finish_grad_sync()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if dist.get_rank() == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:4}  loss {losses[-1]:.4f}")
    return losses


def main() -> None:
    """Train, as the command line says."""
    args = arguments()
    with ranks(args.cpu) as device:
        train(args, device)


if __name__ == "__main__":
    main()
