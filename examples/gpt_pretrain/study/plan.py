"""The plans of the study, each fixed before its first run: variants, seeds, sizes and text.

Change nothing here to make a result look better. A change makes every finished run part of a
different plan, and all runs are trained again. README.md has the purpose of each row and the rules
of the conclusions.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.gpt_pretrain.config import TrainConfig
from examples.gpt_pretrain.model import GPTConfig

BASELINE = "bf16"
CONTROL = "nvfp4_no_masters"
Variants = Mapping[str, Mapping[str, Any]]
# Products dequantize: tensor cores would round the inputs as well, and this plan is about weights.
WEIGHTS: Variants = {
    BASELINE: {"format": "bf16"},
    "fp8_current": {"format": "fp8_current"},
    "fp8_block": {"format": "fp8_block"},
    "mxfp8": {"format": "mxfp8"},
    "nvfp4": {"format": "nvfp4"},
    CONTROL: {"format": "nvfp4", "keep_masters": False},
}
# As one trains on a GPU: on tensor cores where the format has them, which rounds inputs too. In the
# order in which they are run.
TRAINING: Variants = {
    BASELINE: {"format": "bf16"},
    "bf16 in two": {"format": "bf16", "batch_size": 8, "grad_accum": 2},  # chance: other roundings
    "nvfp4": {"format": "nvfp4"},
    "mxfp4": {"format": "mxfp4"},
    "fp8_current": {"format": "fp8_current"},
    "fp8_block": {"format": "fp8_block"},
    "fp8_block, FP8 weight gradients": {"format": "fp8_block", "weight_gradients": "fp8"},
    "nvfp4, bf16 end": {"format": "nvfp4", "late_share": 0.15},
    "mxfp8 square": {"format": "mxfp8:block=32x32"},
    "mxfp4 OCP": {"format": "mxfp4:scale_rounding=floor"},
    "nvfp4, no masters": {"format": "nvfp4", "keep_masters": False},
}
# FP8 weight gradients, as `Recipe(fast=True)` trains: the rows whose speed is on the first page.
PAIRED: Variants = {
    BASELINE: {"format": "bf16"},
    "bf16 again": {"format": "bf16"},  # chance: a GPU does not add in the same order twice
    "fp8_current, fast": {"format": "fp8_current", "weight_gradients": "fp8"},
    "nvfp4": {"format": "nvfp4"},
    "nvfp4 exact in FP8, fast": {"format": "nvfp4:exact_in_fp8", "weight_gradients": "fp8"},
    "bf16, 8-bit moments": {"format": "bf16", "moments": "8bit"},
    "nvfp4, 8-bit moments": {"format": "nvfp4", "moments": "8bit"},
    "muon": {"format": "bf16", "optimizer": "muon"},
    "muon, 8-bit moments": {"format": "bf16", "optimizer": "muon", "moments": "8bit"},
}
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Size:
    """A size of the study: the configuration that its runs share, the number of ranks, its rows.

    `text` is the SHA-256 of the text, None for Python's standard library. `by_row` makes all seeds
    of a row before the next row, so that a time limit drops entire rows. `compared` maps a row to
    the row with which it is compared if that is not the baseline.
    """

    ranks: int
    config: TrainConfig
    variants: Variants = dataclasses.field(default_factory=lambda: WEIGHTS, hash=False)
    text: str | None = None
    by_row: bool = False
    seeds: Sequence[int] = SEEDS
    compared: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)


_COMMON = TrainConfig(min_lr_ratio=0.1, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0)

# 29.7 M parameters, 8.2 M bytes per run, none twice: some seconds on one H200.
_GPU = Size(
    ranks=1,
    config=dataclasses.replace(
        _COMMON,
        min_lr_ratio=0.0,
        model=GPTConfig(n_layer=6, n_head=10, n_embd=640, context=1024),
        batches="once",
        steps=500,
        batch_size=16,
        lr=1e-3,
        warmup_steps=50,
        log_every=5,
        eval_every=500,
        eval_sequences=1024,
        bucket_size=1 << 24,
        device="cuda",
    ),
    variants=TRAINING,
    text="8e6a12451cbf1425327b30a0ad14924d5f4959ee4df3c130510873e28662d773",
    by_row=True,
)

SIZES: Mapping[str, Size] = {
    # 3.2 M parameters, 0.2 M tokens: a minute or two on two cores.
    "cpu": Size(
        ranks=2,
        config=dataclasses.replace(
            _COMMON,
            gemm="dequantize",
            model=GPTConfig(n_layer=4, n_head=4, n_embd=256, context=256),
            steps=200,
            batch_size=4,
            lr=1.5e-3,
            warmup_steps=30,
            eval_every=200,
            eval_sequences=256,
            deterministic=True,
            device="cpu",
        ),
    ),
    "gpu": _GPU,
    # 13.1 M parameters, the steps and the text of "gpu": many pairs, to see a gap of 0.0025.
    "pairs": dataclasses.replace(
        _GPU,
        config=dataclasses.replace(_GPU.config, model=GPTConfig(n_layer=4, n_head=8, n_embd=512, context=1024)),
        variants=PAIRED,
        by_row=False,
        seeds=range(48),
        compared={"nvfp4, 8-bit moments": "nvfp4", "muon, 8-bit moments": "muon"},
    ),
}


@dataclass(frozen=True)
class Job:
    """One run of the study."""

    variant: str
    seed: int
    ranks: int
    config: TrainConfig

    @property
    def name(self) -> str:
        """The name of the run, on the console and on disk."""
        return f"{self.variant}-{self.seed}".replace(" ", "_").replace(",", "").replace("|", "-")


def jobs(size: Size) -> Iterator[Job]:
    """Yield all runs: seed by seed, so that an interrupted study has complete comparisons, or by
    row.
    """
    rows = [(variant, seed) for variant in size.variants for seed in size.seeds]
    for variant, seed in rows if size.by_row else sorted(rows, key=lambda row: row[1]):
        yield Job(variant, seed, size.ranks, dataclasses.replace(size.config, seed=seed, **size.variants[variant]))
