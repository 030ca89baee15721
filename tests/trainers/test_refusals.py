"""What trainers on one rank answer to misuse. What they answer to gradients that are not reduced: `unreduced.py`."""

from pathlib import Path

import pytest
import torch
from torch import nn

import zerocast
from tests.trainers.host_on_cpu import WHY_NOT, host_on_cpu
from tests.trainers.runs import Seen, batches
from tests.workers import error_of

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


def test_fabric(tmp_path: Path) -> None:
    with host_on_cpu():
        import lightning

        from zerocast.integrations.lightning import FabricZeroStrategy

        runner = lightning.Fabric(accelerator="cpu", devices=1, strategy=FabricZeroStrategy())
        runner.launch()
        module = runner.setup_module(Seen())
        assert "it has the masters" in error_of(lambda: runner.save(tmp_path / "state", {"model": module}))
        assert not (tmp_path / "state").exists()


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
        import lightning

        from zerocast.integrations.lightning import ZeroStrategy

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = net()

            def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
                return self.net(x).square().mean()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD([p for p in self.parameters() if type(p) is nn.Parameter], lr=0.1)

        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy=ZeroStrategy(), max_steps=1, **quiet)
        assert said in error_of(lambda: trainer.fit(Module(), batches()))
