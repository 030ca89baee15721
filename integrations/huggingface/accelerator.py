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

from zerocast import fsdp2
from zerocast.checkpoint.store import local_path
from zerocast.formats.recipe import RecipeLike
from zerocast.integrations import overrides, zero_run
from zerocast.integrations.zero_run import check_device, check_owners, check_together, is_quantized, without_reduction
from zerocast.optim import full_state_dict
from zerocast.optim.zero_optimizer import ZeroOptimizer

_FOLDER = "zerocast"
# The remedy for a URL in place of a folder.
CHECKPOINTS = "save with zerocast.optim.Checkpoints(url), or copy the folder once it is written"
# The plugins with which accelerate would shard models.
SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


@overrides("_zero", "_quantized", "_with_masters", "_without_zero")
class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator that leaves a model with QuantizedWeights as it is.

    ZeroAdamW averages gradients over the ranks and gathers weights, so DistributedDataParallel must
    not. The rest of accelerate stays: data loaders, `accumulate`, `clip_grad_norm_`, `autocast`,
    schedulers, trackers, `save_state` and `load_state`. Models without QuantizedWeights and all
    other optimizers are prepared as by accelerate.

    Args:
        fsdp2_recipe: with accelerate configured for `fsdp_version: 2`, the formats in which FSDP2
            gathers the weights of the model that is prepared (`zerocast.fsdp2.prepare`). The model
            is not quantized beforehand, and the optimizer is any of torch, or
            `zerocast.fsdp2.FusedAdamW`. Raises ValueError without that configuration, and with
            `cpu_ram_efficient_loading`, which replaces the parameters.
        args, kwargs: the arguments of accelerate's Accelerator.
    """

    # True if `check_owners` has passed since the last model or optimizer was prepared.
    _owners_checked = False

    def __init__(self, *args: Any, fsdp2_recipe: RecipeLike | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fsdp2_recipe = fsdp2_recipe
        if fsdp2_recipe is None:
            return
        if not self.is_fsdp2:
            raise ValueError(
                f"fsdp2_recipe needs accelerate configured with fsdp_version: 2, got {self.distributed_type.value}: "
                "call zerocast.quantize_ and pass the parameters to ZeroAdamW"
            )
        if self.state.fsdp_plugin.cpu_ram_efficient_loading:
            raise ValueError(
                "cpu_ram_efficient_loading replaces the parameters that zerocast.fsdp2.prepare has prepared: set "
                "fsdp_cpu_ram_efficient_loading: false"
            )

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects like accelerate. Under `fsdp_version: 2` the model is first prepared by
        `fsdp2_recipe`. Raises RuntimeError then for a model that `quantize_` has changed, and for
        an optimizer that is laid out for unsharded parameters: ZeroAdamW, ZeroMuon, and FusedAdamW
        with moments in 8 bits.
        """
        for item in args if self.is_fsdp2 else ():
            if isinstance(item, nn.Module) and is_quantized(item):
                raise RuntimeError(
                    "accelerate is configured for FSDP2, which cannot shard the weights of quantize_: pass this Accelerator "
                    "fsdp2_recipe=recipe and a model in FP32"
                )
            if isinstance(item, ZeroOptimizer) or getattr(getattr(item, "state", None), "eight_bit", None) is not None:
                raise RuntimeError(
                    f"accelerate is configured for FSDP2 and shards parameters after the optimizer is built, for which this "
                    f"{type(item).__name__} is laid out: use torch.optim.AdamW, or zerocast.fsdp2.FusedAdamW with FP32 moments"
                )
        if self._fsdp2_recipe is not None:
            for model in (item for item in args if isinstance(item, nn.Module)):
                fsdp2.prepare(model, self._fsdp2_recipe)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model like accelerate, without DistributedDataParallel if it is quantized.

        Raises RuntimeError if such a model is on a different device than this process trains on,
        and if accelerate is configured to shard models by FSDP, DeepSpeed or Megatron-LM.
        """
        self._owners_checked = False
        if not is_quantized(model):
            return super().prepare_model(model, device_placement, evaluation_mode)
        if self.distributed_type in SHARDED:
            raise RuntimeError(
                f"accelerate is configured for {self.distributed_type.value}, and ZeroAdamW shards quantized models by itself: "
                "configure no such plugin; for FSDP2 set fsdp_version: 2 and pass fsdp2_recipe to this Accelerator"
            )
        check_device(model, self.device)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer like accelerate, but leave the state of zerocast's optimizers where
        it is. Moving the state would also make FusedAdamW allocate moments before its parameters
        are sharded.
        """
        self._owners_checked = False
        is_ours = isinstance(optimizer, ZeroOptimizer | fsdp2.FusedAdamW)
        return super().prepare_optimizer(optimizer, False if is_ours else device_placement)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass like accelerate.

        Raises RuntimeError, on several ranks, for a parameter of a quantized model that requires a
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
        """Return the state dict of a model. For a quantized model it has the masters, on rank 0
        only (`zerocast.optim.full_state_dict`). Raises RuntimeError then unless one ZeroAdamW was
        prepared.
        """
        if not is_quantized(model):
            return super().get_state_dict(model, unwrap)
        if len(self._zero) != 1:
            raise RuntimeError(
                f"{len(self._zero)} ZeroAdamW were prepared: call zerocast.optim.full_state_dict(model, optimizer)"
            )
        return full_state_dict(self.unwrap_model(model), self._zero[0])

    def save_state(self, output_dir: str | None = None, **kwargs: Any) -> Any:
        """Save like accelerate. The folder `zerocast` gets each rank's part of masters and moments,
        and the buffers of the models that ZeroAdamWs train.

        Raises ValueError for a quantized model whose ZeroAdamW was not prepared: it has the
        masters; and for a URL, since accelerate writes local files.
        """
        check_together(self._zero, self._quantized)
        local_path(output_dir or self.project_dir or "", CHECKPOINTS)
        zero = self._zero
        # accelerate has chosen the folder by then, and has written nothing.
        handle = self.register_save_state_pre_hook(
            lambda models, weights, folder: zero_run.discard_saved(Path(folder) / _FOLDER, zero)
        )
        try:
            with self._without_zero():
                folder = super().save_state(output_dir, **kwargs)
        finally:
            handle.remove()
        zero_run.save(Path(folder) / _FOLDER, self._zero, self._with_masters)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load a folder that `save_state` wrote, on any number of ranks.

        Without `input_dir` it is the newest one where accelerate names checkpoints by itself, as in
        accelerate. Raises the errors of `zerocast.optim.load`.
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
        return [model for model in self._models if is_quantized(model) or zero_run.optimizers_of_model(zero, model)]

    @contextlib.contextmanager
    def _without_zero(self) -> Iterator[None]:
        """Hide ZeroAdamWs and the models that have masters from accelerate while the context is
        open.

        accelerate saves and loads unsharded tensors, and safetensors raises on parameters that are
        parts of one buffer, as in ZeroAdamW.
        """
        models, optimizers, hidden = self._models, self._optimizers, self._with_masters
        self._models = [model for model in models if not any(model is other for other in hidden)]
        self._optimizers = [optimizer for optimizer in optimizers if not isinstance(inner_of(optimizer), ZeroOptimizer)]
        try:
            yield
        finally:
            self._models = models
            self._optimizers = optimizers


def inner_of(optimizer: Any) -> Any:
    """Return the optimizer that accelerate may have wrapped."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
