"""accelerate and Lightning Fabric under the matrix: a ZeroAdamW that each of them has wrapped, with their own backward pass,
step and checkpoints.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from tests.hosts.under_test import Calls
from tests.hosts.zero_adamw import Zero
from tests.trainers.host_on_cpu import WHY_NOT, host_on_cpu


@contextlib.contextmanager
def started() -> Iterator[None]:
    """Tell trainers by the environment that their processes exist and have joined, as `torchrun` does."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with host_on_cpu(), mock.patch.dict(os.environ, told):
        yield


class Wrapped(Zero):
    """A ZeroAdamW inside of what a trainer makes of it."""

    VARIANTS = ()
    why_not = WHY_NOT
    stepper: Any  # the trainer's optimizer

    @classmethod
    def inside(cls, variant: str) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a started process."""
        return started()

    def phases(self, number: int) -> Calls:
        """Return the phases, by the trainer's calls."""
        gradients = {spec.name: spec.gradient(number, dist.get_rank()) for spec in self._probe.specs}
        return {
            "backward": lambda: self.backward(self._probe.loss(gradients)),
            "step": self.stepper.step,
            "zero_grad": self.forget,
        }

    def forget(self) -> None:
        self.stepper.zero_grad()


class Accelerated(Wrapped):
    """A model and a ZeroAdamW that an Accelerator has prepared."""

    def __init__(self, folder: str, variant: str) -> None:
        from zerocast.integrations.huggingface import Accelerator

        super().__init__(folder, variant)
        self._accelerator = Accelerator(cpu=True)
        self._prepared, self.stepper = self._accelerator.prepare(self._probe, self._optimizer)

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def save(self, number: int) -> None:
        self._accelerator.save_state(str(self.folder / str(number)))

    def load(self) -> int:
        number = max(int(path.name) for path in self.folder.iterdir())
        self._accelerator.load_state(str(self.folder / str(number)))
        return number

    def saved(self) -> dict[str, Tensor]:
        """Return the masters, which rank 0 has whole."""
        return self._accelerator.get_state_dict(self._prepared)  # type: ignore[no-any-return]


class OfFabric(Wrapped):
    """A model and a ZeroAdamW that Fabric has set up."""

    def __init__(self, folder: str, variant: str) -> None:
        import lightning

        from zerocast.integrations.lightning import FabricZeroStrategy

        super().__init__(folder, variant)
        self._fabric = lightning.Fabric(accelerator="cpu", strategy=FabricZeroStrategy(), devices=dist.get_world_size())
        self._fabric.launch()
        module, self.stepper = self._fabric.setup(self._probe, self._optimizer)
        self._state = {"model": module, "optimizer": self.stepper}

    def backward(self, loss: Tensor) -> None:
        self._fabric.backward(loss)

    def save(self, number: int) -> None:
        self._fabric.save(str(self.folder / str(number)), self._state)

    def load(self) -> int:
        number = max(int(path.name) for path in self.folder.iterdir())
        self._fabric.load(str(self.folder / str(number)), self._state)
        return number
