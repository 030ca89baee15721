"""ZeroAdamW and ZeroMuon under the shared tests: the probe of tests/optim."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tests import casts
from tests.fsdp2 import models
from tests.hosts.stopping import BESIDE, CUT_GROUPS, Place, around
from tests.hosts.under_test import ALL_KINDS, OTHER_FORMATS, Calls, HostUnderTest, gathered
from tests.optim.probe import Spec
from tests.optim.runs import ADAM, Run, Trainer, boxes, repeated, snapshot
from zerocast import QuantizedWeight, ZeroAdamW, ZeroConfig, ZeroMuon
from zerocast.cast.captured_step import CapturedStep
from zerocast.optim import Checkpoints

SPECS = (
    Spec("embedding", (50, 24)),
    Spec("delayed", (48, 80), "fp8_delayed:amax_history_len=3"),
    Spec("mx", (64, 96), "mxfp8"),
    Spec("block", (130, 33), "fp8_block"),
    Spec("nv", (48, 112), "nvfp4"),
    Spec("norm", (37,), dtype=torch.float32, group=1),
)
CONFIG = ZeroConfig(bucket_size=4096, deterministic=True)
EIGHT_BITS = "8-bit moments"
MUON = ({"lr": 1e-2, "use_muon": True}, {**ADAM, "use_muon": False})
RUNS = {
    "eager": Run(SPECS, config=CONFIG),
    "overlap": Run(SPECS, config=dataclasses.replace(CONFIG, overlap_all_gather=True), max_norm=1.0),
    "stage 1": Run(
        SPECS,
        stage=1,
        max_norm=0.5,
        accumulate=2,
        config=ZeroConfig(bucket_size=1, deterministic=True, keep_columnwise=True),
    ),
    "library order": Run(SPECS, max_norm=0.1, config=ZeroConfig(bucket_size=4096)),
    "Muon": Run(SPECS, config=CONFIG, options=MUON, optimizer=ZeroMuon),
    EIGHT_BITS: Run(SPECS, config=dataclasses.replace(CONFIG, moment_dtype="8bit"), max_norm=1.0),
}
GROUP = "zerocast.distributed.group:Group"


FROZEN = ("frozen", "frozen_norm")


def all_kinds(fmt: str) -> tuple[Spec, ...]:
    """Return small parameters of all kinds, the first one in this format."""
    return (
        Spec("nv", (48, 32), fmt),
        Spec("delayed", (32, 32), "fp8_delayed:amax_history_len=3"),
        Spec("norm", (32,), group=1),
        Spec("frozen", (32, 32), "nvfp4"),
        Spec("frozen_norm", (32,)),
    )


KINDS = {
    kind: Run(all_kinds(fmt), config=CONFIG, frozen=FROZEN)
    for kind, fmt in ((ALL_KINDS, "nvfp4"), (OTHER_FORMATS, "fp8_current"))
}


class Zero(HostUnderTest):
    """A ZeroAdamW, or a ZeroMuon, and its checkpoints."""

    VARIANTS = tuple(RUNS)
    RUNS: ClassVar[dict[str, Run]] = {**RUNS, **KINDS}
    BREAKS: ClassVar[dict[str, Place]] = {
        "step": Place("zerocast.optim.gather:WeightGather", "start", "after"),
        "load": Place("zerocast.cast.host:CastDriver", "refresh"),
    }
    MORE_PLACES: ClassVar[dict[str, tuple[Place, ...]]] = {
        EIGHT_BITS: CUT_GROUPS,
        "Muon": tuple(Place("zerocast.optim.muon_step:GradientExchange", "_exchange", when) for when in BESIDE),
    }
    PLACES = (
        *around(GROUP, "all_reduce_max", "all_gather_into", "all_to_all"),
        Place("zerocast.checkpoint.torch_checkpoint:ClearWriter", "write_data"),
        Place("zerocast.checkpoint.torch_checkpoint:ClearWriter", "write_data", "after"),
        Place("zerocast.checkpoint.checkpoint", "_of_all_ranks"),
        Place("zerocast.checkpoint.sources.dcp:SafeReader", "read_data"),
        Place("zerocast.checkpoint.sources.dcp:SafeReader", "read_data", "after"),
    )

    def __init__(self, folder: str, variant: str) -> None:
        self.folder, self._trainer = (
            Path(folder),
            Trainer(dataclasses.replace(self.RUNS[variant], device=models.place())),
        )
        self._optimizer, self._probe = self._trainer.optimizer, self._trainer.probe
        self.loadable = self._optimizer
        self._captured: CapturedStep | None = None
        self._checkpoints = Checkpoints(folder, keep=2)

    @classmethod
    def remedies(cls, variant: str) -> dict[str, set[str]]:
        """Add reads where gathers overlap."""
        found = {"backward": {"again"}, "step": {"again", "load"}, "load": {"again", "load"}}
        return {**found, "read": {"again"}} if variant == "overlap" else found

    def phases(self, number: int) -> Calls:
        """Return the phases. A read waits for gathers that overlap."""
        return {
            "backward": lambda: self._trainer.backward(number),
            "step": self._step,
            "read": self._read,
        }

    def forget(self) -> None:
        self._optimizer.zero_grad()

    def _read(self) -> None:
        for weight in self._weights().values():
            weight.wait()
        self._optimizer.zero_grad()

    def _step(self) -> None:
        if self._trainer.run.max_norm is not None:
            self._optimizer.clip_grad_norm_(self._trainer.run.max_norm)
        self._optimizer.step()

    def _weights(self) -> dict[str, QuantizedWeight]:
        return {name: p for name, p in self._probe.named_parameters() if isinstance(p, QuantizedWeight)}

    def save(self, number: int) -> None:
        self._checkpoints.save(self._optimizer, number)

    def load(self) -> int:
        return self._checkpoints.load(self._optimizer)

    def everything(self) -> casts.Bytes:
        """Return all that a rank holds."""
        return snapshot(self._trainer)

    def whole(self) -> dict[str, Tensor]:
        state = self._optimizer.state_dict()
        found = {f"model.{name}": value for name, value in state["model"].items()}
        for name, held in (*state["optim"]["state"].items(), *state["zerocast"].items()):
            found |= {f"{key}.{name}": value for key, value in held.items()}
        pieces = {name: [(where, part.clone()) for where, part in boxes(value)] for name, value in found.items()}
        return gathered(pieces, {name: value.shape for name, value in found.items()})

    def guarded(self) -> Calls:
        """Return the calls of the optimizer and the weights."""
        optimizer = self._optimizer
        return {
            "state_dict": optimizer.state_dict,
            "step": optimizer.step,
            "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0),
            "save": lambda: self.save(9),
            "dequantize": lambda: self._weights()["nv"].dequantize(),
            "a backward pass": lambda: self._probe.backward(0, 0),
        }

    def live(self) -> dict[str, dict[str, Tensor]]:
        """Return the buffers of all parameters, plain ones too, without columnwise scales that have no codes."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._probe.named_parameters():
            held: dict[str, Any] = {"rowwise_data": parameter.data}
            if isinstance(parameter, QuantizedWeight):
                parameter.wait()
                held = parameter.state.buffers
            found[name] = {buffer: tensor for buffer, tensor in held.items() if tensor is not None}
            if "columnwise_data" not in found[name]:
                found[name].pop("columnwise_scale_inv", None)
        return found

    @property
    def verified(self) -> Any:
        return self._optimizer

    @property
    def model(self) -> nn.Module:
        return self._probe

    def master(self, kind: str) -> Tensor:
        """Return this rank's part, in the state."""
        parts = [part for _, part in boxes(self._optimizer.state_dict()["model"][self.NAMES[kind]])]
        return parts[0] if parts else torch.empty(0)

    def recast(self) -> None:
        """Load the current state, which casts the masters again."""
        self._optimizer.load_state_dict(self._optimizer.state_dict())

    @property
    def other_recipe(self) -> dict[str, str]:
        return {spec.name: spec.fmt for spec in KINDS[OTHER_FORMATS].specs[:2]}

    def another_owner(self) -> ZeroAdamW:
        return ZeroAdamW(self._probe.named_parameters())

    def replay(self, number: int) -> None:
        """Take a step as a graph, or on a CPU as something that acts like one."""
        if self._captured is None:
            with contextlib.nullcontext() if models.place() == "cuda" else repeated():
                self._captured = self._optimizer.capture()
        self._trainer.backward(number)
        self._captured()
        self._optimizer.zero_grad()

    @property
    def scaled(self) -> torch.optim.Optimizer:
        return self._optimizer


class Muon(Zero):
    """A ZeroMuon with parameters of all kinds."""

    RUNS: ClassVar[dict[str, Run]] = {
        variant: dataclasses.replace(run, options=MUON, optimizer=ZeroMuon) for variant, run in KINDS.items()
    }
