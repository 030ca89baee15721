"""StoredModel: the names and shapes under which transformers stores the parameters of a model.

They are read from a model of the same configuration on the meta device, and from the conversion
mapping by which `save_pretrained` and `from_pretrained` turn parameters into stored tensors and
back (experts, for example, are stored separately). Row numbers are sent through that mapping in
place of weights: the result shows which rows are stored under which name.
"""

import functools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from zerocast.checkpoint.sources import Entry, TensorSource, open_source
from zerocast.checkpoint.store import check_regular
from zerocast.distributed.agreement import first_of
from zerocast.formats.readers import HEAD
from zerocast.serve.stored_tensor import Piece, ranges, whole

WEIGHT = ".weight"


class StoredModel:
    """The parameters and buffers of a transformers model, and their stored pieces.

    Attributes:
        config: the model's PreTrainedConfig.
        shapes: the shapes of parameters, shared ones once, and persistent buffers, by name.
        buffers: the names of all buffers.
        pieces: the pieces that store each of them, by name.
        fused: names of parameters that the mapping stores together with others.
    """

    def __init__(self, config: Any, model_class: Any) -> None:
        self.config = deepcopy(config)
        self._skeleton: Any = on_meta(config, model_class)
        saved = self._skeleton.state_dict().keys()
        named = [*self._skeleton.named_parameters(), *self._skeleton.named_buffers()]
        self.shapes = {name: tuple(tensor.shape) for name, tensor in named if name in saved}
        self._dtypes = {name: parameter.dtype for name, parameter in self._skeleton.named_parameters()}
        self.buffers = {name for name, _ in self._skeleton.named_buffers()}
        self.pieces, self.fused = self._stored()

    @staticmethod
    def from_model(model: Any) -> "StoredModel":
        """Return the stored form of a model. Raises TypeError for anything but a model of
        transformers.
        """
        if not is_stored_by_transformers(model):
            raise TypeError(
                f"export_hf expects a model of transformers, got {type(model).__name__}: pass the config of the model that "
                "readers are to build, and names if yours are others"
            )
        # fully_shard gives the model a subclass of its class and of FSDPModule.
        model_class = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
        return StoredModel(model.config, model_class)

    @staticmethod
    def from_config(config: Any) -> "StoredModel":
        """Return the model that a PreTrainedConfig, a config.json or the folder of one describes.

        No code of the folder is run. Raises OSError or ValueError where there is none, or none that
        transformers knows.
        """
        if isinstance(config, (str, os.PathLike)):
            config = config_of(Path(config))
        return StoredModel(config, class_of(config))

    @property
    def architecture(self) -> str:
        """The name of the model's class."""
        return type(self._skeleton).__name__

    @functools.cached_property
    def stored(self) -> dict[str, tuple[str, Piece]]:
        """(parameter, piece) by stored name."""
        return {piece.name: (name, piece) for name, pieces in self.pieces.items() for piece in pieces}

    def is_matrix_product(self, stored: str) -> bool:
        """Return True for the weight of a Linear, `[out, in]`, and for one matrix of several."""
        name, piece = self.stored[stored]
        owner = self._skeleton.get_submodule(name.rpartition(".")[0])
        return stored.endswith(WEIGHT) and (isinstance(owner, nn.Linear) or piece.shape != self.shapes[name])

    def is_expert(self, stored: str) -> bool:
        """Return True for one matrix of a parameter that holds several, one for each expert."""
        return len(self.shapes[self.stored[stored][0]]) > 2

    def modules_of(self, stored: Iterable[str]) -> list[str]:
        """Return the names of the modules of these stored weights: those in the folder, by which
        engines call them, and those of the live modules, by which transformers does.
        """
        names = {name.removesuffix(WEIGHT) for name in stored}
        live = {self.stored[name][0].removesuffix(WEIGHT) for name in stored}
        return sorted(names | (live & self._linears))

    def modules_besides(self, quantized: set[str]) -> list[str]:
        """Return the names of the modules whose matrices are not quantized, as for `modules_of`.

        They include modules that are not stored because they share a weight, the name that engines
        give the head, and no embeddings.
        """
        modules = dict(self._skeleton.named_modules())
        embeddings = {name for name, module in modules.items() if isinstance(module, nn.Embedding)}
        matrices = {name.removesuffix(WEIGHT) for name, (_, piece) in self.stored.items() if len(piece.shape) > 1}
        besides = (matrices | self._linears) - embeddings - quantized
        head = self._skeleton.get_output_embeddings()
        is_plain = any(modules[name] is head for name in besides & modules.keys())
        return sorted(besides | ({HEAD} if is_plain else set()))

    @functools.cached_property
    def _linears(self) -> set[str]:
        return {name for name, module in self._skeleton.named_modules() if isinstance(module, nn.Linear)}

    def keeps_dtype(self, name: str) -> bool:
        """Return True for a buffer, and for a parameter that readers keep in FP32 for any dtype of
        the model.
        """
        if name in self.buffers or self._dtypes.get(name) is torch.float32:
            return True
        in_fp32 = getattr(self._skeleton, "_keep_in_fp32_modules_strict", None) or ()
        return any(f".{module}." in f".{name}." for module in in_fp32)

    def _stored(self) -> tuple[dict[str, list[Piece]], set[str]]:
        """Return the attributes `pieces` and `fused`."""
        known = {name: self._pieces(name, shape) for name, shape in self.shapes.items()}
        pieces = {name: [whole(name, self.shapes[name])] if parts is None else parts for name, parts in known.items()}
        # A mapping that joins parameters gives each of them, when only it is reverted, the name of
        # the joined tensor.
        parameters_of = Counter(piece.name for parts in pieces.values() for piece in parts)
        joined = {name for name, parts in pieces.items() if any(parameters_of[piece.name] > 1 for piece in parts)}
        return pieces, joined | {name for name, parts in known.items() if parts is None}

    def _pieces(self, name: str, shape: tuple[int, ...]) -> list[Piece] | None:
        """Return the pieces that store a parameter; None unless all rows of these are its own."""
        rows = shape[:-1] if len(shape) > 1 else shape
        numbers = torch.arange(torch.Size(rows).numel()).view((*rows, *([1] if len(shape) > 1 else [])))
        try:
            stored_numbers = dict(self._revert({name: numbers}))
            shapes = dict(self._revert({name: torch.empty(shape, device="meta")}))
        except (IndexError, KeyError, RuntimeError, TypeError, ValueError):
            # The mapping needs other parameters as well, and fails without them in its own ways.
            return None
        num_stored = sum(value.numel() for value in stored_numbers.values())
        if stored_numbers.keys() != shapes.keys() or num_stored != numbers.numel():
            return None
        # A mapping that transposes does not leave the last dimension, here of size 1, in its place.
        if len(shape) > 1 and any(
            tuple(stored_numbers[key].shape) != (*shapes[key].shape[:-1], 1) for key in stored_numbers
        ):
            return None
        return [
            Piece(key, ranges(value.reshape(-1)), tuple(shapes[key].shape)) for key, value in stored_numbers.items()
        ]

    def _revert(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415

        yield from revert_weight_conversion(self._skeleton, dict(tensors)).items()


def config_of(path: Path) -> Any:
    """Return the PreTrainedConfig of a config.json, or of the folder of one. No code of it is
    run.
    """
    import transformers  # noqa: PLC0415

    path = path / "config.json" if path.is_dir() else path
    check_regular(path)
    return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def class_of(config: Any) -> Any:
    """Return the class of the model of a PreTrainedConfig: the one it names, or the causal one of
    its kind. Raises ValueError if there is none.
    """
    import transformers  # noqa: PLC0415

    name = next(iter(config.architectures or ()), None)
    named = getattr(transformers, name, None) if name else None
    causal = transformers.AutoModelForCausalLM._model_mapping
    if named is None and type(config) not in causal:
        raise ValueError(
            f"transformers knows no causal model of {type(config).__name__}: name the class of the model in its architectures"
        )
    return causal[type(config)] if named is None else named


def on_meta(config: Any, model_class: Any) -> Any:
    """Build a model of transformers on the meta device."""
    with torch.device("meta"):
        # In bf16, since that shows which parameters are FP32 in any case.
        model = model_class._from_config(deepcopy(config), dtype=torch.bfloat16)
    model.tie_weights()
    return model


def is_stored_by_transformers(model: Any) -> bool:
    """Return True for a model of transformers, which has a config."""
    return hasattr(model, "config") and hasattr(type(model), "_from_config")


def check_stored(model: StoredModel, pieces: Mapping[str, Sequence[Piece]], is_whole: bool = True) -> None:
    """Raise ValueError unless these are the pieces that the model's reader expects.

    Without `is_whole` they may be some of them.
    """
    shapes = {piece.name: piece.shape for parts in pieces.values() for piece in parts}
    problems = [f"{name} is missing" for name in model.stored if is_whole and name not in shapes]
    for name, shape in shapes.items():
        if name not in model.stored:
            problems.append(f"{name} is in no place of the model (is its head tied in config.json and not here?)")
        elif shape != model.stored[name][1].shape:
            problems.append(f"{name} has shape {shape} and the model {model.stored[name][1].shape}")
    if problems:
        raise ValueError(f"these weights are not those of {model.architecture}: {first_of(problems, '; ')}")


def stored_weights(model: Any, source: str | os.PathLike[str] | Mapping[str, Any]) -> TensorSource:
    """Return the weights of a transformers `model` in a folder or file that `save_pretrained`
    wrote, for `zerocast.optim.load_masters` and `zerocast.fsdp2.load_masters`.

    Raises like them for a source that cannot be opened, TypeError for another model.
    """
    return StoredWeights(StoredModel.from_model(model), open_source(source))


class StoredWeights(TensorSource):
    """A TensorSource that joins stored pieces to parameters."""

    def __init__(self, model: StoredModel, source: TensorSource) -> None:
        self.location = source.location
        self._source = source
        # The pieces of each parameter that is not stored under its own name.
        self._pieces = {
            name: pieces
            for name, pieces in model.pieces.items()
            if [piece.name for piece in pieces] != [name] and all(piece.name in source.entries for piece in pieces)
        }
        piece_names = {piece.name for pieces in self._pieces.values() for piece in pieces}
        self.entries = {name: entry for name, entry in source.entries.items() if name not in piece_names}
        for name, pieces in self._pieces.items():
            self.entries[name] = Entry(model.shapes[name], source.entries[pieces[0].name].dtype)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of a tensor, on the CPU, in its stored dtype."""
        if name not in self._pieces:
            return self._source.read(name, offsets, sizes)
        shape = self.entries[name].shape
        first_column = offsets[-1]
        columns = sizes[-1]
        parts = []
        for rows in _rows(shape[:-1], offsets[:-1], sizes[:-1]):
            for piece, first_row, count in _stored_rows(self._pieces[name], rows):
                parts.append(self._source.read(piece, (first_row, first_column), (count, columns)))
        return torch.cat([torch.empty(0, columns, dtype=parts[0].dtype), *parts]).view(*sizes)


def _rows(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[range]:
    """Yield the rows of a box, as ranges of the rows of a matrix `[prod(shape), last]`."""
    if len(shape) == 1:
        yield range(offsets[0], offsets[0] + sizes[0])
        return
    below = torch.Size(shape[1:]).numel()
    for index in range(offsets[0], offsets[0] + sizes[0]):
        for inner in _rows(shape[1:], offsets[1:], sizes[1:]):
            yield range(index * below + inner.start, index * below + inner.stop)


def _stored_rows(pieces: Sequence[Piece], wanted: range) -> Iterator[tuple[str, int, int]]:
    """Yield (stored name, first row in it, number of rows) of the wanted rows, in their order."""
    overlaps = []
    for piece in pieces:
        before = 0
        for rows in piece.rows:
            first, last = max(rows.start, wanted.start), min(rows.stop, wanted.stop)
            if first < last:
                overlaps.append((first, piece.name, before + first - rows.start, last - first))
            before += len(rows)
    yield from ((name, row, count) for _, name, row, count in sorted(overlaps))
