"""FabricZeroStrategy: run a quantized model with ZeroAdamW under Lightning Fabric."""

import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn

from zerocast.checkpoint.store import as_location
from zerocast.integrations import overrides, zero_run
from zerocast.integrations.zero_run import check_device, check_owners, check_together, is_quantized, without_reduction
from zerocast.optim.zero_optimizer import ZeroOptimizer

from .trainer import FOLDER, META, SAVE_ID, check_no_folder


@overrides()
class FabricZeroStrategy(DDPStrategy):
    """`Fabric(strategy=FabricZeroStrategy())`: `setup(model, optimizer)` of a quantized model and
    its ZeroAdamW.

    Processes are started and joined as by DDPStrategy, whose arguments it takes; a quantized model
    stays as it is, since ZeroAdamW averages gradients and gathers weights. `clip_gradients` and
    `no_backward_sync` are Fabric's. `save` writes a folder: `lightning.ckpt` with all state that is
    neither a quantized model nor a ZeroAdamW, and `zerocast` with each rank's part of masters and
    moments, which any number of ranks loads. Paths may be URLs that fsspec opens.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The ZeroAdamWs and the quantized models that were set up.
        self._zero: list[ZeroOptimizer] = []
        self._quantized: list[nn.Module] = []
        # True if `check_owners` has passed since the last model or optimizer was set up.
        self._owners_checked = False
        self._backward_sync_control = _BackwardSyncControl(self._zero)

    def setup_module(self, module: nn.Module) -> Any:
        """Leave a quantized module unwrapped, and set up others like DDPStrategy.

        Raises RuntimeError if a quantized module is on a different device than this process trains
        on.
        """
        if not is_quantized(module):
            return super().setup_module(module)
        check_device(module, self.root_device)
        self._quantized.append(module)
        self._owners_checked = False
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Set an optimizer up like DDPStrategy. Each rank then saves and loads its part of a
        ZeroAdamW.
        """
        self._owners_checked = False
        if isinstance(optimizer, ZeroOptimizer):
            self._zero.append(optimizer)
        return super().setup_optimizer(optimizer)

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass like DDPStrategy.

        Raises RuntimeError, on several ranks, for a parameter of a quantized model that requires a
        gradient and that no ZeroAdamW has that was set up: its gradient would not be reduced.
        """
        if self.world_size > 1 and not self._owners_checked:
            check_owners(self._zero, self._quantized)
            self._owners_checked = True
        super().backward(tensor, module, *args, **kwargs)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save a folder with `lightning.ckpt` and `zerocast`, or a file if nothing in `state` is a
        quantized model or a ZeroAdamW.

        Raises ValueError for a quantized model without its ZeroAdamW in `state`, which has the
        masters, and for a file that is to replace such a folder.
        """
        models, optimizers, rest = _parts(state)
        if not models and not optimizers:
            check_no_folder(self, path)
            super().save_checkpoint(path, state, storage_options, filter)
            return
        location = as_location(self.broadcast(path))
        save_id = self.broadcast(secrets.token_hex(8))
        super().save_checkpoint(str(location / META), {**rest, SAVE_ID: save_id}, storage_options, filter)
        zero_run.save(location / FOLDER, optimizers, models, save_id)

    def load_checkpoint(
        self, path: Any, state: Any | None = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint that `save_checkpoint` wrote, on any number of ranks.

        Raises the errors of `zerocast.optim.load`.
        """
        location = as_location(self.broadcast(path))
        if not isinstance(state, dict) or not location.is_dir():
            return super().load_checkpoint(str(location), state, strict, weights_only)
        models, optimizers, rest = _parts(state)
        meta = str(location / META)
        save_id = self.checkpoint_io.load_checkpoint(meta, weights_only=weights_only)[SAVE_ID]
        zero_run.load(location / FOLDER, optimizers, models, save_id)
        remaining: dict[str, Any] = super().load_checkpoint(meta, rest, strict, weights_only)
        del remaining[SAVE_ID]
        state.update(rest)
        return remaining


class _BackwardSyncControl:
    def __init__(self, optimizers: list[ZeroOptimizer]) -> None:
        self._optimizers = optimizers

    @contextlib.contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        with without_reduction(self._optimizers if enabled else [], module):
            yield


def _parts(state: dict[str, Any]) -> tuple[list[nn.Module], list[ZeroOptimizer], dict[str, Any]]:
    """Split a state into its quantized models, its ZeroAdamWs and the rest."""
    models = [value for value in state.values() if isinstance(value, nn.Module) and is_quantized(value)]
    optimizers = [value for value in state.values() if isinstance(value, ZeroOptimizer)]
    check_together(optimizers, models)
    ours = {id(value) for value in [*models, *optimizers]}
    return models, optimizers, {key: value for key, value in state.items() if id(value) not in ours}
