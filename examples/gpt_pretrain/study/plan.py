"""The plan of the study, fixed before it was run: variants, seeds and sizes.

Change nothing here to make a result look better. A change makes every finished run one of another
plan, which is trained again.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from examples.gpt_pretrain.config import TrainConfig
from examples.gpt_pretrain.model import GPTConfig

BASELINE = "bf16"
CONTROL = "nvfp4_no_masters"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    BASELINE: {"format": "bf16"},
    "fp8_current": {"format": "fp8_current"},
    "fp8_block": {"format": "fp8_block"},
    "mxfp8": {"format": "mxfp8"},
    "nvfp4": {"format": "nvfp4"},
    CONTROL: {"format": "nvfp4", "keep_masters": False},
}
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Size:
    """A size of the study: the configuration that its runs share, and the number of ranks."""

    ranks: int
    config: TrainConfig


# Products dequantize on a GPU too: tensor cores would round the inputs as well, and the study is
# about weights.
_COMMON = TrainConfig(gemm="dequantize", min_lr_ratio=0.1, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0)

SIZES: Mapping[str, Size] = {
    # 3.2 M parameters, 0.4 M tokens: a minute or two on two cores.
    "cpu": Size(
        ranks=2,
        config=dataclasses.replace(
            _COMMON,
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
    # 101 M parameters, 33 M tokens: meant for a minute or two on one H200.
    "h200": Size(
        ranks=1,
        config=dataclasses.replace(
            _COMMON,
            model=GPTConfig(n_layer=8, n_head=8, n_embd=1024, context=1024),
            steps=1000,
            batch_size=32,
            lr=6e-4,
            warmup_steps=100,
            eval_every=1000,
            eval_sequences=512,
            bucket_size=1 << 24,
            device="cuda",
        ),
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
        return f"{self.variant}-{self.seed}"


def jobs(size: Size) -> Iterator[Job]:
    """All runs, seed by seed, so that an interrupted study has complete comparisons."""
    for seed in SEEDS:
        for variant, changes in VARIANTS.items():
            yield Job(variant, seed, size.ranks, dataclasses.replace(size.config, seed=seed, **changes))
