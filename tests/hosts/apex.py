"""Apex under the shared tests: the probe of tests/optim under DistributedFusedAdam."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import casts
from tests.apex import training
from tests.apex.host_on_cpu import WHY_NOT, host_on_cpu
from tests.apex.training import Case, Run
from tests.hosts.stopping import Place, around
from tests.hosts.under_test import ALL_KINDS, OTHER_FORMATS, Calls, HostUnderTest
from tests.hosts.zero_adamw import FROZEN, SPECS, all_kinds

if not WHY_NOT:
    from zerocast.integrations.apex import DistributedFusedAdam

# plain buckets have buffers to gather from
CASE = Case(SPECS, max_norm=0.5, options={"param_sync_dtype": torch.bfloat16})


# Without clipping, which Apex does in FP32, not to the bit.
CASES = {
    "sync": CASE,
    ALL_KINDS: Case(all_kinds("nvfp4"), options=CASE.options, frozen=FROZEN),
    OTHER_FORMATS: Case(all_kinds("fp8_current"), options=CASE.options, frozen=FROZEN),
}
APEX = "tests.apex.host_on_cpu:apex"


class Fused(HostUnderTest):
    """A DistributedFusedAdam, with its state dicts in files."""

    VARIANTS = ("sync",)
    PLACES = (
        *around("zerocast.distributed.group:Group", "all_reduce_max"),
        *(Place(APEX, name) for name in ("reduce_scatter_tensor", "all_gather_into_tensor")),
        *(Place(APEX, name, "after") for name in ("reduce_scatter_tensor", "all_gather_into_tensor")),
    )
    BREAKS: ClassVar[dict[str, Place]] = {
        "step": Place("zerocast.integrations.apex.optimizer:QuantizedBuckets", "start"),
        "load": Place("zerocast.cast.host:CastDriver", "refresh"),
        "cast": Place("zerocast.cast.plan:CastPlan", "launch"),
    }
    why_not = WHY_NOT

    def __init__(self, folder: str, variant: str) -> None:
        self.folder, self._run = Path(folder), Run(CASES[variant])
        self._optimizer = self._run.optimizer
        self.folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def inside(cls, variant: str) -> AbstractContextManager[Any]:
        """Return the context in which stand-ins run Apex on the CPU."""
        return host_on_cpu()

    @classmethod
    def remedies(cls, variant: str) -> dict[str, set[str]]:
        """Leave out backward passes, which are Apex's."""
        return {"step": {"again", "load"}, "load": {"again", "load"}, "refresh": {"load"}}

    def phases(self, number: int) -> Calls:
        """Return the phases. The gather is a part of the step, and memory may run out in Apex's `zero_grad`
        after the step.
        """
        return {
            "backward": lambda: self._run.probe.backward(number, self._run.rank),
            "step": self._step,
            "zero_grad": self.forget,
        }

    def forget(self) -> None:
        self._optimizer.zero_grad()

    def _step(self) -> None:
        if self._run.case.max_norm is not None:
            self._optimizer.clip_grad_norm(self._run.case.max_norm)
        self._optimizer.step()

    def save(self, number: int) -> None:
        """Save the optimizer, and the plain parameters, which Apex leaves to the model."""
        partial = self.folder / "partial"
        training.save(self._run, str(partial))
        if dist.get_rank() == 0:
            os.replace(partial, self.folder / f"{number}.pt")
        dist.barrier()

    def load(self) -> int:
        number = max(int(path.stem) for path in self.folder.glob("*.pt"))
        training.load(self._run, str(self.folder / f"{number}.pt"))
        assert not self._optimizer._params_buckets, "nothing is left to gather of a step that raised"
        return number

    def refreshes(self) -> Calls:
        return {"refresh": self._optimizer.refresh}

    def everything(self) -> casts.Bytes:
        """Return all that a step changes."""
        return training.held(self._run)

    def whole(self) -> dict[str, Tensor]:
        """Return the state, which Apex saves whole."""
        return {f"{key}.{name}": t for name, state in self._run.state().items() for key, t in state.items()}

    def guarded(self) -> Calls:
        """Return the calls of the optimizer and the weights."""
        optimizer, probe = self._optimizer, self._run.probe
        return {
            "state_dict": optimizer.state_dict,
            "step": optimizer.step,
            "clip_grad_norm": lambda: optimizer.clip_grad_norm(1.0),
            "unscale_grads": optimizer.unscale_grads,
            "refresh": optimizer.refresh,
            "save": lambda: self.save(9),
            "dequantize": lambda: probe.get_parameter("nv").dequantize(),
            "a backward pass": lambda: probe.backward(0, 0),
        }

    def live(self) -> dict[str, dict[str, Tensor]]:
        """Return the buffers of quantized weights; Apex owns the other parameters."""
        held = {name: weight.state.buffers for name, weight in self._run.weights.items()}
        return {name: {key: t for key, t in buffers.items() if t is not None} for name, buffers in held.items()}

    @property
    def verified(self) -> Any:
        return self._optimizer

    def states_that_do_not_fit(self) -> Calls:
        """Return loads of a state without an entry, and of one with another shape."""
        state = self._optimizer.state_dict()
        entries = [key for key in state["state"] if key != "step"]
        fewer = {key: value for key, value in state["state"].items() if key != entries[-1]}
        other = {**state["state"], entries[0]: dict.fromkeys(("param", "exp_avg", "exp_avg_sq"), torch.zeros(3))}
        return {
            what: lambda held=held: self._optimizer.load_state_dict({**state, "state": held})  # type: ignore[misc]
            for what, held in (("a missing name", fewer), ("another shape", other))
        }

    @property
    def model(self) -> nn.Module:
        return self._run.probe

    @property
    def sender(self) -> Any:
        """The model: masters are Apex's."""
        return self._run.probe

    def master(self, kind: str) -> Tensor:
        """Return this rank's part, in Apex's bucket."""
        state = self._optimizer.state
        parts = [
            state["buckets"][fragment.bucket_id].params_shard[slice(*fragment.shard_range)]
            for fragment in state[self.parameter(kind)]["fragments"]
            if fragment.in_local_shard
        ]
        return parts[0] if parts else torch.empty(0)

    def recast(self) -> None:
        self._optimizer.refresh()

    @property
    def other_recipe(self) -> dict[str, str]:
        return {spec.name: spec.fmt for spec in CASES[OTHER_FORMATS].specs[:2]}

    def another_owner(self) -> Any:
        trained = [(name, p) for name, p in self._run.probe.named_parameters() if p.requires_grad]
        return DistributedFusedAdam(trained)
