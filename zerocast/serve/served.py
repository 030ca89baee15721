"""Before training: whether an engine will read an export of the model.

A checkpoint has one naming. So the formats of a model need one that the engine reads and that has
all of them.
"""

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from zerocast.formats import FormatSpec
from zerocast.formats.readers import reader_called
from zerocast.serve.export_files import planned_units
from zerocast.serve.hugging_face import described_modules, pieces_of, quantized_pieces
from zerocast.serve.stored_model import StoredModel, is_stored_by_transformers
from zerocast.serve.weight_source import LazyTensors
from zerocast.serve.write import check_pieces


def check_served(model: nn.Module, formats: Mapping[str, FormatSpec], reader: str) -> None:
    """Raise ValueError if the engine reads no export of a model of transformers. Of other models
    it is not known how they will be stored.

    Args:
        model: the model, of any size and on any device.
        formats: the formats of the weights that are to be quantized, by name.
        reader: the name of the engine.
    """
    if not formats or not is_stored_by_transformers(model):
        return
    stored, facts = StoredModel.from_model(model), reader_called(reader)
    # Parameters that transformers does not know are stored under names that the export is told.
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if name in stored.pieces}
    known = {name: fmt for name, fmt in formats.items() if name in shapes}
    source = LazyTensors({name: tuple(shapes[name]) for name in known}, known, _unread, torch.bfloat16)
    pieces = {name: pieces_of(stored, name, shape, {}) for name, shape in shapes.items()}
    refusals = []
    for naming, readable in facts.namings.items():
        unread = sorted({fmt.name for fmt in known.values()} - readable)
        if unread:
            refusals.append(f"{naming}: {reader} does not read {' and '.join(unread)} in it")
            continue
        try:
            check_pieces(source, naming, pieces)
            described_modules(stored, quantized_pieces(stored, source, pieces, naming), naming)
            deque(planned_units(source, naming, pieces, lambda _, own: own), maxlen=0)
        except ValueError as error:
            refusals.append(f"{naming}: {error}")
        else:
            return
    raise ValueError(f"no export of these weights could be read by {reader} {facts.version}. {'; '.join(refusals)}")


def _unread(name: str) -> Tensor:
    raise AssertionError(f"{name} was read where its layout alone is looked at")
