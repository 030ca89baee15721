"""Runs of trainers with ZeroAdamW, one process a rank: `-m tests.trainers.runs TRAINER FOLDER STEPS RESUME REPORT`.

Each trains a small model with accumulation of two and clipping, saves after its last step and prints what a test compares.
The runs of accelerate, Fabric and Lightning then repeat by hand what their model saw, with ZeroAdamW's own calls.

`-m tests.trainers.runs TRAINER REPORT` asks for the answers to gradients that are not reduced: (what was said, what was expected).
"""

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zerocast
from tests import casts
from tests.workers import error_of
from zerocast.checkpoint.untrained import own_buffers

Found = dict[str, Any]
ACCUMULATED, CLIP, BATCH, RATE = 2, 0.5, 4, 1e-2
RECIPE = {"*.mlp.*": "nvfp4", "*.k_proj.weight": "mxfp8", "*_proj.weight": "fp8_block"}  # of transformers' model
MUON = ", Muon"  # ends the name of a run whose optimizer is ZeroMuon


class Seen(nn.Module):
    """A model that remembers its inputs, with frozen parts, plain and quantized, tied weights, and a
    persistent buffer that counts the inputs. A resumed run initializes it with another seed. Cast again
    from its values, the frozen weight in mxfp8 would have other bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1 if is_resumed() else 0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(64, 64).bfloat16().requires_grad_(False)
        nn.init.normal_(self.frozen.weight, std=0.1)
        self.register_buffer("count", torch.zeros(()))
        self.inputs: list[Tensor] = []
        recipe = {
            "net.*.weight": "nvfp4",
            "first.weight": "fp8_block",
            "last.weight": "fp8_block",
            "frozen.weight": "mxfp8",
        }
        zerocast.quantize_(self, recipe, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x.detach().clone())
        self.count += 1
        x = self.last(self.net(self.first(x))) * (1 + 0.01 * self.count)
        return (x - self.frozen(x.bfloat16())).float().square().mean()


def is_resumed() -> bool:
    """Return True in a run that continues another one, by the command line."""
    return bool(sys.argv[4:] and sys.argv[4])


def batches() -> Any:
    """Return an epoch of six steps on one rank, three on two."""
    rows = torch.randn(6 * ACCUMULATED * BATCH, 64, generator=torch.Generator().manual_seed(3))
    return torch.utils.data.DataLoader(rows, batch_size=BATCH)


def optimizer_of(model: nn.Module) -> tuple[zerocast.ZeroAdamW | zerocast.ZeroMuon, Any]:
    named = list(model.named_parameters())
    optimizer: zerocast.ZeroAdamW | zerocast.ZeroMuon
    if sys.argv[1].endswith(MUON):
        parts = [(muon, [(n, p) for n, p in named if (p.dim() == 2) is muon]) for muon in (True, False)]
        optimizer = zerocast.ZeroMuon([{"params": part, "use_muon": muon} for muon, part in parts], lr=RATE)
    else:
        optimizer = zerocast.ZeroAdamW(named, lr=RATE)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)


def by_hand(inputs: list[Tensor]) -> str:
    """Return the digest of a hand-written loop over the same micro-batches."""
    model = Seen()
    optimizer, scheduler = optimizer_of(model)
    for start in range(0, len(inputs), ACCUMULATED):
        *held, last = inputs[start : start + ACCUMULATED]
        with torch.autocast("cpu", torch.bfloat16):
            for x in held:
                with optimizer.no_sync():
                    (model(x) / ACCUMULATED).backward()
            (model(last) / ACCUMULATED).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return digest(optimizer, model)


def digest(optimizer: zerocast.ZeroAdamW | zerocast.ZeroMuon, model: nn.Module) -> str:
    """Return a digest of this rank's masters, moments and rates, and of the bytes of frozen parameters."""
    state = optimizer.state_dict()
    tensors = [*state["model"].values(), *(t for one in state["optim"]["state"].values() for t in one.values())]
    rates = [group["lr"] for group in optimizer.param_groups]
    found = casts.sha(torch.cat([getattr(t, "flat", t).reshape(-1).float() for t in tensors]))
    for parameter in (parameter for parameter in model.parameters() if not parameter.requires_grad):
        is_quantized = isinstance(parameter, zerocast.QuantizedWeight)
        held = own_buffers(parameter).values() if is_quantized else [parameter]
        found += "".join(map(casts.sha, held))
    return found + repr(rates)


