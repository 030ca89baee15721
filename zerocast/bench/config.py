"""BenchConfig: the options of a benchmark run, from which its command line is built."""

from dataclasses import dataclass
from pathlib import Path

CPU_SCALE = 16


@dataclass(frozen=True)
class BenchConfig:
    """Time casts, Adam steps and columnwise copies beside a copy of memory, and beside
    TransformerEngine where it is installed.
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
    out: Path = Path("zerocast-bench")
    """Folder for the report as JSON, Markdown and a plot, named by date and device."""
    compare: Path | None = None
    """A stored report: exit with status 1 if a row's ratio to its floor grew by more than
    `threshold`.
    """
    threshold: float = 0.05
    """Growth that `compare` allows."""
    json: bool = False
    """Print the report as JSON in place of the table."""
    trace: Path | None = None
    """Measure nothing; write a Chrome trace of two optimizer steps with the all-gather
    overlapped. For torchrun.
    """

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range, before anything is allocated."""
        for name in ("scale", "check_scale"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("seconds", "threshold"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} cannot be negative, got {getattr(self, name)}")
