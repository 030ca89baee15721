"""What trainers answer to misuse: `-m tests.trainers.refusals TRAINER FOLDER REPORT` writes (what was said, what was expected)."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerocast
from tests.trainers.runs import Seen, batches, optimizer_of
from tests.workers import error_of

Said = list[tuple[str, str]]


def accelerate(folder: Path) -> Said:
    from zerocast.integrations.huggingface import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Seen()
    accelerator.prepare(model, optimizer_of(model)[0])
    (folder / "empty").mkdir()
    elsewhere = nn.Linear(8, 8, device="meta")
    elsewhere.register_parameter("quantized", Seen().net[0].weight)
    return [
        (said(accelerator.load_state), "name the folder that save_state returned"),
        (said(lambda: accelerator.load_state(str(folder / "empty"))), "was saved without zerocast"),
        (said(lambda: accelerator.prepare(elsewhere)), "move the model there before zerocast.quantize_"),
    ]


def transformers(folder: Path) -> Said:
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from zerocast.integrations.huggingface import Trainer

    small = LlamaConfig(hidden_size=32, intermediate_size=32, vocab_size=32, num_attention_heads=2, num_hidden_layers=1)
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=1)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    plain = LlamaForCausalLM(small)
    quantized = zerocast.quantize_(LlamaForCausalLM(small), {"*_proj.weight": "fp8_block"})
    others = torch.optim.SGD([p for p in quantized.parameters() if type(p) is nn.Parameter], lr=0.1)
    return [
        (said(Trainer(plain, arguments, train_dataset=rows).train), "call zerocast.quantize_(model, recipe) before"),
        (said(Trainer(quantized, arguments, train_dataset=rows, optimizers=(others, None)).train), "not SGD"),
    ]


def fabric(folder: Path) -> Said:
    import lightning

    from zerocast.integrations.lightning import FabricZeroStrategy

    runner = lightning.Fabric(accelerator="cpu", devices=1, strategy=FabricZeroStrategy())
    runner.launch()
    model = Seen()
    optimizer_of(model)
    module = runner.setup_module(model)
    return [(said(lambda: runner.save(folder / "state", {"model": module})), "it has the masters")]


def lightning(folder: Path) -> Said:
    import lightning

    from zerocast.integrations.lightning import ZeroStrategy

    class Module(lightning.LightningModule):
        def __init__(self, net: nn.Module, optimizer: Callable[[Any], Any]) -> None:
            super().__init__()
            self.net, self.made = net, optimizer

        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(x).square().mean()

        def configure_optimizers(self) -> Any:
            return self.made([p for p in self.parameters() if type(p) is nn.Parameter])

    def fit(net: nn.Module) -> str:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy=ZeroStrategy(), max_steps=1, **quiet)
        return said(lambda: trainer.fit(Module(net, lambda parameters: torch.optim.SGD(parameters, lr=0.1)), batches()))

    return [
        (fit(nn.Linear(64, 64)), "no weight of the model is quantized"),
        (fit(Seen()), "configure_optimizers returned SGD"),
    ]


def said(call: Callable[[], Any]) -> str:
    return error_of(call)


if __name__ == "__main__":
    name, folder, report = sys.argv[1:]
    Path(report).write_text(json.dumps(globals()[name](Path(folder))))