def result(model: Any, optimizer: zerocast.ZeroAdamW | zerocast.ZeroMuon, resume: str, **more: Any) -> Found:
    ok = zerocast.verify(optimizer).ok
    hand = digest(optimizer, model) if resume else by_hand(copy.copy(model.inputs))
    return {"digest": digest(optimizer, model), "by hand": hand, "verified": ok, "count": int(model.count), **more}


def accelerate(folder: str, steps: int, resume: str) -> Found:
    from zerocast.integrations.huggingface import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, mixed_precision="bf16")
    model = Seen()
    optimizer, scheduler = optimizer_of(model)
    prepared, loader, stepper, schedule = accelerator.prepare(model, batches(), optimizer, scheduler)
    schedule.split_batches = True  # one step of the schedule a step, on any number of ranks
    done = 0
    if resume:
        accelerator.load_state(resume)
        done = int(model.count) // ACCUMULATED
    while done < steps:
        for x in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(x))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
                stepper.step()
                schedule.step()
                stepper.zero_grad()
            done += accelerator.sync_gradients
    accelerator.save_state(folder)
    whole = accelerator.get_state_dict(prepared)
    return result(model, optimizer, resume, plain=all(type(t) is Tensor for t in whole.values()), names=len(whole))


def fabric(folder: str, steps: int, resume: str) -> Found:
    import lightning

    from zerocast.integrations.lightning import FabricZeroStrategy

    runner = lightning.Fabric(accelerator="cpu", strategy=FabricZeroStrategy(), devices=ranks(), precision="bf16-mixed")
    runner.launch()
    model = Seen()
    optimizer, scheduler = optimizer_of(model)
    module, stepper = runner.setup(model, optimizer)
    state = {"model": module, "optimizer": stepper, "schedule": scheduler, "done": 0}
    if resume:
        runner.load(resume, state)
    loader = runner.setup_dataloaders(batches())
    while state["done"] < steps:
        for index, x in enumerate(loader):
            last = (index + 1) % ACCUMULATED == 0
            with runner.no_backward_sync(module, enabled=not last):
                runner.backward(module(x) / ACCUMULATED)
            if last:
                runner.clip_gradients(module, stepper, max_norm=CLIP)
                stepper.step()
                stepper.zero_grad()
                scheduler.step()
                state["done"] += 1
    runner.save(folder, state)
    return result(model, optimizer, resume)


