"""StepReport: all measurements of one run of training steps as JSON, and against another run."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from typing import Any

from zerocast.bench.report import Regression, grown, read_stored
from zerocast.bench.variant import code_of

SCHEMA = "step 2"
LAST_LOSSES = 20
WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize")
MAX_LINES = 25
GIB = 2**30
OURS = ("fsdp2:", "zero_adamw:")


@dataclass(frozen=True)
class Profile:
    """The time of a step by kernel and by call, on the rank that reports.

    Attributes:
        kernels: (name, milliseconds per step, calls per step), the longest first.
        host: the same for operators and CUDA calls on the CPU, without nested calls.
        waits: the number of times a step that the host waited for an event or a stream.
        wait_ms: milliseconds of those waits.
    """

    kernels: tuple[tuple[str, float, float], ...]
    host: tuple[tuple[str, float, float], ...]
    waits: float
    wait_ms: float

    @classmethod
    def from_averages(cls, averages: Iterable[Any], steps: int) -> "Profile":
        """Make one of torch.profiler's `key_averages()` over `steps` steps."""
        events = list(averages)

        def longest(side: str) -> tuple[tuple[str, float, float], ...]:
            own = [event for event in events if event.device_type.name == side.upper() and not event.is_user_annotation]
            time = "self_cpu_time_total" if side == "cpu" else "self_device_time_total"
            lines = [(event.key, getattr(event, time) / 1e3 / steps, event.count / steps) for event in own]
            return tuple(sorted(lines, key=lambda line: -line[1])[:MAX_LINES])

        waits = [event for event in events if event.key in WAITS]
        return cls(
            kernels=longest("cuda"),
            host=longest("cpu"),
            waits=sum(event.count for event in waits) / steps,
            wait_ms=sum(event.self_cpu_time_total for event in waits) / 1e3 / steps,
        )


@dataclass(frozen=True)
class StepMeasurement:
    """A variant's training step; every time and size is of the slowest or fullest rank.

    Attributes:
        step_ms: of each step that starts on idle devices, until all of its work is done.
        host_ms: median until the calls of such a step return.
        cpu_ms: median processor time of all threads of the process until then.
        free_ms: mean of steps between which nothing waits.
        free_host_ms: median of the calls of such a step, any wait for a full queue included.
        peak_bytes: the most that was allocated during training; None on a CPU.
        kept_bytes: the bytes that the first forward pass of a step leaves allocated; None on a CPU.
        wire_bytes: full-size side of a step's collectives by operation; `weight_gather` has all
            all-gathers.
        losses: of each step before those that are timed, the mean over ranks.
    """

    variant: str
    mode: str
    step_ms: list[float]
    host_ms: float
    cpu_ms: float
    free_ms: float
    free_host_ms: float
    peak_bytes: int | None
    kept_bytes: int | None
    wire_bytes: Mapping[str, int]
    losses: list[float]
    profile: Profile | None = None

    @property
    def row(self) -> str:
        """The name in tables and stored reports."""
        return f"{self.variant} {self.mode}"

    @property
    def ms(self) -> float:
        """The median of `step_ms`, in milliseconds."""
        return median(self.step_ms)

    @property
    def loss(self) -> float:
        """The mean of the last 20 losses."""
        return mean(self.losses[-LAST_LOSSES:])


@dataclass(frozen=True)
class StepFailure:
    """A row that raised, and its error."""

    row: str
    reason: str


