"""Measure the accuracy that gradients in FP8 (`ZeroConfig.grad_wire`) cost, on a CPU.

`errors`: the reduced gradient of the GPT example beside the exact mean of what the ranks hold in bf16, at 2, 4 and 64 ranks that
this process plays one after another. A ring in bf16 adds around the ranks and rounds every partial sum, as NCCL's does.
`loss`: the example at 2 ranks over gloo, seed by seed, with bf16's reduce-scatter and with FP8; finished runs are not repeated.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import torch
from rich.console import Console
from torch import Tensor

from examples.gpt_pretrain.build import build_model, build_optimizer
from examples.gpt_pretrain.data import Batch, Corpus
from examples.gpt_pretrain.model import GPT
from examples.gpt_pretrain.progress import Progress
from examples.gpt_pretrain.study.plan import SIZES, Job
from examples.gpt_pretrain.study.runs import finished, train
from examples.gpt_pretrain.train import learning_rate, train_step
from zerocast import backends
from zerocast.backends import ops
from zerocast.bench import machine
from zerocast.formats.layout import GradientMessage

RANKS = (2, 4, 64)
WIRES = {"bf16": None, "fp8_1x128": "fp8_1x128"}
SEEDS = (0, 1, 2)
CONFIG = replace(SIZES["cpu"].config, deterministic=False)
CPU = torch.device("cpu")


def contributions(steps: int, ranks: int) -> Tensor:
    """Return the gradients of the ranks after `steps` of training, bf16 [ranks, n]. Parameters begin at
    multiples of 128.
    """
    config = replace(CONFIG, steps=max(steps, 1))
    torch.manual_seed(0)
    model, corpus = build_model(config, CPU), Corpus.load(config.data, config.model.context)
    optimizer = build_optimizer(model, config)

    def batch(step: int, rank: int) -> list[Batch]:
        return [corpus.train_batch(config.batch_size, seed=0, step=step, micro_step=0, rank=rank)]

    for step in range(steps):
        train_step(model, optimizer, batch(step, 0), lr=learning_rate(config, step), grad_clip=config.grad_clip)
    return torch.stack([_gradient(model, batch(steps, rank)[0]) for rank in range(ranks)])


def _gradient(model: GPT, batch: Batch) -> Tensor:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model.loss(batch.tokens, batch.targets), parameters)
    return torch.cat([torch.nn.functional.pad(g.bfloat16().flatten(), (0, -g.numel() % 128)) for g in gradients])


def ring_of_bf16(given: Tensor) -> Tensor:
    """Add around a ring of ranks, each part from its start to its owner. Every sum is rounded to bf16."""
    ranks = len(given)
    parts = (given / ranks).chunk(ranks, 1)  # exact: a power of two
    ends = []
    for owner, part in enumerate(parts):
        total = part[(owner + 1) % ranks]
        for hop in range(2, ranks + 1):
            total = total + part[(owner + hop) % ranks]
        ends.append(total)
    return torch.cat(ends)


def sum_in_fp32(given: Tensor) -> Tensor:
    """Return the mean, added in rank order in FP32, as with `deterministic`."""
    total = given[0].float()
    for part in given[1:]:
        total = total + part.float()
    return total / len(given)


def fp8_messages(given: Tensor) -> Tensor:
    """Return the sum by an owner of all elements."""
    ranks, numel = given.shape
    backend, nbytes = backends.choose(CPU), GradientMessage(numel).nbytes
    messages, out = torch.empty(ranks, nbytes, dtype=torch.uint8), torch.empty(numel)
    for gradient, message in zip(given, messages, strict=True):
        ops.quantize_gradient(backend, grad=gradient, parts=1, messages=message)
    ops.add_gradients(backend, messages=messages, parts=ranks, divisor=ranks, adds=False, out=out)
    return out


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "a ring of bf16": ring_of_bf16,
    "FP32 in rank order": sum_in_fp32,
    "fp8_1x128": fp8_messages,
}


def errors(steps: int) -> list[dict[str, object]]:
    """Return the error against the exact mean, and against the noise of batches, for each number of ranks and way."""
    rows: list[dict[str, object]] = []
    everything = contributions(steps, max(RANKS))
    for ranks in RANKS:
        given = everything[:ranks]
        exact = given.double().mean(0)
        noise = float((given.double() - exact).square().sum().div(ranks - 1).div(ranks).sqrt() / exact.norm())
        for name, way in WAYS.items():
            found = way(given).double()
            cosine = float(found @ exact / found.norm() / exact.norm())
            error = float((found - exact).norm() / exact.norm())
            rows.append(
                {"steps": steps, "ranks": ranks, "way": name, "error": error, "1 - cosine": 1 - cosine, "noise": noise}
            )
    return rows


def losses(out: Path, seeds: list[int], steps: int) -> dict[str, dict[int, float]]:
    """Return validation losses by wire and seed, and train what is missing."""
    found: dict[str, dict[int, float]] = {name: {} for name in WIRES}
    for seed in seeds:
        for name, wire in WIRES.items():
            config = replace(CONFIG, seed=seed, grad_wire=wire, steps=steps, eval_every=steps)
            job = Job(name, seed, 2, config)
            with Progress(Console(stderr=True), [job.name]) as progress:
                records = finished(job, out) or train(job, out, progress)
            found[name][seed] = float(records[-1]["validation_loss"])
    return found


def show_losses(found: dict[str, dict[int, float]]) -> str:
    """Return a table with a row for each seed, then the mean gap with its deviation."""
    gaps = [found["fp8_1x128"][seed] - loss for seed, loss in found["bf16"].items()]
    lines = ["| seed | bf16 | fp8_1x128 | gap |", "|---|---|---|---|"]
    for (seed, loss), gap in zip(found["bf16"].items(), gaps, strict=True):
        lines.append(f"| {seed} | {loss:.4f} | {found['fp8_1x128'][seed]:.4f} | {gap:+.4f} |")
    spread = stdev(gaps) if len(gaps) > 1 else math.nan
    between = stdev(found["bf16"].values()) if len(gaps) > 1 else math.nan
    return "\n".join([*lines, f"\ngap {fmean(gaps):+.4f} ± {spread:.4f}; bf16 moves by {between:.4f} between seeds"])


def show_errors(rows: list[dict[str, object]]) -> str:
    """Return the errors as a table with a row for each case."""
    lines = [
        "| after | ranks | way | error of the mean | 1 - cosine | of it between batches |",
        "|---|---|---|---|---|---|",
    ]
    text = "| {steps} steps | {ranks} | {way} | {error:.2e} | {1 - cosine:.1e} | {noise:.2f} |"
    return "\n".join([*lines, *(text.format_map(row) for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("errors", "loss"))
    parser.add_argument("--steps", type=int, nargs="+", help="errors: after how many; loss: how many")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("runs/gradient_wire"), help="folder of the runs of loss")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.what == "errors":
        rows = [row for steps in given.steps or (0, 50) for row in errors(steps)]
        print(json.dumps(rows) if given.json else show_errors(rows))
    else:
        found = losses(given.out, list(given.seeds), (given.steps or [CONFIG.steps])[0])
        print(json.dumps(found) if given.json else show_losses(found))
    print(json.dumps(machine.describe(CPU)))


if __name__ == "__main__":
    main()
