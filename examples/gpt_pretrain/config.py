"""The options of a run: one dataclass, from which tyro also builds the command line."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro

from examples.gpt_pretrain.model import GPTConfig

PROGRAM = "python -m examples.gpt_pretrain.train"
Format = Literal[
    "bf16",
    "fp8_current",
    "fp8_delayed",
    "fp8_block",
    "mxfp8",
    "mxfp8:block=32x32",
    "mxfp4",
    "mxfp4:scale_rounding=floor",
    "nvfp4",
    "nvfp4:exact_in_fp8",
    "int4",
]
Parallel = Literal["zero", "fsdp2", "hsdp", "fsdp2_tp"]


@dataclass(frozen=True)
class TrainConfig:
    """Pre-train a small byte-level GPT with quantized weights and FP32 master shards."""

    format: Format = "bf16"
    """Format of the matrices in the transformer blocks; bf16 quantizes nothing."""
    parallel: Parallel = "zero"
    """zero: ZeroAdamW or ZeroMuon. fsdp2: FSDP2 over all ranks; hsdp: in replicas; fsdp2_tp: with
    each MLP sliced in two.
    """
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon, for zero: Muon for the matrices of the blocks, AdamW for the rest, by one learning rate
    (Muon's as match_rms_adamw adjusts it).
    """
    shard_ranks: int = 0
    """Ranks that share one replica of hsdp, such as those of a node: the number of replicas follows
    the ranks that there are. 0: half of the ranks, so two replicas.
    """
    late_format: Format = "bf16"
    """Format of the last steps, to which `zerocast.switch` changes."""
    late_share: float = 0.0
    """Share of the steps, and so of the tokens, at the end, that are trained in `late_format`."""
    out: Path = Path("runs/gpt")
    """Folder for metrics.jsonl, tensorboard/ and checkpoints/."""
    data: tuple[Path, ...] = ()
    """Text files or folders to train on; by default the source of Python's standard library."""
    batches: Literal["random", "once"] = "random"
    """random: sequences from anywhere. once: no byte of the text is trained on twice."""
    model: GPTConfig = field(default_factory=GPTConfig)
    gemm: Literal["auto", "dequantize", "scaled_mm"] = "auto"
    """Path of products with quantized weights: auto uses tensor cores if there are any, which
    also quantizes inputs.
    """
    weight_gradients: Literal["nominal", "fp8"] = "nominal"
    """How weight gradients are computed where products run on FP8 tensor cores."""
    keep_masters: bool = True
    """If False, FP32 masters are rounded to the weights after each step: a control that shows
    the use of masters.
    """

    steps: int = 300
    """Optimizer steps."""
    batch_size: int = 4
    """Sequences a rank and micro-step."""
    grad_accum: int = 1
    """Micro-steps whose gradients make one optimizer step."""
    seed: int = 0
    """Seed of the initial weights and the batches."""

    lr: float = 1.5e-3
    """Peak learning rate: linear warm-up, then a cosine down to min_lr_ratio of it."""
    warmup_steps: int = 40
    """Steps of linear warm-up."""
    min_lr_ratio: float = 0.1
    """Last learning rate divided by the peak."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices in the blocks; norms and the embedding have none."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    moments: Literal["fp32", "8bit"] = "fp32"
    """Precision of AdamW's moments: 8 bytes per parameter, or 2."""
    grad_clip: float = 1.0
    """Largest global gradient norm."""

    stage: Literal[1, 2] = 2
    """ZeRO stage: 1 shards masters and moments, 2 the gradients as well."""
    overlap: bool = False
    """Hide the all-gather of weights behind the next forward pass; does not change one bit."""
    bucket_size: int = 1 << 20
    """Parameters in one communication bucket."""
    grad_wire: Literal["fp8_1x128"] | None = None
    """How ranks send gradients: in the dtype of the sum, or as FP8 with 128 elements per scale."""
    deterministic: bool = False
    """Repeat bit for bit at the same number of ranks, with any communication library."""

    log_every: int = 1
    """Steps between two records of the training loss."""
    eval_every: int = 100
    """Steps between two validations; there is always one after the last step."""
    eval_sequences: int = 64
    """Validation sequences, over all ranks."""
    measure_every: int = 0
    """Steps between two measurements of casts and step times; 0 measures nothing, and so does
    bf16 under FSDP2.
    """
    checkpoint_every: int = 0
    """Steps between two checkpoints, the last step included; 0 writes none."""
    resume: bool = False
    """Continue from the newest checkpoint in `out`, at any number of ranks."""
    elastic: bool = False
    """Like `resume`, but start from step 0 without a checkpoint: for `torchrun --max-restarts`,
    whose restarts have the arguments of the first start.
    """
    timeout: float = 1800.0
    """Seconds that a collective waits for a rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is CUDA when there is a GPU for every rank of this host, else CPU."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "grad_accum", "log_every", "eval_every", "eval_sequences", "bucket_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup_steps", "measure_every", "checkpoint_every", "shard_ranks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} cannot be negative, got {getattr(self, name)}")
        if not self.timeout > 0:
            raise ValueError(f"timeout must be positive, got {self.timeout}")
        if not 0 <= self.late_share <= 1:
            raise ValueError(f"late_share must be in [0, 1], got {self.late_share}")
        if self.format == "bf16" and not self.keep_masters:
            raise ValueError("keep_masters=False needs a quantized format, got bf16")
        self._check_parallel()

    def _check_parallel(self) -> None:
        if self.parallel != "zero" and not self.keep_masters:
            raise ValueError(f"keep_masters=False needs parallel=zero, got {self.parallel}")
        if self.parallel != "zero" and self.optimizer == "muon":
            raise ValueError(
                f"optimizer=muon needs parallel=zero, got {self.parallel}: ZeroMuon shards over all ranks by itself"
            )
        if self.parallel != "hsdp" and self.shard_ranks:
            raise ValueError(f"shard_ranks needs parallel=hsdp, got {self.parallel}")

    @property
    def slices(self) -> int:
        """The number of ranks that work on the same batch."""
        return 2 if self.parallel == "fsdp2_tp" else 1

    @property
    def moment_dtype(self) -> torch.dtype | Literal["8bit"]:
        """`moments` as an argument of zerocast."""
        return torch.float32 if self.moments == "fp32" else "8bit"

    @property
    def late_steps(self) -> int:
        """The number of last steps that are trained in `late_format`."""
        return round(self.steps * self.late_share)

    @property
    def quantized(self) -> Format:
        """The format that the matrices are built in; bf16 if they are never quantized."""
        return self.late_format if self.format == "bf16" and self.late_steps else self.format

    def format_at(self, step: int) -> Format:
        """Return the format of the weights during a step, counted from 0."""
        return self.late_format if step >= self.steps - self.late_steps else self.format


def options(arguments: Sequence[str] | None = None) -> TrainConfig:
    """Return the options of a command line, by default this process's. Invalid options end the
    process with status 2.
    """
    return tyro.cli(TrainConfig, prog=PROGRAM, args=arguments)
