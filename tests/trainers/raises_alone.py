"""A run of Lightning on two processes, of which one raises alone, in a step (and then saves) or in a hook while both save:
`-m tests.trainers.raises_alone zero|ddp step|save RANK SECONDS FOLDER`. Lightning starts the second process. The timeout of their
process group is so many seconds.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

import zerocast
from zerocast.integrations.lightning import ZeroStrategy


class Module(lightning.LightningModule):
    """One quantized layer under ZeroStrategy, a plain one under DDPStrategy."""

    def __init__(self, quantized: bool, where: str, raising: int) -> None:
        super().__init__()
        self.quantized, self.where, self.raising = quantized, where, raising
        self.net = nn.Linear(64, 64)
        if quantized:
            zerocast.quantize_(self, {"net.weight": "nvfp4"}, dtype=torch.bfloat16)

    def raise_in(self, where: str) -> None:
        if self.global_rank == self.raising and where == self.where:
            raise RuntimeError(f"rank {self.raising} raises alone")

    def training_step(self, x: Tensor, index: int) -> Tensor:
        if index == 1:
            self.raise_in("step")
        return self.net(x).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return zerocast.ZeroAdamW(self.named_parameters()) if self.quantized else torch.optim.AdamW(self.parameters())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Lightning's hook, on all ranks before the checkpoint is written."""
        self.raise_in("save")


def main(strategy: str, where: str, rank: int, seconds: int, folder: Path) -> None:
    """Train two steps and save."""
    (folder / f"{os.environ.get('LOCAL_RANK', '0')}.pid").write_text(str(os.getpid()))
    kind = ZeroStrategy if strategy == "zero" else DDPStrategy
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=kind(timeout=timedelta(seconds=seconds)),
        max_steps=2,
        precision="bf16-true",
        callbacks=[OnExceptionCheckpoint(folder, "saved")],
        **quiet,
    )
    loader = torch.utils.data.DataLoader(torch.randn(16, 64), batch_size=4)
    trainer.fit(Module(strategy == "zero", where, rank), loader)
    trainer.save_checkpoint(folder / "saved.ckpt")
    (folder / "went on").touch()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
