"""Megatron-Core under the shared tests: an attached DistributedOptimizer, by its own state in files, one a rank."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests import casts
from tests.hosts.stopping import Place, around
from tests.hosts.under_test import ALL_KINDS, OTHER_FORMATS, Calls, HostUnderTest
from tests.megatron.host_on_cpu import WHY_NOT
from tests.megatron.training import METADATA, MIXED, Attached, Case
from tests.workers import error_of
from zerocast import QuantizedWeight, ZeroAdamW, verify
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron.host import distributed_optimizers
from zerocast.integrations.megatron.primary import weight_of
from zerocast.integrations.megatron.shards import shares

CASES = {
    "overlap": Case(MIXED, overlap=True, experts=True),
    "sync": Case(MIXED, experts=True),
    ALL_KINDS: Case("all kinds", kind="frozen"),
    OTHER_FORMATS: Case("other kinds", kind="frozen"),
}
BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
ME = "tests.hosts.megatron:Megatron"


class Megatron(HostUnderTest):
    """A run with its attachment; experts have buffers and an optimizer of their own."""

    VARIANTS = ("overlap", "sync")
    PLACES = (
        *around("zerocast.distributed.group:Group", "all_reduce_max"),
        Place(BUFFERS, "dist_reduce_scatter_func"),
        Place(BUFFERS, "dist_all_gather_func"),
        *(Place(ME, name) for name in ("forward", "update")),
        Place(ME, "update", "after"),
    )
    NAMES: ClassVar[dict[str, str]] = {
        "quantized": "module.layers.2.weight",
        "plain": "module.layers.2.bias",
        "frozen quantized": "module.layers.0.weight",
        "frozen plain": "module.layers.1.weight",
    }
    BREAKS: ClassVar[dict[str, Place]] = {
        "step": Place("zerocast.cast.plan:Plan", "run"),
        "load": Place("zerocast.cast.plan:Plan", "run"),
        "cast": Place("zerocast.cast.plan:Plan", "run", "after"),
    }
    why_not = WHY_NOT

    def __init__(self, folder: str, variant: str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._attached = Attached(CASES[variant])
        self.run, self.attachment = self._attached.run, self._attached.attachment

    @classmethod
    def inside(cls, variant: str) -> AbstractContextManager[Any]:
        """Return the context in which stand-ins run Megatron-Core on the CPU."""
        return CASES[variant].host()

    @classmethod
    def remedies(cls, variant: str) -> dict[str, set[str]]:
        """Leave out backward passes, which are Megatron's. With overlap the forward pass gathers, and no sync does."""
        gathers = (
            {"forward": {"again", "refresh"}}
            if variant == "overlap"
            else {"forward": {"again"}, "sync": {"again", "refresh"}}
        )
        return {"step": {"again", "load"}, "load": {"again", "load"}, "refresh": {"refresh"}, **gathers}

    def phases(self, number: int) -> Calls:
        """Return the phases. With overlap the forward pass gathers."""
        return {
            "forward": lambda: self.forward(number),
            "backward": lambda: self.run.backward(self._loss),
            "step": self.update,
            "sync": self.run.force_sync,
        }

    def forget(self) -> None:
        """Do nothing: a forward pass begins by dropping the gradients."""

    def forward(self, number: int) -> None:
        """Run a forward pass with the gathers that follow a step."""
        for group in self.run.ddp.bucket_groups + self.run.ddp.expert_parallel_bucket_groups:
            group.param_gather_dispatched = not self.run.case.overlap
        self._loss = self.run.forward(number)

    def update(self) -> None:
        self.run.optimizer.step()

    def save(self, number: int) -> None:
        """Save what a `dp_reshardable` checkpoint holds."""
        path, partial = self.folder / f"{number}.{dist.get_rank()}", self.folder / f"partial_{dist.get_rank()}"
        torch.save(self._attached.saved(), partial)
        dist.barrier()
        os.replace(partial, path)
        dist.barrier()

    def load(self) -> int:
        """Load by the host's own load."""
        number = max(int(path.stem) for path in self.folder.glob(f"*.{dist.get_rank()}"))
        self._attached.load(torch.load(self.folder / f"{number}.{dist.get_rank()}", weights_only=False))
        return number

    def refreshes(self) -> Calls:
        return {"refresh": self.attachment.refresh}

    def mend(self) -> str:
        """Refresh if the complaint asks for it, since gathers and casts can be made again."""
        if "attachment.refresh()" in self.complaint():
            self.attachment.refresh()
            return "refresh"
        return super().mend()

    def everything(self) -> casts.Bytes:
        """Return the state that this rank holds."""
        return self._attached.everything()

    def whole(self) -> dict[str, Tensor]:
        """Return the state, gathered from the shards of all ranks."""
        run = self.run
        held = {"master": run.masters(), **{key: run.moments(key) for key in ("exp_avg", "exp_avg_sq")}}
        return {f"{key}.{name}": value for key, named in held.items() for name, value in named.items()}

    def guarded(self) -> Calls:
        """Return the calls of the host, the attachment and the weights."""
        optimizer, state = self.run.optimizer, os.path.join(self.folder, "state")
        calls: Calls = {
            "state_dict": optimizer.state_dict,
            "step": optimizer.step,
            "inner step": self._attached.own[0].step,
            "sharded_state_dict": lambda: optimizer.sharded_state_dict(self._model(), metadata=METADATA),
            "save_parameter_state": lambda: optimizer.save_parameter_state(state),
            "reload_model_params": optimizer.reload_model_params,
            "dequantize_": lambda: integration.dequantize_(self._model()),
            "dequantize": lambda: weight_of(next(iter(self.run.weights.values()))).dequantize(),
            "forward": lambda: self.run.forward_and_backward(0),
            "force_sync": self.run.force_sync,
            "verify": lambda: verify(self.attachment),
            "save": lambda: self.save(9),
            "refresh": self.attachment.refresh,
        }
        if "attachment.refresh()" in error_of(optimizer.state_dict):
            del calls["refresh"]  # which mends it
        return calls

    def _model(self) -> Any:
        return self.run.ddp.module.sharded_state_dict(metadata=METADATA)

    def live(self) -> dict[str, dict[str, Tensor]]:
        """Return the buffers of all parameters, plain ones too."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, param in self.run.ddp.named_parameters():
            held = param.state.buffers if isinstance(param, QuantizedWeight) else {"rowwise_data": param.data}
            found[name] = {buffer: tensor for buffer, tensor in held.items() if tensor is not None}
        return found

    @property
    def verified(self) -> Any:
        return self.attachment

    @property
    def model(self) -> Any:
        return self.run.ddp

    def master(self, kind: str) -> Tensor:
        """Return the shard that the optimizer steps over."""
        param = self.parameter(kind)
        masters = [
            master
            for one in distributed_optimizers(self.run.optimizer)
            for share in shares(one)
            for owned, master, _, _ in share.masters()
            if owned is param
        ]
        return masters[0].detach() if masters else torch.empty(0)

    def recast(self) -> None:
        self.attachment.refresh()

    def product(self, x: Tensor) -> Tensor:
        """Return the product of two copies of `x`, since the first layer takes 64 columns."""
        return self.run.ddp(torch.cat([x, x], -1))  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        self.run.backward(loss)

    def saved(self) -> dict[str, Tensor]:
        leaves = tree_leaves(self._attached.saved())
        return {str(number): leaf for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}

    @property
    def other_recipe(self) -> dict[str, str]:
        return {"*layers.2.weight": "fp8_block"}

    def detach(self) -> None:
        self.attachment.detach()

    def attach(self) -> None:
        self.attachment = integration.attach(self.run.optimizer, self.run.ddp)

    def gather(self) -> None:
        self.run.force_sync()

    def another_owner(self) -> ZeroAdamW:
        return ZeroAdamW((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
