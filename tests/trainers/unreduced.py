"""Answers of trainers on several ranks to gradients that are not reduced: `-m tests.trainers.unreduced TRAINER
REPORT` writes (what was said, what was expected) for each rank.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerocast
from tests.trainers.runs import Seen, batches, ranks
from tests.workers import error_of

Said = list[tuple[str, str]]


UNREDUCED = "so its gradient would not be averaged over the ranks"


def shared_out(model: nn.Module, weights: bool) -> tuple[zerocast.ZeroAdamW, torch.optim.Optimizer]:
    """Return a ZeroAdamW over the weights, or over all parameters, and an SGD over the biases."""
    named = [(name, p) for name, p in model.named_parameters() if not weights or "weight" in name]
    return zerocast.ZeroAdamW(named), torch.optim.SGD([p for name, p in model.named_parameters() if "bias" in name])


def accelerate() -> Said:
    from zerocast.integrations.huggingface import Accelerator

    def backward(weights: bool) -> str:
        accelerator, model = Accelerator(cpu=True), Seen()
        zero, others = shared_out(model, weights)
        prepared, *_ = accelerator.prepare(model, zero, *([others] if weights else []))
        return error_of(lambda: accelerator.backward(prepared(torch.ones(2, 64, dtype=torch.bfloat16))))

    def backward_before_and_after_a_second_model() -> list[str]:
        accelerator, model = Accelerator(cpu=True), Seen()
        prepared, _ = accelerator.prepare(model, shared_out(model, weights=False)[0])
        before = error_of(lambda: accelerator.backward(prepared(torch.ones(2, 64, dtype=torch.bfloat16))))
        accelerator.prepare(Seen())
        return [before, error_of(lambda: accelerator.backward(prepared(torch.ones(2, 64, dtype=torch.bfloat16))))]

    return [
        (backward(True), UNREDUCED),
        *zip(backward_before_and_after_a_second_model(), ("", UNREDUCED), strict=True),
    ]


def fabric() -> Said:
    import lightning

    from zerocast.integrations.lightning import FabricZeroStrategy

    def backward(weights: bool) -> str:
        runner = lightning.Fabric(accelerator="cpu", strategy=FabricZeroStrategy(), devices=ranks())
        runner.launch()
        model = Seen()
        zero, others = shared_out(model, weights)
        module, *_ = runner.setup(model, zero, *([others] if weights else []))
        return error_of(lambda: runner.backward(module(torch.ones(2, 64, dtype=torch.bfloat16))))

    return [(backward(True), UNREDUCED), (backward(False), "")]


def lightning() -> Said:
    import lightning

    from zerocast.integrations.lightning import ZeroStrategy

    class Module(lightning.LightningModule):
        def __init__(self, weights: bool) -> None:
            super().__init__()
            self.seen, self.weights = Seen(), weights

        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            return self.seen(x)

        def configure_optimizers(self) -> Any:
            return shared_out(self, self.weights)[0]

    def fit(weights: bool) -> str:
        quiet = {
            "logger": False,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
            "precision": "bf16-mixed",
        }
        trainer = lightning.Trainer(accelerator="cpu", devices=ranks(), strategy=ZeroStrategy(), max_steps=1, **quiet)
        return error_of(lambda: trainer.fit(Module(weights), batches()))

    return [(fit(True), UNREDUCED), (fit(False), "")]


if __name__ == "__main__":
    name, report = sys.argv[1:]
    found = globals()[name]()
    Path(f"{report}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
