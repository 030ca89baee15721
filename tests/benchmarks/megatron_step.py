"""A step of Megatron's GPT of TransformerEngine's layers with FP8 primary weights, cast by Megatron alone or after `attach`.

    torchrun --nproc-per-node 2 -m tests.benchmarks.megatron_step --recipe blockwise
    torchrun --nproc-per-node 2 -m tests.benchmarks.megatron_step --recipe blockwise --attach

Llama's widths and options, 8 layers, gradients reduced in FP32, gathers and reductions beside the passes. Without a recipe weights
are bf16; with `--bf16-weights` they are, and each layer casts what it multiplies by. Prints the median step of the slowest rank,
the mean of steps between which nothing waits, how long the host is within `optimizer.step()`, and from a profile what the cast
takes of a step, from its first kernel to its last, and the gathers; the cast alone from and to an idle device, which counts what
the host does in it; and rank 0's loss in the first step and the last. With `--offload` and `--attach` masters are cast in host
memory, and with `--masters device` brought back first, as Megatron does it. Needs megatron-core, TransformerEngine and a GPU a
rank. `--cpu` tries it over gloo, with Megatron's own layers and without a recipe.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from zerocast.integrations.megatron import attach, offload, quantized_params

CAST, PROFILED = "cast", 2


def masters_on(side: str) -> AbstractContextManager[Any]:
    """Build and attach masters like Megatron for "device" while the context is open."""
    if side == "host":
        return nullcontext()
    return mock.patch.multiple(offload, one_by_one=lambda build: build, keep_on_cpu=lambda *_: None)


def build(options: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    """Return (DistributedDataParallel, optimizer), attached if asked for."""
    stored = bool(options.recipe) and not options.bf16_weights
    quantized = {"fp8": "hybrid", "fp8_recipe": options.recipe, "fp8_param": stored} if options.recipe else {}
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_hidden_size=options.ffn,
        num_attention_heads=options.hidden // 128,
        num_query_groups=max(1, options.hidden // 512),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm" if not options.cpu else "LayerNorm",
        add_bias_linear=False,
        params_dtype=torch.bfloat16,
        bf16=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        use_cpu_initialization=options.cpu,
        **quantized,
    )
    hybrid = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": options.offload,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_precision_aware_optimizer": True,
    }
    layers = get_gpt_layer_local_spec() if options.cpu else get_gpt_layer_with_transformer_engine_spec()
    with (
        masters_on(options.masters),
        quantized_params() if options.attach else nullcontext(),
    ):
        model = GPTModel(config, layers, options.vocabulary, options.seq, position_embedding_type="rope")
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            grad_reduce_in_fp32=True,
            fp8_param_gather=stored,
        )
        ddp = DistributedDataParallel(config, ddp_config, model.to(device).bfloat16() if options.cpu else model.cuda())
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
            **({"fp8_recipe": options.recipe} if options.recipe else {}),
            **(hybrid if options.offload else {}),
        )
        optimizer = get_megatron_optimizer(optimizer_config, [ddp])
    if options.attach:
        with masters_on(options.masters):
            attach(optimizer, ddp)
    return ddp, optimizer


def _is_cast_on_device(event: Any) -> bool:
    return event.key == CAST and event.device_type == DeviceType.CUDA


class Step:
    """A step of training, on tokens that stay the same."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(1)
        self.ddp, self.optimizer = build(options, device)
        self.device, self.optimizer_ms, self.cast_ms, self._waits = device, 0.0, 0.0, False
        for one in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            one._copy_main_params_to_model_params = self._annotated(one._copy_main_params_to_model_params)
        self._tokens = torch.randint(options.vocabulary, (1, options.seq + 1), device=device)
        self._positions = torch.arange(options.seq, device=device)[None]
        mask = torch.ones(options.seq, options.seq, device=device).tril().logical_not()[None, None]
        self._mask = mask if options.cpu else None  # TransformerEngine's layers are causal by themselves

    def _annotated(self, cast: Callable[[], Any]) -> Callable[[], Any]:
        """Return the cast under a name that a profile shows, timed from and to an idle device if it is to wait."""

        def run() -> Any:
            if self._waits:
                self.synchronize()
            start = time.perf_counter()
            with record_function(CAST):
                result = cast()
            if self._waits:
                self.synchronize()
            self.cast_ms += (time.perf_counter() - start) * 1e3
            return result

        return run

    def run(self) -> None:
        self.cast_ms = 0.0
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        tokens, labels = self._tokens[:, :-1].contiguous(), self._tokens[:, 1:].contiguous()
        loss = self.ddp(tokens, self._positions, self._mask, labels=labels).float().mean()
        loss.backward()
        self.loss = loss.detach()
        self.ddp.finish_grad_sync()
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer_ms = (time.perf_counter() - start) * 1e3

    def milliseconds(self) -> float:
        """Return the milliseconds of a step on the slowest rank, from and to idle devices."""
        self.synchronize()
        dist.barrier()
        start = time.perf_counter()
        self.run()
        self.synchronize()
        taken = torch.tensor((time.perf_counter() - start) * 1e3, device=self.device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    def free_running(self, steps: int) -> float:
        """Return the milliseconds of a step if nothing waits between steps."""
        self.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.run()
        self.synchronize()
        return (time.perf_counter() - start) * 1e3 / steps

    def waiting_cast(self) -> float:
        """Return the milliseconds of a step's casts alone."""
        self._waits = True
        self.run()
        self._waits = False
        return self.cast_ms

    def profiled(self) -> dict[str, float]:
        """Return the milliseconds a step of the kernels of the cast, and of all-gathers."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(PROFILED):
                self.run()
            self.synchronize()
        events = profiler.key_averages()
        gathers = sum(event.self_device_time_total for event in events if "ncclDevKernel_AllGather" in event.key)
        # The range on the device: no operator of torch launches TransformerEngine's kernels.
        casts = sum(event.self_device_time_total for event in events if _is_cast_on_device(event))
        times = {"cast_ms": casts, "gather_ms": gathers}
        return {name: microseconds / 1e3 / PROFILED for name, microseconds in times.items()}

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the median step and cast in ms, GiB in use between steps and at the peak of one, profile and
    losses, after four steps of warm-up.
    """
    step, on_a_gpu = Step(options, device), device.type == "cuda"
    step.run()
    first = step.loss
    for _ in range(3):
        step.run()
    if on_a_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = [(step.milliseconds(), step.optimizer_ms) for _ in range(options.steps)]
    casts = statistics.median(step.waiting_cast() for _ in range(options.steps))
    live, peak = (
        of() / 2**30 if on_a_gpu else None for of in (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated)
    )
    step_ms, host_ms = (statistics.median(values) for values in zip(*times, strict=True))
    found = {"step_ms": step_ms, "free_ms": step.free_running(options.steps), "optimizer_host_ms": host_ms}
    found |= {"waiting_cast_ms": casts, "live_gib": live, "peak_gib": peak, **step.profiled()}
    return {**found, "first_loss": float(first), "last_loss": float(step.loss)}


def main() -> None:
    """Print a line of JSON on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=("delayed", "tensorwise", "blockwise"))
    parser.add_argument("--attach", action="store_true")
    parser.add_argument("--bf16-weights", action="store_true", help="the optimizer's casts are to bf16")
    parser.add_argument("--offload", type=float, default=0.0, help="the fraction of masters that the host updates")
    parser.add_argument("--masters", choices=("host", "device"), default="host", help="where offloaded ones are cast")
    sizes = {"layers": 8, "hidden": 4096, "ffn": 14336, "vocabulary": 32768, "seq": 8192, "steps": 8}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo" if options.cpu else "nccl")
    parallel_state.initialize_model_parallel()
    if options.cpu:
        from tests.megatron.host_on_cpu import host_on_cpu

        with host_on_cpu():
            found = measure(options, torch.device("cpu"))
    else:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        found = measure(options, torch.device("cuda", torch.cuda.current_device()))
    if dist.get_rank() == 0:
        print(json.dumps({**vars(options), "ranks": dist.get_world_size(), **found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