@dataclass(frozen=True)
class StepReport:
    """All results of one run on `ranks` devices, of `tokens` tokens per step."""

    date: str
    ranks: int
    tokens: int
    machine: Mapping[str, str | int | None]
    settings: Mapping[str, Any]
    measurements: tuple[StepMeasurement, ...]
    failures: tuple[StepFailure, ...] = ()

    def over_bf16(self, m: StepMeasurement, host: str | None = None) -> list[float] | None:
        """Return a row's time over the time of `host` with bf16: [of synchronized steps, of
        free-running ones]. None if that was not measured.

        By default the host is ZeroAdamW for a row of ZeroAdamW, and FSDP2 for every other.
        """
        other = self._bf16(m, host)
        return [m.ms / other.ms, m.free_ms / other.free_ms] if other else None

    def host_over_bf16(self, m: StepMeasurement) -> float | None:
        """Return a row's CPU time over the CPU time of the same host with bf16. None if that was
        not measured.
        """
        other = self._bf16(m)
        return m.host_ms / other.host_ms if other else None

    def _bf16(self, m: StepMeasurement, host: str | None = None) -> StepMeasurement | None:
        """Return the row of bf16 that `over_bf16` divides by."""
        host = host or ("zero_adamw" if m.variant.startswith("zero_adamw:") else "fsdp2")
        return self.by_row.get(f"{host}:bf16 {m.mode}")

    @cached_property
    def by_row(self) -> dict[str, StepMeasurement]:
        """The measurements, keyed by the names of their rows."""
        return {m.row: m for m in self.measurements}

    def tokens_per_second(self, m: StepMeasurement) -> float:
        """Return the tokens of all ranks in a second of synchronized steps, of which `ms` is
        one.
        """
        return self.tokens / m.ms * 1e3

    @property
    def failed(self) -> bool:
        """True if a row of ours raised."""
        return any(failure.row.startswith(OURS) for failure in self.failures)

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers, measured and derived, as JSON types; README.md lists the keys."""
        return {
            "schema": SCHEMA,
            "date": self.date,
            "ranks": self.ranks,
            "tokens": self.tokens,
            "machine": dict(self.machine),
            "settings": {
                name: str(value) if isinstance(value, Path) else value for name, value in self.settings.items()
            },
            "rows": [
                {
                    "row": m.row,
                    "ms": m.ms,
                    "over_bf16": self.over_bf16(m),
                    "over_fsdp2_bf16": self.over_bf16(m, "fsdp2"),
                    "host_over_bf16": self.host_over_bf16(m),
                    "tokens_per_s": self.tokens_per_second(m),
                    "loss": m.loss,
                    "code": code_of(m.row),
                    **asdict(m),
                }
                for m in self.measurements
            ],
            "failures": [asdict(failure) for failure in self.failures],
        }

    @classmethod
    def read(cls, path: Path) -> "StepReport":
        """Read a file with the JSON of `as_dict`. Raises ValueError for any other file."""
        stored = read_stored(path, SCHEMA)
        fields = ("date", "ranks", "tokens", "machine", "settings")
        return cls(
            **{name: stored[name] for name in fields},
            measurements=tuple(_measurement(line) for line in stored["rows"]),
            failures=tuple(StepFailure(**line) for line in stored["failures"]),
        )

    def check_comparable(self, ranks: int, settings: Mapping[str, Any]) -> None:
        """Raise ValueError for a run with a different number of ranks or different settings."""
        if (ranks, settings) != (self.ranks, self.settings):
            raise ValueError(
                f"the stored report has {self.ranks} ranks and {self.settings}, this one {ranks} and {settings}"
            )

    def regressions(self, stored: "StepReport", threshold: float) -> list[Regression]:
        """Return our rows whose time or peak memory grew by more than the fraction `threshold`.

        Raises ValueError for a report that cannot be compared (`check_comparable`).
        """
        stored.check_comparable(self.ranks, self.settings)
        pairs = []
        for row, now in self.by_row.items():
            before = stored.by_row.get(row)
            if before and row.startswith(OURS):
                pairs.append(Regression(row, before.ms, now.ms, "ms"))
                if before.peak_bytes and now.peak_bytes:
                    pairs.append(Regression(row, before.peak_bytes / GIB, now.peak_bytes / GIB, "GiB"))
        return grown(pairs, threshold)


def _measurement(line: Mapping[str, Any]) -> StepMeasurement:
    derived = ("row", "ms", "over_bf16", "over_fsdp2_bf16", "host_over_bf16", "tokens_per_s", "loss", "code", "profile")
    profile = line["profile"] and Profile(**line["profile"])
    return StepMeasurement(**{name: value for name, value in line.items() if name not in derived}, profile=profile)
