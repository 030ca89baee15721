"""Lightning's Trainer and Fabric with checkpoints in a store, one process a rank: `-m tests.trainers.stores NAME FOLDER REPORT`.

What each rank found is a list of (name, whether it is so).
"""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import zerocast
from tests.checkpoint import storage
from tests.trainers.runs import ranks
from tests.workers import error_of
from zerocast.integrations import zero_run

URL = "plain://runs"
Found = list[tuple[str, bool]]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    return zerocast.quantize_(model, {"*.weight": "nvfp4"})


def masters(model: torch.nn.Module, optimizer: Any) -> list[bytes]:
    state = zerocast.optim.full_state_dict(model, optimizer)
    return [tensor.numpy().tobytes() for _, tensor in sorted(state.items())]


def module_class() -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, raises: str = "") -> None:
            super().__init__()
            self.net, self.raises = net(), raises

        def training_step(self, x: Tensor, index: int) -> Tensor:
            self._raise("forward", 2)
            return self.net(x * (1 + self.global_step)).square().mean()

        def on_after_backward(self) -> None:
            self._raise("backward", 2)

        def on_train_batch_end(self, *_: Any) -> None:
            self._raise("after a step", 3)

        def configure_optimizers(self) -> Any:
            return zerocast.ZeroAdamW(self.named_parameters(), lr=1e-2)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([torch.ones(32)] * 32, batch_size=2)

        def _raise(self, where: str, step: int) -> None:
            if where == self.raises and self.global_step == step:
                raise ZeroDivisionError(where)

    return Module


def trainer(*callbacks: Any) -> Any:
    import lightning

    from zerocast.integrations.lightning import ZeroStrategy

    of_run = {"accelerator": "cpu", "devices": ranks(), "max_steps": 5, "enable_checkpointing": bool(callbacks)}
    return lightning.Trainer(strategy=ZeroStrategy(), callbacks=[*callbacks], **of_run, **QUIET)


def fitted(*callbacks: Any, path: str | None = None) -> list[bytes]:
    run, module = trainer(*callbacks), module_class()()
    run.fit(module, ckpt_path=path)
    return masters(module, run.optimizers[0])


def lightning(folder: Path) -> Found:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(URL, filename="{step}", every_n_train_steps=2, save_top_k=1, save_last=True)
    whole = fitted(saving)
    # save_top_k=1 has removed the folder of step 2.
    names = {path.relative_to(folder / "runs").parts[0] for path in folder.rglob("*") if path.is_file()}
    found = [("folders", names == {"last.ckpt", "step=4.ckpt"})]
    found += [("resumed", fitted(path=saving.last_model_path) == whole), *exceptions(whole)]

    # A second save of the same name that breaks off between Lightning's file and the masters.
    run, module = trainer(), module_class()()
    run.fit(module)
    run.save_checkpoint(f"{URL}/again.ckpt")
    with mock.patch.object(zero_run, "save", side_effect=OSError("the store is gone")):
        error_of(lambda: run.save_checkpoint(f"{URL}/again.ckpt"))
    said = error_of(lambda: fitted(path=f"{URL}/again.ckpt"))
    return [*found, ("from two saves", "ValueError" in said and "are from two saves" in said)]


def exceptions(whole: list[bytes]) -> Found:
    """Check that an exception ends a run on all ranks, and that the run goes on from what is saved then."""
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    class Kept(OnExceptionCheckpoint):
        def teardown(self, *_: Any, **__: Any) -> None:
            """Keep the checkpoint, which the stock callback deletes at the end of a fit, also after an exception."""

    def saving(name: str) -> tuple[Any, ...]:
        return Kept(URL, f"{name} 0"), ModelCheckpoint(URL, filename=f"{name} 1", save_on_exception=True)

    found = []
    for where in ("forward", "backward", "after a step"):
        for number, callback in enumerate(saving(where)):
            said = error_of(functools.partial(trainer(callback).fit, module_class()(where)))
            found += [(f"raised {where} {number}", said == f"ZeroDivisionError: {where}")]
            found += [(f"resumed {where} {number}", fitted(path=f"{URL}/{where} {number}.ckpt") == whole)]
    return found


def fabric(folder: Path) -> Found:
    import lightning

    from zerocast.integrations.lightning import FabricZeroStrategy

    runner = lightning.Fabric(accelerator="cpu", devices=ranks(), strategy=FabricZeroStrategy())
    runner.launch()

    def made() -> dict[str, Any]:
        model = net()
        module, optimizer = runner.setup(model, zerocast.ZeroAdamW(model.named_parameters(), lr=1e-2))
        return {"model": module, "optimizer": optimizer, "step": 0}

    def value(state: dict[str, Any]) -> list[bytes]:
        return masters(state["model"], state["optimizer"].optimizer)

    state, other = made(), made()
    runner.backward(state["model"](torch.ones(2, 32)).square().mean())
    state["optimizer"].step()
    state["step"] = 1
    runner.save(f"{URL}/fabric", state)
    remaining = runner.load(f"{URL}/fabric", other)
    found = [("resumed", value(other) == value(state) and other["step"] == 1), ("nothing remains", remaining == {})]
    state["step"] = 2
    with mock.patch.object(zero_run, "save", side_effect=OSError("the store is gone")):
        error_of(lambda: runner.save(f"{URL}/fabric", state))
    fresh = made()
    before = value(fresh)
    said = error_of(lambda: runner.load(f"{URL}/fabric", fresh))
    return [*found, ("from two saves", "are from two saves" in said), ("as before", value(fresh) == before)]


if __name__ == "__main__":
    name, folder, report = sys.argv[1:]
    storage.register_plain_store(folder)
    found = globals()[name](Path(folder))
    Path(f"{report}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
