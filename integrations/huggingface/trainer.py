"""Trainer: transformers' Trainer for quantized models, with their masters in ZeroAdamW."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.trainer import PREFIX_CHECKPOINT_DIR, SCHEDULER_NAME, TRAINER_STATE_NAME

from zerocast.checkpoint.store import local_path
from zerocast.integrations import Patch, Patches, overrides, zero_run
from zerocast.integrations.zero_run import is_quantized
from zerocast.optim import ZeroAdamW, full_state_dict, load_masters
from zerocast.optim.zero_optimizer import ZeroOptimizer

from .accelerator import CHECKPOINTS, Accelerator, inner_of

_FOLDER = "zerocast"
# The names of AdamW in TrainingArguments.
_ADAMW = ("adamw_torch", "adamw_torch_fused")
_SHARDS = "ZeroAdamW shards masters and gradients, and gathers weights as bytes, by itself"
_NO_DDP = (
    "DistributedDataParallel is not used, since ZeroAdamW reduces gradients: set this in its ZeroConfig or leave it out"
)
# The fields of TrainingArguments that a run cannot obey once they are set, and why.
REFUSED = {
    "auto_find_batch_size": "a pass that ran out of memory has reduced a part of its gradients: choose the size beforehand",
    "ddp_broadcast_buffers": "each rank keeps its own buffers",
    "ddp_bucket_cap_mb": f"{_NO_DDP} (bucket_size)",
    "ddp_static_graph": _NO_DDP,
    "deepspeed": _SHARDS,
    "fsdp": f"{_SHARDS}; for FSDP2 call zerocast.fsdp2.prepare in your own loop",
    "parallelism_config": "this Trainer is data-parallel",
}
# Arguments of an optimizer that the Trainer builds.
REFUSED_OF_OPTIMIZER = {
    "optim_args": "build the optimizer and pass it to the Trainer: optimizers=(optimizer, None)",
    "optim_target_modules": "all trained parameters are ZeroAdamW's",
}


@overrides("_load_state", "_zero")
class Trainer(transformers.Trainer):
    """transformers.Trainer for a model that `zerocast.quantize_` was called on.

    Pass it a ZeroAdamW in `optimizers=(optimizer, None)`, or none: it then builds one from the
    learning_rate, adam_beta1, adam_beta2, adam_epsilon and weight_decay of TrainingArguments, with
    transformers' own choice of parameters that decay. Gradients are clipped and accumulated by
    transformers. A checkpoint holds masters and moments in the folder `zerocast`, which any number
    of ranks resumes, and `model.safetensors` with the masters in the dtypes of their parameters,
    for `from_pretrained`.

    `save_model` gathers masters: all ranks call it.

    Raises ValueError for unsupported TrainingArguments (`REFUSED`), and, when training or an
    evaluation begins, for several GPUs in one process, which transformers would wrap in
    DataParallel. When training begins, raises ValueError for a model without QuantizedWeights and,
    if the Trainer builds the optimizer, for an `optim` that is not AdamW; raises TypeError for an
    optimizer that is neither a ZeroAdamW nor a ZeroMuon.
    """

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator like transformers, of zerocast's class.

        transformers has no argument for the class, so its name is replaced during the call.
        """
        _check_unset(self.args, REFUSED)
        local_path(self.args.output_dir or "", CHECKPOINTS)
        with Patches() as patches:
            patches.apply([Patch(transformers.trainer, "Accelerator", Accelerator)])
            super().create_accelerator_and_postprocess()

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Return the ZeroAdamW that was given, or one from TrainingArguments."""
        model, args = model or self.model, self.args
        if not is_quantized(model):
            raise ValueError("no weight of the model is quantized: call zerocast.quantize_(model, recipe) before this")
        if self.optimizer is None:
            _check_unset(args, REFUSED_OF_OPTIMIZER)
            if args.optim not in _ADAMW:
                raise ValueError(
                    f"optim={str(args.optim)!r} in TrainingArguments, and this Trainer builds a ZeroAdamW: set optim='adamw_torch' "
                    "or pass a ZeroMuon in optimizers=(optimizer, None)"
                )
            decaying = set(self.get_decay_parameter_names(model))
            # Frozen ones too, so that a step notices one that is unfrozen later.
            named = list(model.named_parameters())
            with_decay = [pair for pair in named if pair[0] in decaying]
            without_decay = [pair for pair in named if pair[0] not in decaying]
            groups = [
                {"params": with_decay, "weight_decay": args.weight_decay},
                {"params": without_decay, "weight_decay": 0.0},
            ]
            self.optimizer = ZeroAdamW(
                [group for group in groups if group["params"]],
                lr=args.learning_rate,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
            )
        self._zero()
        return self.optimizer

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if self.args.n_gpu > 1:
            raise ValueError(
                f"this process has {self.args.n_gpu} GPUs, and DataParallel cannot copy quantized weights to them: start a process "
                "a GPU (torchrun --nproc-per-node), or set CUDA_VISIBLE_DEVICES to one"
            )
        return super()._wrap_model(model, *args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save like transformers, file by file.

        First deletes the masters and the Trainer's state of an older checkpoint of this name, which
        would not belong to the new files. `save_only_model` writes no masters. The Trainer's state
        is written last, and transformers does not resume without it.
        """
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        zero_run.discard_saved(folder / _FOLDER, [self._zero()])
        if self.args.should_save:
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        super()._save(output_dir, full_state_dict(self.model, self._zero()) if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        zero_run.save(Path(output_dir) / _FOLDER, [self._zero()], [self.model])
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not _has_state(checkpoint):
            raise ValueError(
                f"{checkpoint} has no masters and moments, so a run does not resume from it: {zero_run.NO_STATE}. Build the model "
                "with from_pretrained to begin another run from its weights"
            )
        self._load_state(checkpoint)
        scheduler = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load nothing: weights are cast from the masters, which come with the optimizer's state.
        Raises ValueError for a URL, since transformers reads local files.
        """
        local_path(resume_from_checkpoint, "copy the checkpoint to one")

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if _has_state(best):
            self._load_state(best)
        else:
            # With save_only_model a checkpoint has the masters rounded to the dtypes of their
            # parameters, like a checkpoint of the stock Trainer.
            zero = self._zero()
            trained = {name for group in zero.param_groups for name in group["param_names"]}
            load_masters(zero, best, ignore=[name for name in self.model.state_dict() if name not in trained])

    def _load_state(self, checkpoint: str) -> None:
        zero_run.load(Path(checkpoint) / _FOLDER, [self._zero()], [self.model])

    def _zero(self) -> ZeroOptimizer:
        optimizer = inner_of(self.optimizer)
        if not isinstance(optimizer, ZeroOptimizer):
            raise TypeError(
                f"pass the Trainer a zerocast.ZeroAdamW or ZeroMuon, or no optimizer, not {type(optimizer).__name__}"
            )
        return optimizer


def _check_unset(arguments: transformers.TrainingArguments, refused: Mapping[str, str]) -> None:
    """Raise ValueError if a field of `refused` is set."""
    for name, why in refused.items():
        value = getattr(arguments, name, None)
        if value:
            raise ValueError(f"{name}={value!r} in TrainingArguments cannot be obeyed: {why}")


def _has_state(checkpoint: str) -> bool:
    """Return True if a checkpoint has masters and moments."""
    return zero_run.has_saved(Path(checkpoint) / _FOLDER)
