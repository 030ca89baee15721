"""Tokens/s of torchtitan's llama3 under its own Trainer: bf16, its float8 converter (torchao), and ours.

    torchrun --nproc-per-node 2 -m tests.benchmarks.torchtitan_step --variant fp8_current+fp8_wgrad

The widths are those of its flavor 8B, with fewer layers and a smaller vocabulary; blocks are compiled, nothing is recomputed. A
Trainer takes a process, so a run is one variant: `bf16`, `torchao`, or a format, with `+fp8_wgrad` as in `zerocast bench step`.
Prints what torchtitan logs: tokens/s a rank as the median of the logs after the first two, the peak of reserved memory, the loss.
Needs torchtitan ([which](../../integrations/torchtitan)); the text is that of `tests/torchtitan`.
"""

import argparse
import dataclasses
import json
import statistics
from typing import Any

import torch.distributed as dist

import zerocast
from tests.torchtitan.torchrun import without_datasets

SKIPPED, LOG_EVERY = 2, 5  # logs, steps
CONVERTERS = {
    "torchao": [
        "--model.converters=quantize.linear.float8",
        "--quantize.linear.float8.enable_fsdp_float8_all_gather",
        "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
        "--quantize.linear.float8.filter_fqns=output",
        "--optimizer.implementation=fused",
    ],
    "bf16": ["--optimizer.implementation=fused"],
}


class Recorded:
    """A stand-in for torchtitan's logger that keeps what it is told."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Keep the metrics of a step."""
        self.logs.append(metrics)

    def close(self) -> None:
        """Do nothing: torchtitan closes its logger at the end of a run."""


def register(layers: int, vocabulary: int) -> None:
    """Register the flavor `bench` of models `bench` and `bench_zerocast`, on the text of the tests."""
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    from tests.torchtitan.corpus import dataloader

    for name in ("llama3", "llama3_zerocast"):
        spec = get_train_spec(name)
        widths = dataclasses.replace(spec.model_args["8B"], n_layers=layers, vocab_size=vocabulary)
        spec = dataclasses.replace(
            spec, model_args={"bench": widths}, build_dataloader_fn=dataloader, build_tokenizer_fn=None
        )
        register_train_spec(name.replace("llama3", "bench"), spec)


def arguments(options: argparse.Namespace) -> list[str]:
    """Return the command line of torchtitan."""
    fmt, _, weight_gradients = options.variant.partition("+")
    recipe = f"--quantize.linear.zerocast.recipe=layers.*={fmt}"
    ours = ["--model.converters=quantize.linear.zerocast", recipe, "--optimizer.implementation=zerocast"]
    zerocast.gemm.use(weight_gradients="fp8" if weight_gradients else "nominal")
    return [
        "--job.custom_config_module=zerocast.integrations.torchtitan",
        f"--model.name={'bench' if fmt in CONVERTERS else 'bench_zerocast'}",
        "--model.flavor=bench",
        *CONVERTERS.get(fmt, ours),
        *([] if options.eager else ["--compile.enable"]),
        "--activation_checkpoint.mode=none",
        f"--training.seq_len={options.seq}",
        "--training.local_batch_size=1",
        f"--training.steps={options.steps}",
        "--lr_scheduler.warmup_steps=2",
        "--debug.seed=0",
        f"--metrics.log_freq={LOG_EVERY}",
    ]


def main() -> None:
    """Train, and print a line of JSON on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="bf16")
    for name, value in (("layers", 8), ("vocabulary", 32768), ("seq", 8192), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    with without_datasets():
        from torchtitan.config import ConfigManager
        from torchtitan.train import Trainer

        register(options.layers, options.vocabulary)
        trainer = Trainer(ConfigManager().parse_args(arguments(options)))
    trainer.metrics_processor.logger = recorded = Recorded()
    trainer.train()
    if dist.get_rank() == 0:
        logs = recorded.logs[SKIPPED:]
        row = {
            "variant": options.variant,
            "ranks": dist.get_world_size(),
            "tokens_per_s": dist.get_world_size() * statistics.median(log["throughput(tps)"] for log in logs),
            "step_ms": statistics.median(log["time_metrics/end_to_end(s)"] for log in logs) * 1e3,
            "max_reserved_gib": max(log["memory/max_reserved(GiB)"] for log in recorded.logs),
            "loss": logs[-1]["loss_metrics/global_avg_loss"],
        }
        print(json.dumps(row), flush=True)
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
