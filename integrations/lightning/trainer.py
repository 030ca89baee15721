"""ZeroStrategy: run a quantized model with ZeroAdamW under Lightning's Trainer."""

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from zerocast import QuantizedWeight
from zerocast.checkpoint.store import as_location
from zerocast.integrations import overrides, zero_run
from zerocast.integrations.zero_run import (
    check_device,
    check_owners,
    is_quantized,
    optimizers_of_model,
    without_reduction,
)
from zerocast.optim import ZeroAdamW, full_state_dict, load_masters
from zerocast.optim.pretrained import names_in
from zerocast.optim.zero_optimizer import ZeroOptimizer

META, FOLDER = "lightning.ckpt", "zerocast"
# The key in `lightning.ckpt` of an id that the `zerocast` folder of the same save has too.
SAVE_ID = "zerocast_save_id"


@overrides("_zero")
class ZeroStrategy(DDPStrategy):
    """`Trainer(strategy=ZeroStrategy())` for a LightningModule whose `configure_optimizers` returns
    a ZeroAdamW.

    Processes are started and joined as by DDPStrategy, whose arguments it takes; the model stays as
    it is, since ZeroAdamW averages gradients and gathers weights. Clipping and
    `accumulate_grad_batches` are Lightning's. A checkpoint is a folder: `lightning.ckpt` with
    everything of Lightning's and the FP32 masters as its state dict, which
    `LightningModule.load_state_dict` of a model without QuantizedWeights accepts, and `zerocast`
    with each rank's part of masters and moments, which any number of ranks resumes. A checkpoint of
    weights only is a file, as in Lightning. Paths may be URLs that fsspec opens.

    `validate`, `test` and `predict` need no optimizer: they cast the masters of a checkpoint into
    the weights of the module. Scales of delayed scaling then start again from the masters. Without
    a checkpoint each rank uses its own module; DDPStrategy would broadcast the module of rank 0.
    """

    strategy_name = "zerocast"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # True if `load_checkpoint` has loaded masters, so that `load_model_state_dict` must not.
        self._masters_loaded = False

    def setup(self, trainer: Any) -> None:
        """Set up like DDPStrategy. Without an optimizer, do so without its broadcast of the model,
        which does not work for a QuantizedWeight.
        """
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
        """Check the model in place of wrapping it. Raises ValueError for a model without
        QuantizedWeights, whose gradients would not be reduced.
        """
        assert self.lightning_module is not None
        if not is_quantized(self.lightning_module):
            raise ValueError(
                "no weight of the model is quantized: call zerocast.quantize_(model, recipe) in its __init__ or "
                "configure_model, or train with DDPStrategy"
            )
        check_device(self.lightning_module, self.root_device)

    def setup_optimizers(self, trainer: Any) -> None:
        """Set up optimizers like DDPStrategy. Raises TypeError for an optimizer that is not a
        ZeroAdamW, and RuntimeError, on several ranks, for a parameter that requires a gradient and
        that no optimizer has: its gradient would not be reduced.
        """
        super().setup_optimizers(trainer)
        others = [type(optimizer).__name__ for optimizer in self.optimizers if not isinstance(optimizer, ZeroOptimizer)]
        if others:
            raise TypeError(
                f"configure_optimizers returned {others[0]}: ZeroStrategy runs zerocast.ZeroAdamW or ZeroMuon"
            )
        if self.world_size > 1:
            assert self.lightning_module is not None
            check_owners(self._zero, [self.lightning_module])

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank while the context is open."""
        assert self.lightning_module is not None
        with without_reduction(self._zero, self.lightning_module):
            yield

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: masters are loaded into the optimizer, so it must exist before."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full FP32 masters on rank 0. Collective. Raises ValueError with several
        optimizers.
        """
        assert self.lightning_module is not None
        if not self._zero:
            return super().lightning_module_state_dict()
        if len(self._zero) > 1:
            raise ValueError("ZeroStrategy saves one ZeroAdamW: pass it all parameters, in groups")
        return full_state_dict(self.lightning_module, self._zero[0], dtype=torch.float32)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return an empty state: each rank saves its own part (`save_checkpoint`)."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save a folder with `lightning.ckpt` and `zerocast`, or a file of weights only.

        Raises ValueError for a file that is to replace such a folder.
        """
        if "optimizer_states" not in checkpoint:
            check_no_folder(self, filepath)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        assert self.lightning_module is not None
        path = as_location(self.broadcast(filepath))
        save_id = self.broadcast(secrets.token_hex(8))
        super().save_checkpoint({**checkpoint, SAVE_ID: save_id}, str(path / META), storage_options)
        zero_run.save(path / FOLDER, self._zero, [self.lightning_module], save_id)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint that `save_checkpoint` wrote, on any number of ranks.

        Raises the errors of `zerocast.optim.load`.
        """
        path = as_location(self.broadcast(checkpoint_path))
        self._masters_loaded = False
        if not path.is_dir():
            return super().load_checkpoint(str(path), weights_only)
        checkpoint: dict[str, Any] = super().load_checkpoint(str(path / META), weights_only)
        save_id = checkpoint.pop(SAVE_ID)
        if self._zero:
            assert self.lightning_module is not None
            zero_run.load(path / FOLDER, self._zero, [self.lightning_module], save_id)
            self._masters_loaded = True
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Cast the weights from the checkpoint's masters, unless `load_checkpoint` has loaded them
        into the module's optimizer already.

        The module's optimizer casts, or a temporary one for weights without an optimizer. Raises
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
        """Do nothing: `load_checkpoint` has loaded masters and moments. Raises ValueError for a
        checkpoint that has none.
        """
        if not self._masters_loaded:
            raise ValueError(
                f"no masters and moments were loaded, so a run does not resume from this checkpoint: {zero_run.NO_STATE}. To "
                "begin another run from its weights, call load_state_dict on the module before zerocast.quantize_"
            )

    def teardown(self) -> None:
        """Tear down like DDPStrategy, but leave model and optimizer on their device: quantized
        weights are views of the optimizer's buffers and cannot be moved separately.
        """
        module, optimizers = self._lightning_module, self.optimizers
        self._lightning_module = None
        self.optimizers = []
        try:
            super().teardown()
        finally:
            self._lightning_module = module
            self.optimizers = optimizers

    @property
    def _zero(self) -> list[ZeroOptimizer]:
        """The ZeroAdamWs of this module. The strategy may still have optimizers of an earlier
        module.
        """
        assert self.lightning_module is not None
        zero = [optimizer for optimizer in self.optimizers if isinstance(optimizer, ZeroOptimizer)]
        return optimizers_of_model(zero, self.lightning_module)


def check_no_folder(strategy: DDPStrategy | FabricDDPStrategy, path: Any) -> None:
    """Raise ValueError, on all ranks, if a file is to be saved at the path of a folder.

    Lightning would move the file into the folder, and a load would read the old folder.
    """
    if strategy.broadcast(as_location(path).is_dir()):
        raise ValueError(
            f"{path} is the folder of an earlier checkpoint with optimizer states, and this one is a file: delete the folder, or "
            "save to another path"
        )


def _made_for(owners: list[ZeroOptimizer], module: nn.Module, stack: contextlib.ExitStack) -> Iterator[ZeroOptimizer]:
    """Yield a temporary optimizer that casts the quantized weights which have none.

    ZeroAdamW takes trained parameters only, so frozen weights require a gradient until `stack` is
    closed.
    """
    owned = {key for owner in owners for key in names_in(owner)}
    without_owner = [
        (name, weight)
        for name, weight in module.named_parameters()
        if isinstance(weight, QuantizedWeight) and id(weight) not in owned and weight.numel()
    ]
    for _, weight in without_owner:
        stack.callback(weight.requires_grad_, weight.requires_grad)
        weight.requires_grad_()
    if without_owner:
        yield ZeroAdamW(without_owner)
