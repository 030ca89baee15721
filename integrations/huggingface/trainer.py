"""Trainer: transformers' Trainer for quantized models, with their masters in ZeroAdamW."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.trainer import SCHEDULER_NAME

from zerocast.integrations import zero_run
from zerocast.integrations.patches import Patch, Patches
from zerocast.integrations.zero_run import is_quantized
from zerocast.optim import ZeroAdamW, full_state_dict
from zerocast.optim.zero_optimizer import ZeroOptimizer

from .accelerator import Accelerator, inner_of

_FOLDER = "zerocast"


class Trainer(transformers.Trainer):
    """transformers.Trainer for a model that `zerocast.quantize_` was called on.

    Give it a ZeroAdamW in `optimizers=(optimizer, None)`, or none: it then builds one from the
    learning_rate, adam_beta1, adam_beta2, adam_epsilon and weight_decay of TrainingArguments, with
    transformers' own choice of what decays. Gradients are clipped and accumulated by transformers.
    A checkpoint holds masters and moments in the folder `zerocast`, which any number of ranks
    resumes, and `model.safetensors` with the masters in the dtypes of their parameters, for
    `from_pretrained`.

    Raises ValueError for a model without QuantizedWeights and TypeError for another optimizer when
    training begins; ValueError for several GPUs in one process, which transformers would give to
    DataParallel, when training or an evaluation begins. `save_model` gathers masters: all ranks
    call it.
    """

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator like transformers, of zerocast's class.

        transformers has no argument for the class, so its name is replaced during the call.
        """
        with Patches() as patches:
            patches.apply([Patch(transformers.trainer, "Accelerator", Accelerator)])
            super().create_accelerator_and_postprocess()

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The ZeroAdamW that was given, or one from TrainingArguments."""
        model, args = model or self.model, self.args
        if not is_quantized(model):
            raise ValueError("no weight of the model is quantized: call zerocast.quantize_(model, recipe) before this")
        if self.optimizer is None:
            decaying = set(self.get_decay_parameter_names(model))
            named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
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

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        super()._save(output_dir, full_state_dict(self.model, self._zero()) if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        zero_run.save(Path(output_dir) / _FOLDER, [self._zero()], [self.model])
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._load_state(checkpoint)
        scheduler = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Do nothing: weights are cast from the masters, which come with the optimizer's state."""

    def _load_best_model(self) -> None:
        self._load_state(self.state.best_model_checkpoint)

    def _load_state(self, checkpoint: str) -> None:
        zero_run.load(Path(checkpoint) / _FOLDER, [self._zero()], [self.model])

    def _zero(self) -> ZeroOptimizer:
        optimizer = inner_of(self.optimizer)
        if not isinstance(optimizer, ZeroOptimizer):
            raise TypeError(
                f"give the Trainer a zerocast.ZeroAdamW or ZeroMuon, or no optimizer, not {type(optimizer).__name__}"
            )
        return optimizer
