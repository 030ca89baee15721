"""Job: something to time, ready to run again and again; Place: where and from what seed it is made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Job:
    """`run` does the work once; `written` gives the tensors that it writes, for comparison with another backend's."""

    run: Callable[[], object]
    written: Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Place:
    """A device, the backend that works there, and the seed of all inputs."""

    device: torch.device
    backend: str
    seed: int

    def generator(self) -> torch.Generator:
        """Inputs are drawn on the device: equal seeds give equal inputs there, whatever the backend."""
        return torch.Generator(self.device).manual_seed(self.seed)

    def with_backend(self, backend: str) -> "Place":
        """The same inputs for another backend."""
        return replace(self, backend=backend)
