"""Accelerator: accelerate's Accelerator for quantized models, whose gradients ZeroAdamW reduces."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn

from zerocast.checkpoint.store import local_path
from zerocast.integrations import zero_run
from zerocast.integrations.zero_run import check_owners, check_place, check_together, is_quantized, without_reduction
from zerocast.optim import full_state_dict
from zerocast.optim.zero_optimizer import ZeroOptimizer

_FOLDER = "zerocast"
# What to do with a URL in place of a folder.
CHECKPOINTS = "save with zerocast.optim.Checkpoints(url), or copy the folder once it is written"
# What accelerate would shard models with.
SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator that leaves a model with QuantizedWeights as it is.

    ZeroAdamW averages gradients over the ranks and gathers weights, so DistributedDataParallel must
    not. The rest of accelerate stays: data loaders, `accumulate`, `clip_grad_norm_`, `autocast`,
    schedulers, trackers, `save_state` and `load_state`. Models without QuantizedWeights and other
    optimizers are prepared as ever.
    """

    # True if `check_owners` has passed since the last model or optimizer was prepared.
    _owners_checked = False

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model like accelerate, without DistributedDataParallel if it is quantized.

        RuntimeError if such a model is on another device than this process trains on, and if
        accelerate is configured to shard models by FSDP, DeepSpeed or Megatron-LM.
        """
        self._owners_checked = False
        if not is_quantized(model):
            return super().prepare_model(model, device_placement, evaluation_mode)
        if self.distributed_type in SHARDED:
            raise RuntimeError(
                f"accelerate is configured for {self.distributed_type.value}, and ZeroAdamW shards quantized models by itself: "
                "configure no such plugin; for FSDP2 call zerocast.fsdp2.prepare in a loop of your own"
            )
        check_place(model, self.device)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer like accelerate. The state of a ZeroAdamW stays on its device."""
        self._owners_checked = False
        return super().prepare_optimizer(optimizer, False if isinstance(optimizer, ZeroOptimizer) else device_placement)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass like accelerate.

        RuntimeError, on several ranks, for a parameter of a quantized model that requires a
        gradient and that no prepared ZeroAdamW has: its gradient would not be reduced.
        """
        if self.num_processes > 1 and not self._owners_checked:
            check_owners(self._zero, self._quantized)
            self._owners_checked = True
        super().backward(loss, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients of the model on this rank while the context is open."""
        with without_reduction(self._zero, model), super().no_sync(model):
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The state dict of a model. For a quantized model it has the masters, on rank 0 alone
        (`zerocast.optim.full_state_dict`).
        """
        if not is_quantized(model):
            return super().get_state_dict(model, unwrap)
        return full_state_dict(self.unwrap_model(model), one_of(self._zero))

    def save_state(self, output_dir: str | None = None, **kwargs: Any) -> Any:
        """Save like accelerate. The folder `zerocast` gets each rank's part of masters and moments,
        and the buffers of the models that ZeroAdamWs train.

        ValueError for a quantized model whose ZeroAdamW was not prepared: it has the masters; and
        for a URL, since accelerate writes local files.
        """
        check_together(self._zero, self._quantized)
        local_path(output_dir or self.project_dir or "", CHECKPOINTS)
        with self._without_zero():
            folder = super().save_state(output_dir, **kwargs)
        zero_run.save(Path(folder) / _FOLDER, self._zero, self._with_masters)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load a folder that `save_state` wrote, on any number of ranks.

        Without `input_dir` it is the newest one where accelerate names checkpoints by itself, as in
        accelerate. ValueError as from `zerocast.optim.load`.
        """
        local_path(input_dir or "", "copy the folder that save_state wrote to one")
        check_together(self._zero, self._quantized)
        folders: list[str] = []
        handle = self.register_load_state_pre_hook(lambda models, folder: folders.append(folder))
        try:
            with self._without_zero():
                super().load_state(input_dir, *args, **kwargs)
        finally:
            handle.remove()
        zero_run.load(Path(folders[0]) / _FOLDER, self._zero, self._with_masters)

    @property
    def _zero(self) -> list[ZeroOptimizer]:
        return [inner for inner in map(inner_of, self._optimizers) if isinstance(inner, ZeroOptimizer)]

    @property
    def _quantized(self) -> list[nn.Module]:
        return [model for model in self._models if is_quantized(model)]

    @property
    def _with_masters(self) -> list[nn.Module]:
        """The models that are quantized or that a ZeroAdamW trains."""
        zero = self._zero
        return [model for model in self._models if is_quantized(model) or zero_run.of_model(zero, model)]

    @contextlib.contextmanager
    def _without_zero(self) -> Iterator[None]:
        """Hide ZeroAdamWs and the models that have masters from accelerate while the context is
        open.

        accelerate saves and loads whole tensors, and safetensors refuses parameters that are parts
        of one buffer, as those of ZeroAdamW are.
        """
        models, optimizers, hidden = self._models, self._optimizers, self._with_masters
        self._models = [model for model in models if not any(model is other for other in hidden)]
        self._optimizers = [optimizer for optimizer in optimizers if not isinstance(inner_of(optimizer), ZeroOptimizer)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers


def inner_of(optimizer: Any) -> Any:
    """The optimizer that accelerate may have wrapped."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def one_of(optimizers: list[ZeroOptimizer]) -> ZeroOptimizer:
    """The only one; RuntimeError if there are none or several."""
    if len(optimizers) != 1:
        raise RuntimeError(
            f"{len(optimizers)} ZeroAdamW were prepared: call zerocast.optim.full_state_dict(model, optimizer)"
        )
    return optimizers[0]
