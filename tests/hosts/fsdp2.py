"""FSDP2 under the shared tests: prepared models under FusedAdamW, and under torch's AdamW."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import zerocast
from tests import casts
from tests.fsdp2 import models
from tests.fsdp2.models import Net
from tests.hosts.stopping import CUT_GROUPS, Place, around
from tests.hosts.under_test import ALL_KINDS, OTHER_FORMATS, Calls, HostUnderTest
from tests.optim.runs import Repeated
from zerocast.cast.captured_step import CapturedStep
from zerocast.formats.spec import AmaxPolicy
from zerocast.fsdp2 import FusedAdamW, TrainingState
from zerocast.fsdp2.fused_adamw import CapturableFusedStep
from zerocast.optim import Checkpoints

FORMATS = ("nvfp4", "fp8_delayed:amax_compute_algo=most_recent,amax_history_len=3", "mxfp8")
KINDS = {ALL_KINDS: ("nvfp4", FORMATS[1]), OTHER_FORMATS: ("fp8_current", FORMATS[1])}
EIGHT_BITS = "8-bit moments"
OPTIMIZERS: dict[str, Any] = {
    "FusedAdamW": FusedAdamW,
    "AdamW": torch.optim.AdamW,
    EIGHT_BITS: functools.partial(FusedAdamW, moment_dtype="8bit"),
}
TORCH = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


class Prepared(HostUnderTest):
    """A prepared model, its optimizer, and checkpoints of both."""

    VARIANTS = tuple(OPTIMIZERS)
    PLACES = (
        *around("zerocast.distributed.group:Group", "all_reduce_max"),
        *(
            Place(TORCH, name, when)
            for name in ("foreach_all_gather", "foreach_reduce")
            for when in ("before", "after")
        ),
        Place(TORCH, "foreach_all_gather_copy_out"),
        Place("zerocast.checkpoint.torch_checkpoint:ClearWriter", "write_data"),
        Place("zerocast.checkpoint.checkpoint", "_of_all_ranks"),
        Place("zerocast.checkpoint.sources.dcp:SafeReader", "read_data"),
    )

    MORE_PLACES: ClassVar[dict[str, tuple[Place, ...]]] = {EIGHT_BITS: CUT_GROUPS}
    OPTIMIZER = "FusedAdamW"  # of the variants that do not name one
    NAMES: ClassVar[dict[str, str]] = {
        "quantized": "blocks.0.1.weight",
        "plain": "blocks.0.0.weight",
        "frozen quantized": "blocks.1.3.weight",
        "frozen plain": "blocks.1.0.weight",
    }
    BREAKS: ClassVar[dict[str, Place]] = {
        "step": Place("zerocast.fsdp2.plan:ShardPlan", "after_step"),
        "load": Place("zerocast.fsdp2.fused_adamw:FusedAdamW", "load_state_dict"),
        "cast": Place("zerocast.fsdp2.cast_group:CastGroup", "stamp"),
    }

    def __init__(self, folder: str, variant: str) -> None:
        self.folder, self._fused = Path(folder), variant != "AdamW"
        if variant in KINDS:
            self._width, net = 32, Net(KINDS[variant], 32, 48)
            for kind in ("frozen quantized", "frozen plain"):
                net.get_parameter(self.NAMES[kind]).requires_grad_(False)
            self._model = models.sharded(net)
        else:
            self._width = 64
            self._model = models.sharded(Net(FORMATS, 64, 96), reshard_after_forward=False)
        self._optimizer = OPTIMIZERS.get(variant, OPTIMIZERS[self.OPTIMIZER])(self._model.named_parameters(), lr=1e-2)
        self._state, self._checkpoints = TrainingState(self._model, self._optimizer), Checkpoints(folder, keep=2)
        self.loadable = self._state
        self._captured: CapturedStep | None = None

    @classmethod
    def remedies(cls, variant: str) -> dict[str, set[str]]:
        """Leave out torch's own optimizer and backward passes of FSDP2, whose errors are torch's."""
        found = {"gather": {"again"}, "load": {"again", "load"}}
        return found if variant == "AdamW" else {"step": {"again", "load"}, **found}

    def phases(self, number: int) -> Calls:
        """Return the phases. The gather casts what the step has left."""
        return {
            "backward": lambda: self._backward(number),
            "step": self._optimizer.step,
            "gather": self._gather,
        }

    def forget(self) -> None:
        self._optimizer.zero_grad()

    def _gather(self) -> None:
        self._optimizer.zero_grad()
        self._forward()

    def _backward(self, number: int) -> None:
        self._model(models.batch(number, self._width)).float().square().mean().backward()

    def _forward(self) -> None:
        with torch.no_grad():
            self._model(models.batch(0, self._width))

    def step_again(self) -> None:
        """Run a forward pass, since torch's optimizer would also step with gradients of an earlier pass."""
        self._forward()

    def save(self, number: int) -> None:
        self._checkpoints.save(self._state, number)

    def load(self) -> int:
        return self._checkpoints.load(self._state)

    def everything(self) -> casts.Bytes:
        """Return the whole tensors of the state, and the gathered bytes."""
        found = {name: casts.raw(value).copy() for name, value in self._leaves().items()}
        for name, weight in models.unsharded(self._model):
            found |= {f"{name} {key}": value for key, value in models.bytes_of(weight).items()}
        return found

    def whole(self) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self._leaves().items()}

    def _leaves(self) -> dict[str, Tensor]:
        leaves: dict[str, Tensor] = {}

        def collect(state: Any, prefix: str) -> None:
            for key, value in state.items():
                if isinstance(value, dict):
                    collect(value, f"{prefix}{key}.")
                else:
                    leaves[prefix + key] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()

        collect(self._state.state_dict(), "")
        return leaves

    def guarded(self) -> Calls:
        """Return the calls of the model, the optimizer and the state. A state of torch's own optimizer is torch's."""
        calls: Calls = {
            "state_dict": self._state.state_dict,
            "step": self._optimizer.step,
            "state_dict of the optimizer": self._optimizer.state_dict,
            "state_dict of the model": self._model.state_dict,
            "save": lambda: self.save(9),
            "forward": self._forward,
            "refresh": lambda: zerocast.fsdp2.refresh(self._model),
            "delayed scaling": lambda: zerocast.fsdp2.state_dict(self._model),
            "verify": lambda: zerocast.verify(self._model),
            "step, again": self._optimizer.step,
        }
        if not self._fused:
            del calls["state_dict of the optimizer"]
        return calls

    def live(self) -> dict[str, dict[str, Tensor]]:
        """Return the gathered copies, which a forward pass leaves."""
        self._forward()
        named = dict(self._model.named_parameters())
        quantized = [name for name, parameter in named.items() if isinstance(parameter, zerocast.QuantizedWeight)]
        return {name: dict(_read(named[name])) for name in quantized}

    @property
    def verified(self) -> Any:
        return self._model

    @property
    def model(self) -> Any:
        return self._model

    def master(self, kind: str) -> Tensor:
        """Return the parameter, which is its own master under FSDP2."""
        return self.parameter(kind)

    def recast(self) -> None:
        """Load the current state. `refresh` would count as the cast of a step for delayed scaling."""
        self._state.load_state_dict(self._state.state_dict())

    def product(self, x: Tensor) -> Tensor:
        return self._model(x)  # type: ignore[no-any-return]

    def live_weight(self) -> zerocast.QuantizedWeight:
        """Return a weight of the first block, which stays gathered."""
        self._model.blocks[0].unshard()
        return super().live_weight()

    def dequantized(self) -> dict[str, Tensor]:
        """Return the values of the gathered weights by name; plain parameters are not among them."""
        return {name: weight.dequantize() for name, weight in models.unsharded(self._model)}

    @property
    def other_recipe(self) -> dict[str, str]:
        return Net(KINDS[OTHER_FORMATS], self._width, 48).recipe

    def another_owner(self) -> FusedAdamW:
        return FusedAdamW(self._model.parameters())

    def attach(self) -> None:
        zerocast.fsdp2.prepare(self._model, self._model.recipe)

    def gather(self) -> None:
        for module in self._units():
            module.unshard()

    def reshard(self) -> None:
        for module in self._units():
            module.reshard()

    def _units(self) -> list[FSDPModule]:
        return [module for module in self._model.modules() if isinstance(module, FSDPModule)]

    def replay(self, number: int) -> None:
        """Take a step as a graph, or on a CPU as something that acts like one."""
        if self._captured is None:
            on_cpu = models.place() == "cpu"
            self._captured = Repeated(CapturableFusedStep(self._optimizer)) if on_cpu else self._optimizer.capture()
        self._backward(number)
        self._captured()
        self._gather()

    @property
    def scaled(self) -> torch.optim.Optimizer:
        return self._optimizer  # type: ignore[no-any-return]


class TorchStepped(Prepared):
    """A prepared model under torch's own AdamW."""

    OPTIMIZER = "AdamW"
    CANNOT: ClassVar[dict[str, str]] = {"steps are replayed": "only zerocast's optimizers capture a step"}
    BREAKS: ClassVar[dict[str, Place]] = {
        **Prepared.BREAKS,
        "step": Place("torch.optim.adam", "adam", "after"),
        "load": Place("zerocast.fsdp2.state:TrainingState", "_own"),
    }


def _read(weight: zerocast.QuantizedWeight) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that products read: no delayed scaling, which the shard keeps, and no scales without codes."""
    for key, buffer in weight.state.buffers.items():
        codes = weight.state.buffers.get(f"{key.partition('_')[0]}_data")
        is_global = key == "amax" and weight.format.amax_policy is not AmaxPolicy.DELAYED
        if buffer is not None and (is_global or codes is not None):
            yield key, buffer
