"""Answers of trainers on one rank to misuse. `runs.py` has those to gradients that are not reduced."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import nn

import zerocast
from tests.trainers.host_on_cpu import WHY_NOT, host_on_cpu
from tests.trainers.runs import Seen, batches
from tests.workers import error_of
from zerocast.integrations import zero_run

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def test_accelerate(tmp_path: Path) -> None:
    with host_on_cpu():
        from zerocast.integrations.huggingface import Accelerator

        accelerator, model = Accelerator(cpu=True), Seen()
        accelerator.prepare(model, zerocast.ZeroAdamW(model.named_parameters()))
        assert "No input_dir provided and automatic checkpoint naming is disabled" in error_of(accelerator.load_state)
        assert "was saved without zerocast" in error_of(lambda: accelerator.load_state(str(tmp_path)))
        elsewhere = nn.Linear(8, 8, device="meta")
        elsewhere.register_parameter("quantized", Seen().net[0].weight)
        said = error_of(lambda: accelerator.prepare(elsewhere))
        assert "before zerocast.quantize_, since masters are on the device of the weights" in said


def test_a_state_of_accelerate_is_not_of_two_saves(tmp_path: Path) -> None:
    """accelerate overwrites its own files first. If the masters are not saved then, the older ones must not be loaded."""
    with host_on_cpu():
        from zerocast.integrations.huggingface import Accelerator

        accelerator, model = Accelerator(cpu=True), Seen()
        accelerator.prepare(model, zerocast.ZeroAdamW(model.named_parameters()))
        accelerator.save_state(str(tmp_path))
        with mock.patch.object(zero_run, "save", side_effect=KeyError), pytest.raises(KeyError):
            accelerator.save_state(str(tmp_path))
        assert "or its save was interrupted" in error_of(lambda: accelerator.load_state(str(tmp_path)))
        accelerator.save_state(str(tmp_path))
        accelerator.load_state(str(tmp_path))


def test_accelerate_saves_a_model_of_masters_in_fp32(tmp_path: Path) -> None:
    """`save_model` leaves out all but one of the tensors that share a storage."""
    with host_on_cpu():
        from zerocast.integrations.huggingface import Accelerator

        accelerator, model = Accelerator(cpu=True), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        zerocast.quantize_(model, {"0.weight": "nvfp4"}, dtype=torch.float32)
        model, _ = accelerator.prepare(model, zerocast.ZeroAdamW(model.named_parameters()))
        accelerator.save_model(model, str(tmp_path))
        stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
        assert stored.keys() == model.state_dict().keys()


def test_fabric(tmp_path: Path) -> None:
    with host_on_cpu():
        import lightning

        from zerocast.integrations.lightning import FabricZeroStrategy

        runner = lightning.Fabric(accelerator="cpu", devices=1, strategy=FabricZeroStrategy())
        runner.launch()
        module = runner.setup_module(Seen())
        assert "it has the masters" in error_of(lambda: runner.save(tmp_path / "state", {"model": module}))
        assert not (tmp_path / "state").exists()


def lightning_run(net: nn.Module, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[Any, Any]:
    """Return a Trainer of one step by ZeroStrategy, and a module around a model. Called inside `host_on_cpu`."""
    import lightning

    from zerocast.integrations.lightning import ZeroStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(x).square().mean()

        def validation_step(self, x: torch.Tensor, index: int) -> None:
            self.net(x)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "precision": "bf16-mixed"}
    return lightning.Trainer(accelerator="cpu", devices=1, strategy=ZeroStrategy(), max_steps=1, **options), Module()


@pytest.mark.parametrize(
    ("net", "said"),
    [
        (lambda: nn.Linear(64, 64), "no weight of the model is quantized"),
        (Seen, "configure_optimizers returned SGD"),
    ],
    ids=["plain", "another optimizer"],
)
def test_lightning(net, said: str) -> None:
    with host_on_cpu():
        trainer, module = lightning_run(
            net(), lambda module: torch.optim.SGD([p for p in module.parameters() if type(p) is nn.Parameter], lr=0.1)
        )
        assert said in error_of(lambda: trainer.fit(module, batches()))


def test_lightning_validates_before_fit_and_saves_no_file_over_a_folder(tmp_path: Path) -> None:
    with host_on_cpu():
        trainer, module = lightning_run(Seen(), lambda module: zerocast.ZeroAdamW(module.named_parameters()))
        trainer.validate(module, batches(), verbose=False)
        trainer.fit(module, batches())
        path = tmp_path / "full.ckpt"
        trainer.save_checkpoint(path)
        files = sorted(path.iterdir())
        said = error_of(lambda: trainer.save_checkpoint(path, weights_only=True))
        assert "is the folder of an earlier checkpoint with optimizer states" in said
        assert sorted(path.iterdir()) == files


def test_lightning_does_not_resume_without_moments(tmp_path: Path) -> None:
    """A file of DDPStrategy has the moments of another optimizer, and would begin with none."""
    with host_on_cpu():
        trainer, module = lightning_run(Seen(), lambda module: zerocast.ZeroAdamW(module.named_parameters()))
        trainer.fit(module, batches())
        trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
        plain = torch.load(tmp_path / "weights", weights_only=True) | {"optimizer_states": [{}], "lr_schedulers": []}
        torch.save(plain, tmp_path / "plain")
        trainer, module = lightning_run(Seen(), lambda module: zerocast.ZeroAdamW(module.named_parameters()))
        said = error_of(lambda: trainer.fit(module, batches(), ckpt_path=str(tmp_path / "plain")))
        assert "no masters and moments were loaded" in said
