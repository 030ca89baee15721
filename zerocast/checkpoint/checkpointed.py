"""Checkpointed: what saves, loads and the records of runs ask of an optimizer."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zerocast.formats import FormatSpec
from zerocast.formats.shared_amax import SharedAmax

# The entries of moments in the metadata of a checkpoint: {parameter: {name of the moment: entry}}.
SavedMoments = Mapping[str, Mapping[str, TensorStorageMetadata]]


class Checkpointed(Protocol):
    """An object whose state a checkpoint holds: a ZeroAdamW or a `zerocast.fsdp2.TrainingState`."""

    @property
    def param_groups(self) -> Any:
        """The parameter groups. States of the same parameters belong to the same run."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that write and read together; None for one process."""

    @property
    def model(self) -> nn.Module | None:
        """The model that is trained, None if the object does not know it."""

    @property
    def frozen(self) -> Mapping[str, Tensor]:
        """The parameters that were given and are not trained, keyed by name; none if `model` is
        known.
        """

    @property
    def formats(self) -> Mapping[str, tuple[FormatSpec, torch.dtype]]:
        """Format and nominal dtype of each quantized weight keyed by name, for the manifest."""

    @property
    def shared_amaxes(self) -> Mapping[str, SharedAmax]:
        """The weights of each shared tensor amax, keyed by the name of each weight that shares it,
        for the manifest.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors keyed by name, under the keys of `zerocast.optim.state`."""

    def state_to_overwrite(self, kept: SavedMoments | None = None) -> dict[str, Any]:
        """Return the same tensors, to be overwritten in place by a reader. Moments that the
        optimizer has not made yet are made with the names and shapes of `kept`, the moments in the
        checkpoint.
        """

    def check_numbers(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError, on this rank only, for impossible step counts or hyperparameters."""

    def overwriting(self) -> AbstractContextManager[None]:
        """Mark the state as partly written while the body reads into it and calls
        `load_state_dict`.
        """

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Adopt a state whose tensors were loaded."""
