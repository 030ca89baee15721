"""ZeroStrategy: how Lightning's Trainer runs a model whose masters ZeroAdamW has."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from zerocast.integrations import zero_run
from zerocast.integrations.zero_run import check_place, is_quantized, without_reduction
from zerocast.optim import ZeroAdamW, full_state_dict

_META, _FOLDER = "lightning.ckpt", "zerocast"


class ZeroStrategy(DDPStrategy):
    """`Trainer(strategy=ZeroStrategy())` for a LightningModule whose `configure_optimizers` returns
    a ZeroAdamW.

    Processes are started and joined as by DDPStrategy, whose arguments it takes; the model stays as
    it is, since ZeroAdamW averages gradients and gathers weights. Clipping and
    `accumulate_grad_batches` are Lightning's. A checkpoint is a folder: `lightning.ckpt` with
    everything of Lightning's and the FP32 masters as its state dict, which
    `LightningModule.load_state_dict` of a model without QuantizedWeights takes, and `zerocast` with
    each rank's part of masters and moments, which any number of ranks resumes. A checkpoint of
    weights alone is a file, as ever.
    """

    strategy_name = "zerocast"

    def configure_ddp(self) -> None:
        """Nothing is wrapped. ValueError for a model without QuantizedWeights, which nobody would
        reduce.
        """
        assert self.lightning_module is not None
        if not is_quantized(self.lightning_module):
            raise ValueError(
                "no weight of the model is quantized: call zerocast.quantize_(model, recipe) in its __init__ or "
                "configure_model, or train with DDPStrategy"
            )
        check_place(self.lightning_module, self.root_device)

    def setup_optimizers(self, trainer: Any) -> None:
        """As in Lightning. TypeError for an optimizer that is no ZeroAdamW: nobody would reduce its
        gradients.
        """
        super().setup_optimizers(trainer)
        others = [type(one).__name__ for one in self.optimizers if not isinstance(one, ZeroAdamW)]
        if others:
            raise TypeError(f"configure_optimizers returned {others[0]}: ZeroStrategy runs zerocast.ZeroAdamW")

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients stay on this rank within, where batches accumulate."""
        assert self.lightning_module is not None
        with without_reduction(self._zero, self.lightning_module):
            yield

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Masters exist once the optimizer does."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """FP32 masters, whole, on rank 0. ValueError with several optimizers."""
        assert self.lightning_module is not None
        if not self._zero:
            return super().lightning_module_state_dict()
        if len(self._zero) > 1:
            raise ValueError("ZeroStrategy saves one ZeroAdamW: give it all parameters, in groups")
        return full_state_dict(self.lightning_module, self._zero[0], dtype=torch.float32)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Nothing: each rank saves its own part (`save_checkpoint`)."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """A folder with `lightning.ckpt` and `zerocast`; a file, if only weights are saved."""
        if "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        assert self.lightning_module is not None
        path = Path(self.broadcast(filepath))
        super().save_checkpoint(checkpoint, path / _META, storage_options)
        zero_run.save(path / _FOLDER, self._zero, [self.lightning_module])

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What `save_checkpoint` wrote, on any number of ranks. ValueError as from
        `zerocast.optim.load`.
        """
        path = Path(self.broadcast(checkpoint_path))
        if not path.is_dir():
            return super().load_checkpoint(path, weights_only)
        assert self.lightning_module is not None
        zero_run.load(path / _FOLDER, self._zero, [self.lightning_module])
        return super().load_checkpoint(path / _META, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing where an optimizer made the weights of its masters."""
        if not self._zero:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` did."""

    def teardown(self) -> None:
        """As in Lightning, but that model and optimizer stay on their device: weights are no copies
        to be moved.
        """
        module, optimizers = self._lightning_module, self.optimizers
        self._lightning_module, self.optimizers = None, []
        try:
            super().teardown()
        finally:
            self._lightning_module, self.optimizers = module, optimizers

    @property
    def _zero(self) -> list[ZeroAdamW]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, ZeroAdamW)]
