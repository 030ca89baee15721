"""ZeroStrategy: how Lightning's Trainer runs a model whose masters ZeroAdamW has."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from zerocast import QuantizedWeight
from zerocast.integrations import zero_run
from zerocast.integrations.zero_run import check_owners, check_place, is_quantized, of_model, without_reduction
from zerocast.optim import ZeroAdamW, full_state_dict, load_masters
from zerocast.optim.pretrained import names_in
from zerocast.optim.zero_optimizer import ZeroOptimizer

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

    `validate`, `test` and `predict` need no optimizer: of a checkpoint they cast the masters into
    the weights of the module. Scales of delayed scaling are seeded anew then. Without a checkpoint
    each rank takes the module as it is there; DDPStrategy would broadcast that of rank 0.
    """

    strategy_name = "zerocast"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._masters_loaded = False  # by load_checkpoint

    def setup(self, trainer: Any) -> None:
        """As in DDPStrategy, whose broadcast without an optimizer a QuantizedWeight cannot take."""
        if trainer.state.fn == TrainerFn.FITTING:
            super().setup(trainer)
            return
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.setup_precision_plugin()

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
        """As in Lightning. TypeError for an optimizer that is no ZeroAdamW, and RuntimeError, on
        several ranks, for a parameter that requires a gradient and that none has: nobody would
        reduce it.
        """
        super().setup_optimizers(trainer)
        others = [type(one).__name__ for one in self.optimizers if not isinstance(one, ZeroOptimizer)]
        if others:
            raise TypeError(
                f"configure_optimizers returned {others[0]}: ZeroStrategy runs zerocast.ZeroAdamW or ZeroMuon"
            )
        if self.world_size > 1:
            assert self.lightning_module is not None
            check_owners(self._zero, [self.lightning_module])

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
        self._masters_loaded = False
        if not path.is_dir():
            return super().load_checkpoint(path, weights_only)
        if self._zero:
            assert self.lightning_module is not None
            zero_run.load(path / _FOLDER, self._zero, [self.lightning_module])
            self._masters_loaded = True
        return super().load_checkpoint(path / _META, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing after `load_checkpoint` of a folder into the module's optimizer; else the weights
        are cast from the checkpoint's masters, by the module's optimizer or one for this purpose.

        ValueError on every rank for masters that are missing or do not fit.
        """
        module = self.lightning_module
        assert module is not None
        if self._masters_loaded:
            return
        state, names = checkpoint["state_dict"], dict(module.named_parameters(remove_duplicate=False))
        taken: set[str] = set()
        with contextlib.ExitStack() as stack:
            for optimizer in [*self._zero, *_made_for(self._zero, module, stack)]:
                known = names_in(optimizer)
                masters = {name: known[id(p)] for name, p in names.items() if id(p) in known}
                load_masters(optimizer, {masters[name]: tensor for name, tensor in state.items() if name in masters})
                taken |= {*masters}
        rest = module.load_state_dict(
            {name: tensor for name, tensor in state.items() if name not in taken}, strict=False
        )
        missing, unexpected = [name for name in rest.missing_keys if name not in taken], rest.unexpected_keys
        if strict and (missing or unexpected):
            raise ValueError(f"the checkpoint lacks {missing} of the module, and has {unexpected} beyond it")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: masters and moments came with `load_checkpoint`."""

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
    def _zero(self) -> list[ZeroOptimizer]:
        """The optimizers of this module; those of a module before it may still be there."""
        assert self.lightning_module is not None
        zero = [optimizer for optimizer in self.optimizers if isinstance(optimizer, ZeroOptimizer)]
        return of_model(zero, self.lightning_module)


def _made_for(owners: list[ZeroOptimizer], module: nn.Module, stack: contextlib.ExitStack) -> Iterator[ZeroOptimizer]:
    """An optimizer over the quantized weights that have none, whose only work is to cast; frozen
    ones require a gradient until the stack ends.
    """
    owned = {key for owner in owners for key in names_in(owner)}
    left = [
        (n, p)
        for n, p in module.named_parameters()
        if isinstance(p, QuantizedWeight) and id(p) not in owned and p.numel()
    ]
    for _, weight in left:
        stack.callback(weight.requires_grad_, weight.requires_grad)
        weight.requires_grad_()
    if left:
        yield ZeroAdamW(left)
