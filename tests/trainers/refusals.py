"""What trainers answer to misuse: `-m tests.trainers.refusals TRAINER FOLDER REPORT` writes (what was said, what was expected) for
each rank; on several ranks, what they answer to gradients that nobody would reduce.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerocast
from tests.trainers.runs import Seen, batches, optimizer_of, ranks
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
    saved = accelerator.save_state(str(folder / "of one"))
    lone = Accelerator(cpu=True)
    lone.prepare(Seen())
    two = Accelerator(cpu=True)
    models = Seen(), Seen()
    two.prepare(*models, *(optimizer_of(one)[0] for one in models))
    return [
        (said(lambda: two.load_state(saved)), "states of 1 ZeroAdamWs, but 2 were passed"),
        (said(lambda: lone.save_state(str(folder / "lone"))), "it has the masters"),
        (said(lambda: lone.load_state(saved)), "it has the masters"),
        (said(accelerator.load_state), "No input_dir provided and automatic checkpoint naming is disabled"),
        (said(lambda: accelerator.load_state(str(folder / "empty"))), "was saved without zerocast"),
        (
            said(lambda: accelerator.prepare(elsewhere)),
            "before zerocast.quantize_, since masters are on the device of the weights",
        ),
    ]


def transformers(folder: Path) -> Said:
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from zerocast.integrations.huggingface import Trainer

    small = LlamaConfig(hidden_size=32, intermediate_size=32, vocab_size=32, num_attention_heads=2, num_hidden_layers=1)
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=1)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    plain = LlamaForCausalLM(small)
    quantized = zerocast.quantize_(LlamaForCausalLM(small), {"*_proj.weight": "fp8_block"})
    several = TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=1)
    several._n_gpu = several.n_gpu + 2  # as where a process sees several
    on_several = Trainer(
        zerocast.quantize_(LlamaForCausalLM(small), {"*_proj.weight": "fp8_block"}), several, train_dataset=rows
    )
    others = torch.optim.SGD([p for p in quantized.parameters() if type(p) is nn.Parameter], lr=0.1)
    return [
        (said(on_several.train), "start a process a GPU (torchrun"),
        (said(lambda: on_several.evaluate(rows)), "start a process a GPU (torchrun"),
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


UNREDUCED = "so its gradient would not be averaged over the ranks"


def shared_out(model: nn.Module, weights: bool) -> tuple[zerocast.ZeroAdamW, torch.optim.Optimizer]:
    """A ZeroAdamW over the weights, or over all parameters, and an SGD over the biases."""
    named = [(name, p) for name, p in model.named_parameters() if not weights or "weight" in name]
    return zerocast.ZeroAdamW(named), torch.optim.SGD([p for name, p in model.named_parameters() if "bias" in name])


def unreduced_by_accelerate(folder: Path) -> Said:
    from zerocast.integrations.huggingface import Accelerator

    def backward(weights: bool, head: bool = False) -> str:
        accelerator, model = Accelerator(cpu=True), Seen()
        zero, others = shared_out(model, weights)
        if head:
            model.add_module("head", nn.Linear(64, 1))
            others = torch.optim.SGD(model.head.parameters())
        prepared, *_ = accelerator.prepare(model, zero, *([others] if weights or head else []))
        return said(lambda: accelerator.backward(prepared(torch.ones(2, 64, dtype=torch.bfloat16))))

    def backward_before_and_after_a_second_model() -> list[str]:
        accelerator, model = Accelerator(cpu=True), Seen()
        prepared, _ = accelerator.prepare(model, shared_out(model, weights=False)[0])
        before = said(lambda: accelerator.backward(prepared(torch.ones(2, 64, dtype=torch.bfloat16))))
        accelerator.prepare(Seen())
        return [before, said(lambda: accelerator.backward(prepared(torch.ones(2, 64, dtype=torch.bfloat16))))]

    return [
        (backward(True), UNREDUCED),
        (backward(False, head=True), UNREDUCED),
        (backward(False), ""),
        *zip(backward_before_and_after_a_second_model(), ("", UNREDUCED), strict=True),
    ]


def unreduced_by_fabric(folder: Path) -> Said:
    import lightning

    from zerocast.integrations.lightning import FabricZeroStrategy

    def backward(weights: bool) -> str:
        runner = lightning.Fabric(accelerator="cpu", strategy=FabricZeroStrategy(), devices=ranks())
        runner.launch()
        model = Seen()
        zero, others = shared_out(model, weights)
        module, *_ = runner.setup(model, zero, *([others] if weights else []))
        return said(lambda: runner.backward(module(torch.ones(2, 64, dtype=torch.bfloat16))))

    return [(backward(True), UNREDUCED), (backward(False), "")]


def unreduced_by_lightning(folder: Path) -> Said:
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
        return said(lambda: trainer.fit(Module(weights), batches()))

    return [(fit(True), UNREDUCED), (fit(False), "")]


if __name__ == "__main__":
    name, folder, report = sys.argv[1:]
    found = globals()[f"unreduced_by_{name}" if ranks() > 1 else name](Path(folder))
    Path(f"{report}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
