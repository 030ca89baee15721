"""The options of both benchmarks, from which their command lines are built."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CPU_SCALE = 16
BYTE_VALUES = 256
MAX_SECONDS = 3600
MAX_SEED = 2**62
MAX_LR = 1e3


def check_range(name: str, value: float, least: float, most: float) -> None:
    """Raise ValueError for an option outside of [least, most], and for NaN."""
    if not least <= value <= most:
        raise ValueError(f"{name} must be between {least:,} and {most:,}, got {value:,}")


@dataclass(frozen=True)
class BenchConfig:
    """Time casts, Adam steps and columnwise copies and compare them with a memory copy, and with
    TransformerEngine where it is installed.

    Prints a description of the rows and a table; --out also writes Markdown and JSON into a folder.
    `zerocast bench step` times whole training steps.

    Example: zerocast bench --only "A cast" --out reports

    Exit status: 0; 1 if a row of ours fails or grew by more than the threshold; 2 for options that
    cannot be met.
    """

    backend: str | None = None
    """Backend to time: cuda, triton, cpu or reference. By default the one that zerocast would
    choose.
    """
    only: tuple[str, ...] = ()
    """Rows to measure: those whose name contains one of these texts."""
    scale: int | None = None
    """Divide rows, columns and layers of every workload by this. By default 1 on a GPU (about 20
    GB), 16 on a CPU.
    """
    check_scale: int = 32
    """Compare with the reference backend on workloads that are this much smaller."""
    peers: bool = True
    """Also time torch's fused AdamW, and TransformerEngine where it can be imported."""
    seconds: float = 0.3
    """Time to spend on each kind of measurement of each row."""
    seed: int = 0
    """Seed of all random inputs."""
    out: Path | None = None
    """A folder to write the report into, as JSON and Markdown, named by date and device."""
    compare: Path | None = None
    """A stored report: exit with status 1 if a row's ratio to its floor grew by more than
    `threshold`.
    """
    threshold: float = 0.05
    """Growth that `compare` allows."""
    json: bool = False
    """Print the report as JSON in place of the table."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range, before anything is allocated."""
        for name in ("scale", "check_scale"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        check_range("seconds", self.seconds, 0, MAX_SECONDS)
        check_range("threshold", self.threshold, 0, math.inf)
        check_range("seed", self.seed, 0, MAX_SEED)


@dataclass(frozen=True)
class StepConfig:
    """Time whole training steps of a Llama: bf16 and zerocast's formats under FSDP2 and ZeroAdamW,
    and torchao and TransformerEngine where they are installed.

    Runs under torchrun on any number of ranks, or in one process. Rank 0 prints a Markdown table;
    --out also writes it into a folder, with JSON.

    Example: torchrun --nproc-per-node 2 -m zerocast bench step --variants fsdp2:bf16 'fsdp2:fp8_*'

    Exit status: 0; 1 if a row of ours fails or grew by more than the threshold; 2 for options that
    cannot be met.
    """

    variants: tuple[str, ...] = ()
    """Variants to train, by name or shell pattern, as in fsdp2:bf16 'zero_adamw:*'; with a mode a
    single row, as in 'fsdp2:nvfp4 compiled'. By default all that are installed.
    """
    modes: tuple[Literal["compiled", "eager"], ...] = ("compiled", "eager")
    """Run blocks through torch.compile."""
    shape: Literal["llama3-1b", "llama3-8b", "llama3-70b", "tiny"] = "llama3-8b"
    """Widths of a block."""
    layers: int = 8
    """Blocks. Time and memory of blocks grow with their number, those of the output head do not."""
    vocabulary: int = 32768
    """Rows of the embedding and of the head."""
    seq: int = 8192
    """Tokens in a sequence."""
    batch: int = 1
    """Sequences a rank and forward pass."""
    micro_batches: int = 1
    """Forward and backward passes a step. Gradients are reduced in the last one, then the optimizer
    steps.
    """
    keep_gathered: bool = False
    """Let FSDP2 gather the weights of a block once per step and free them in its last backward
    pass. By default a block is gathered for each forward and each backward pass.
    """
    steps: int = 8
    """Steps timed in each way: synchronized before each step, and free-running."""
    warm_up: int = 6
    """Untimed steps before the timed ones, on random tokens; replaced by --text."""
    text: Path | None = None
    """A file of text, whose bytes are the tokens of the steps before those that are timed."""
    loss_steps: int = 200
    """Steps on that text. No byte is used twice."""
    lr: float = 1e-4
    """Learning rate of AdamW, after a linear increase over the first 20 steps."""
    compiler: str = "inductor"
    """Backend of torch.compile."""
    cuda_graphs: bool = False
    """Also record compiled blocks as CUDA graphs (torch.compile's mode "reduce-overhead"). That is
    for ZeroAdamW: FSDP2 gathers weights into memory that moves, so its blocks would be recorded in
    every step.
    """
    profile: bool = False
    """Also profile two free-running steps of each row: kernels, host calls, and the waits of the
    host.
    """
    seed: int = 0
    """Seed of initial values and of the order of the text."""
    out: Path | None = None
    """A folder to write the report into, as JSON and Markdown, named by date and device."""
    compare: Path | None = None
    """A stored report: exit with status 1 if the time or the memory of a row of ours grew by more
    than `threshold`.
    """
    threshold: float = 0.05
    """Growth that `compare` allows."""
    json: bool = False
    """Print the report as JSON in place of the table."""

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range, before anything is allocated."""
        for name in ("layers", "vocabulary", "seq", "batch", "micro_batches", "steps", "warm_up", "loss_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.text is not None and self.vocabulary < BYTE_VALUES:
            raise ValueError(f"text needs a vocabulary of at least {BYTE_VALUES}, got {self.vocabulary}")
        check_range("threshold", self.threshold, 0, math.inf)
        check_range("seed", self.seed, 0, MAX_SEED)
        check_range("lr", self.lr, 0, MAX_LR)