def lightning_trainer(folder: str, steps: int, resume: str) -> Found:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from zerocast.integrations.lightning import ZeroStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.seen = Seen()

        def training_step(self, x: Tensor, index: int) -> Tensor:
            return self.seen(x)

        def validation_step(self, x: Tensor, index: int) -> None:
            self.log("loss", (self.seen.net(x) - x).float().square().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = optimizer_of(self)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def train_dataloader(self) -> Any:
            return batches()

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=steps // 2, save_top_k=-1)

    def made(*callbacks: Any) -> Any:
        return lightning.Trainer(
            accelerator="cpu",
            devices=ranks(),
            strategy=ZeroStrategy(),
            precision="bf16-mixed",
            max_steps=steps,
            accumulate_grad_batches=ACCUMULATED,
            gradient_clip_val=CLIP,
            callbacks=[*callbacks],
            enable_checkpointing=bool(callbacks),
            **quiet,
        )

    trainer, module = made(saving), Module()
    trainer.fit(module, ckpt_path=resume or None)
    if resume:
        return result(module.seen, trainer.optimizers[0], resume)

    def loss(trainer: Any, module: Any, path: Any = None) -> float:
        ((found),) = trainer.validate(module, batches(), ckpt_path=path, verbose=False)
        return float(found["loss"])

    whole, weights = Path(folder) / f"step={steps}.ckpt", Path(folder) / "weights.ckpt"
    trainer.save_checkpoint(weights, weights_only=True)
    before = digest(trainer.optimizers[0], module)
    fresh = [loss(made(), Module())]
    loaded = [loss(made(), Module(), whole), loss(made(), Module(), weights), loss(trainer, Module(), whole)]
    loaded += [loss(trainer, module, weights), loss(trainer, module, whole), loss(made(), frozen(Module()), whole)]
    same = digest(trainer.optimizers[0], module) == before
    more = {"validated": loss(trainer, module), "loaded": loaded, "fresh": fresh, "state is as before": same}
    return result(module.seen, trainer.optimizers[0], resume, **more)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def hf_trainer(folder: str, steps: int, resume: str) -> Found:
    import transformers

    from zerocast.integrations.huggingface import Trainer

    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(**sizes, **heads)
    texts = torch.randint(0, 96, (64, 16), generator=torch.Generator().manual_seed(4))
    arguments = transformers.TrainingArguments(
        str(Path(folder).parent),
        max_steps=6,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED,
        max_grad_norm=CLIP,
        learning_rate=RATE,
        save_steps=3,
        logging_steps=1,
        bf16=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )

    def made(recipe: dict[str, str] | None, kind: type[transformers.Trainer]) -> transformers.Trainer:
        torch.manual_seed(1 if is_resumed() else 0)
        model = transformers.LlamaForCausalLM(config)
        model.model.norm.requires_grad_(False)
        model.model.layers[0].self_attn.k_proj.requires_grad_(False)
        if recipe:
            zerocast.quantize_(model, recipe, dtype=torch.bfloat16)
        rows = [{"input_ids": row, "labels": row} for row in texts]
        return kind(model, arguments, train_dataset=rows, eval_dataset=rows)

    trainer = made(RECIPE, Trainer)
    trainer.train(resume_from_checkpoint=resume or None)
    optimizer = trainer._zero()
    found = {
        "digest": digest(optimizer, trainer.model),
        "verified": zerocast.verify(optimizer).ok,
        "logs": logs(trainer),
    }
    if not resume:
        read = transformers.LlamaForCausalLM.from_pretrained(Path(folder).parent / "checkpoint-6", dtype=torch.float32)
        whole = zerocast.optim.full_state_dict(trainer.model, optimizer)
        found["read back"] = all(torch.equal(t.float(), read.state_dict()[name]) for name, t in whole.items())
        arguments.save_strategy = "no"
        plain = made(None, transformers.Trainer)
        plain.train()
        found["stock"] = logs(plain)
    return found


def logs(trainer: Any) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line]


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


RUNS: dict[str, Callable[[str, int, str], Found]] = {
    "accelerate": accelerate,
    "fabric": fabric,
    "lightning": lightning_trainer,
    "transformers": hf_trainer,
}


Said = list[tuple[str, str]]

UNREDUCED = "so its gradient would not be averaged over the ranks"


def shared_out(model: nn.Module, weights: bool) -> tuple[zerocast.ZeroAdamW, torch.optim.Optimizer]:
    """Return a ZeroAdamW over the weights, or over all parameters, and an SGD over the biases."""
    named = [(name, p) for name, p in model.named_parameters() if not weights or "weight" in name]
    return zerocast.ZeroAdamW(named), torch.optim.SGD([p for name, p in model.named_parameters() if "bias" in name])


def accelerate_unreduced() -> Said:
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


def fabric_unreduced() -> Said:
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


def lightning_unreduced() -> Said:
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


UNREDUCED_RUNS: dict[str, Callable[[], Said]] = {
    "accelerate": accelerate_unreduced,
    "fabric": fabric_unreduced,
    "lightning": lightning_unreduced,
}

if __name__ == "__main__":
    name, *arguments, report = sys.argv[1:]
    found: Found | Said
    if arguments:
        folder, steps, resume = arguments
        found = RUNS[name.removesuffix(MUON)](folder, int(steps), resume)
    else:
        found = UNREDUCED_RUNS[name]()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ.get("RANK", "0"))
    Path(f"{report}.{rank}").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
