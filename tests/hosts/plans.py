"""A training loop of one's own under the matrix: torch's AdamW over shards of masters, cast by a CastPlan that is attached to
it, or by quantize_master_weights after each step, as docs/quickstart/cast.md has them.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import zerocast
from tests.hosts.stopping import Place
from tests.hosts.under_test import ALL_KINDS, OTHER_FORMATS, Calls, HostUnderTest, gathered
from zerocast import CastPlan, ZeroAdamW
from zerocast.distributed.group import Group

FORMATS = {ALL_KINDS: "nvfp4", OTHER_FORMATS: "fp8_current"}
SHAPES = {"nv": (48, 32), "norm": (32,), "frozen": (32, 32), "frozen_norm": (32,)}


class AttachedPlan(HostUnderTest):
    """A CastPlan that casts after each step of the optimizer, and the loop that gathers."""

    VARIANTS = (ALL_KINDS,)
    PLACES = ()
    BREAKS: ClassVar[dict[str, Place]] = {"cast": Place("zerocast.cast.plan:CastPlan", "launch")}
    CANNOT: ClassVar[dict[str, str]] = {
        "a step breaks off": "the step is torch's; what breaks off after it is a cast",
        "a load breaks off": "the loop loads by itself",
    }

    def __init__(self, folder: str, variant: str) -> None:
        self.folder, self._group = Path(folder), Group.of(None)
        self.folder.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(7)
        self._model = nn.Module()
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator).bfloat16()
            self._model.register_parameter(name, nn.Parameter(value, not name.startswith("frozen")))
        zerocast.quantize_(self._model, {"nv": FORMATS[variant], "frozen": "nvfp4"})
        self._master = nn.Parameter(self._shard(self._model.nv.high_precision_init_val.float()))
        self._model.nv.high_precision_init_val = None
        self._optimizer = torch.optim.AdamW([self._master, self._model.norm], lr=1e-2)
        self._prepare()

    def _prepare(self) -> None:
        self._plan = CastPlan(*self._arguments())
        self.attach()
        self.recast()

    def attach(self) -> None:
        self._handle = self._plan.attach(self._optimizer)

    def detach(self) -> None:
        self._handle.remove()

    def gather(self) -> None:
        data = self._model.nv.rowwise_data.view(-1)
        self._group.all_gather_into(data, self._shard(data))
        self._after_gather()

    def cast(self, skip: Tensor) -> None:
        self._plan.cast(skip=skip)
        self.gather()

    @property
    def scaled(self) -> torch.optim.Optimizer:
        return self._optimizer

    def _arguments(self) -> tuple[list[Any], list[Tensor], list[int]]:
        return [self._model.nv], [self._master], [self._group.rank * self._master.numel()]

    def _shard(self, whole: Tensor) -> Tensor:
        return whole.reshape(self._group.size, -1)[self._group.rank].clone()

    def _after_gather(self) -> None:
        self._plan.post_all_gather()

    def _cast(self) -> None:
        self._plan.cast()

    def phases(self, number: int) -> Calls:
        """Return the phases. The gather belongs to the step."""
        generator = torch.Generator().manual_seed(1000 * number + self._group.rank)
        x = torch.randn(8, 32, generator=generator).bfloat16()
        return {"backward": lambda: self.backward(self.product(x).float().square().mean()), "step": self._step}

    def backward(self, loss: Tensor) -> None:
        """Run a backward pass and reduce the gradients like DistributedDataParallel."""
        loss.backward()
        for parameter in (self._model.nv, self._model.norm):
            if parameter.grad is None:
                continue
            whole = parameter.grad.float()
            self._group.all_reduce_sum(whole)
            mean = whole / self._group.size
            if parameter is self._model.nv:
                self._master.grad, parameter.grad = self._shard(mean), None
            else:
                parameter.grad = mean.to(parameter.dtype)

    def _step(self) -> None:
        self._optimizer.step()
        self.gather()
        self.forget()

    def forget(self) -> None:
        self._optimizer.zero_grad()
        self._model.zero_grad()

    def save(self, number: int) -> None:
        state = {
            "master": self._master.detach(),
            "norm": self._model.norm.detach(),
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, self.folder / f"{number}.{self._group.rank}")

    def load(self) -> int:
        number = max(int(path.stem) for path in self.folder.iterdir())
        state = torch.load(self.folder / f"{number}.{self._group.rank}")
        with torch.no_grad():
            self._master.copy_(state["master"])
            self._model.norm.copy_(state["norm"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.recast()
        return number

    def recast(self) -> None:
        self._cast()
        self.gather()

    def whole(self) -> dict[str, Tensor]:
        start, state = self._arguments()[2][0], self._optimizer.state[self._master]
        where = slice(start, start + self._master.numel())
        held = {"master": self._master, **{key: state[key] for key in ("exp_avg", "exp_avg_sq") if key in state}}
        pieces = {key: [(where, value.detach().clone())] for key, value in held.items()}
        found = gathered(pieces, dict.fromkeys(held, (self._model.nv.numel(),)))
        return found | {"norm": self._model.norm.detach().clone()}

    @property
    def verified(self) -> Any:
        return self._plan

    @property
    def sender(self) -> Any:
        return self._model

    @property
    def model(self) -> nn.Module:
        return self._model

    def master(self, kind: str) -> Tensor:
        """Return the master. A plain parameter is its own."""
        return self._master if kind == "quantized" else self.parameter(kind)

    @property
    def other_recipe(self) -> dict[str, str]:
        return {"nv": FORMATS[OTHER_FORMATS]}

    def another_owner(self) -> ZeroAdamW:
        return ZeroAdamW(self._model.named_parameters())


class CastsOfOneCall(AttachedPlan):
    """quantize_master_weights after each step, which keeps no plan."""

    CANNOT: ClassVar[dict[str, str]] = {
        **AttachedPlan.CANNOT,
        **dict.fromkeys(
            ("it is detached", "it is attached twice", "it is detached and attached"), "no plan is kept to attach"
        ),
        **dict.fromkeys(("a cast is skipped", "a master is written and its cast is skipped"), "the call takes no flag"),
        "another optimizer is built": "it takes the weight over, and the loop goes on without its gradients",
    }

    def _prepare(self) -> None:
        self.recast()

    def _cast(self) -> None:
        zerocast.quantize_master_weights(*self._arguments())

    def _after_gather(self) -> None:
        zerocast.post_all_gather_processing([self._model.nv])

    def _step(self) -> None:
        self._optimizer.step()
        self._cast()
        self.gather()
        self.forget()

    @property
    def verified(self) -> Any:
        return self._model
