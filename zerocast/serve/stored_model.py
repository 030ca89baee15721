"""StoredModel: how transformers stores a model: names, shapes, experts one by one.

It is read off a model of the same configuration without memory, and off the model's own conversion
mapping, by which `save_pretrained` and `from_pretrained` turn parameters into stored tensors and
back. Row numbers go through that mapping in place of weights: what comes out says which rows have
which name.
"""

import functools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from zerocast.checkpoint.regular_file import check_regular
from zerocast.serve.piece import Piece, ranges, whole

WEIGHT = ".weight"


class StoredModel:
    """The parameters and buffers of a transformers model, and where they are stored.

    Attributes:
        config: its PreTrainedConfig.
        shapes: of parameters, shared ones once, and persistent buffers, by name.
        pieces: what is stored of each of them.
        fused: names of parameters that the mapping stores together with others.
    """

    def __init__(self, config: Any, model_class: Any) -> None:
        self.config = deepcopy(config)
        with torch.device("meta"):
            self._skeleton: Any = model_class._from_config(self.config)
        self._skeleton.tie_weights()
        saved = self._skeleton.state_dict().keys()
        named = [*self._skeleton.named_parameters(), *self._skeleton.named_buffers()]
        self.shapes = {name: tuple(tensor.shape) for name, tensor in named if name in saved}
        self.buffers = {name for name, _ in self._skeleton.named_buffers()}
        self.pieces, self.fused = self._stored()

    @staticmethod
    def of(model: Any) -> "StoredModel":
        """The model's own; TypeError for what is no transformers model."""
        if not is_stored_by_transformers(model):
            raise TypeError(
                f"export_hf takes a model of transformers, got {type(model).__name__}: give the config of the model that "
                "readers are to build, and names if yours are others"
            )
        # fully_shard makes a class of its own
        own = next(one for one in type(model).__mro__ if not issubclass(one, FSDPModule))
        return StoredModel(model.config, own)

    @staticmethod
    def of_config(config: Any) -> "StoredModel":
        """The model that a PreTrainedConfig, a config.json or the folder of one describes.

        No code of the folder is run. OSError or ValueError where there is none, or none that
        transformers knows.
        """
        import transformers  # noqa: PLC0415

        if isinstance(config, (str, os.PathLike)):
            path = Path(config)
            path = path / "config.json" if path.is_dir() else path
            check_regular(path)
            config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        name = next(iter(config.architectures or ()), None)
        found = getattr(transformers, name, None) if name else None
        if found is None:
            found = transformers.AutoModelForCausalLM._model_mapping[type(config)]
        return StoredModel(config, found)

    @property
    def architecture(self) -> str:
        """The name of the model's class."""
        return type(self._skeleton).__name__

    @functools.cached_property
    def stored(self) -> dict[str, tuple[str, Piece]]:
        """(parameter, piece) by the name of what is stored."""
        return {piece.name: (name, piece) for name, pieces in self.pieces.items() for piece in pieces}

    def is_matrix_product(self, stored: str) -> bool:
        """True for the weight of a Linear, `[out, in]`, and for one matrix of several."""
        name, piece = self.stored[stored]
        owner = self._skeleton.get_submodule(name.rpartition(".")[0])
        return stored.endswith(WEIGHT) and (isinstance(owner, nn.Linear) or piece.shape != self.shapes[name])

    def is_expert(self, stored: str) -> bool:
        """True for one matrix of a parameter that holds several, one for each expert."""
        return len(self.shapes[self.stored[stored][0]]) > 2

    def modules_besides(self, quantized: set[str]) -> list[str]:
        """Names of the modules whose matrices are not quantized, as readers find them: what is
        stored, and what only shares a weight. Embeddings are not among them.
        """
        embeddings = {name for name, module in self._skeleton.named_modules() if isinstance(module, nn.Embedding)}
        matrices = {name.removesuffix(WEIGHT) for name, (_, piece) in self.stored.items() if len(piece.shape) > 1}
        linears = {name for name, module in self._skeleton.named_modules() if isinstance(module, nn.Linear)}
        renamed = {name for name, pieces in self.pieces.items() if [piece.name for piece in pieces] != [name]}
        linears -= {name.removesuffix(WEIGHT) for name in renamed}
        return sorted((matrices | linears) - embeddings - quantized)

    def keeps_float32(self, name: str) -> bool:
        """True for a parameter that readers hold in FP32 whatever the dtype of the model."""
        kept = getattr(self._skeleton, "_keep_in_fp32_modules_strict", None) or ()
        return any(f".{part}." in f".{name}." for part in kept)

    def _stored(self) -> tuple[dict[str, list[Piece]], set[str]]:
        found = {name: self._pieces(name, shape) for name, shape in self.shapes.items()}
        pieces = {name: [whole(name, self.shapes[name])] if parts is None else parts for name, parts in found.items()}
        # A mapping that joins parameters gives each of them, reverted alone, the name of the whole.
        parameters_of = Counter(piece.name for parts in pieces.values() for piece in parts)
        joined = {name for name, parts in pieces.items() if any(parameters_of[piece.name] > 1 for piece in parts)}
        return pieces, joined | {name for name, parts in found.items() if parts is None}

    def _pieces(self, name: str, shape: tuple[int, ...]) -> list[Piece] | None:
        """The pieces that store a parameter; None unless these are rows of it alone."""
        rows = shape[:-1] if len(shape) > 1 else shape
        numbers = torch.arange(torch.Size(rows).numel()).view(*rows, *([1] if len(shape) > 1 else []))
        try:
            found = dict(self._revert({name: numbers}))
            shapes = dict(self._revert({name: torch.empty(shape, device="meta")}))
        except (IndexError, KeyError, RuntimeError, TypeError, ValueError):  # it takes others as well
            return None
        if found.keys() != shapes.keys() or sum(value.numel() for value in found.values()) != numbers.numel():
            return None
        if len(shape) > 1 and any(tuple(found[key].shape) != (*shapes[key].shape[:-1], 1) for key in found):
            return None
        return [Piece(key, ranges(value.reshape(-1)), tuple(shapes[key].shape)) for key, value in found.items()]

    def _revert(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415

        yield from revert_weight_conversion(self._skeleton, dict(tensors)).items()


def is_stored_by_transformers(model: Any) -> bool:
    """True for a model of transformers, which has a config."""
    return hasattr(model, "config") and hasattr(type(model), "_from_config")


def check_stored(model: StoredModel, pieces: Mapping[str, Sequence[Piece]], is_whole: bool = True) -> None:
    """ValueError unless these pieces are what the model's reader looks for, or some of it."""
    found = {piece.name: piece.shape for parts in pieces.values() for piece in parts}
    problems = [f"{name} is missing" for name in model.stored if is_whole and name not in found]
    for name, shape in found.items():
        if name not in model.stored:
            problems.append(f"{name} is in no place of the model (is its head tied in config.json and not here?)")
        elif shape != model.stored[name][1].shape:
            problems.append(f"{name} has shape {shape} and the model {model.stored[name][1].shape}")
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(f"these weights are not those of {model.architecture}: {'; '.join(problems[:4])}{more}")
