"""Live weights: the weights of a running training in the layout of a checkpoint, bucket by bucket.

`named_tensors` yields the names and tensors that `export_hf` would write, for an engine's own
loader or for a `Receiver`. Codes are views of the weights. Other tensors are copies, made when
their bucket is filled. A bucket becomes invalid when the next one is asked for, so that the copies
of one bucket at most take memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from zerocast.distributed.agreement import first_of
from zerocast.serve.hugging_face import pieces_of, quantized_pieces
from zerocast.serve.namings import check_naming
from zerocast.serve.stored_model import StoredModel, check_stored, is_stored_by_transformers
from zerocast.serve.stored_tensor import Names, Piece, StoredTensor, of_plain, of_weight
from zerocast.serve.weight_source import live_source_of
from zerocast.serve.write import check_pieces, check_shared_amaxes
from zerocast.weight import QuantizedWeight

BUCKET_BYTES = 2**28


class Bucket(Sequence[tuple[str, Tensor]]):
    """(name, tensor) pairs that are valid until the next bucket is asked for; then reading them
    raises RuntimeError.
    """

    def __init__(self, pairs: Sequence[tuple[str, Tensor]]) -> None:
        self._pairs: tuple[tuple[str, Tensor], ...] | None = tuple(pairs)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, views and copies."""
        return sum(tensor.nbytes for _, tensor in self)

    @overload
    def __getitem__(self, index: int) -> tuple[str, Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[str, Tensor]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._valid_pairs[index]

    def __len__(self) -> int:
        return len(self._valid_pairs)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._valid_pairs)

    def give_up(self) -> None:
        """Drop the tensors. Reading the bucket raises afterwards."""
        self._pairs = None

    @property
    def _valid_pairs(self) -> tuple[tuple[str, Tensor], ...]:
        if self._pairs is None:
            raise RuntimeError(
                "this bucket was given up when the next one was asked for: use or copy its tensors before, and do not collect "
                "buckets in a list"
            )
        return self._pairs


def named_tensors(
    model_or_optimizer: Any,
    naming: str,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    config: Any = None,
    names: Names | None = None,
    dtype: torch.dtype | None = None,
    allow_unequal_scales: bool = False,
) -> Iterator[Bucket]:
    """Return the live weights as (name, tensor) pairs in checkpoint layout, in buckets.

    Args:
        model_or_optimizer: a model; or a ZeroAdamW, a CastPlan with names or an attachment to
            Megatron-Core or Apex, which give the parameters that they have masters of. Under FSDP2
            the model, which is gathered one group at a time.
        naming: `compressed-tensors`, `modelopt`, `deepseek` or `bf16`, as for `export_hf`.
        bucket_bytes: the largest size of a bucket, unless a single tensor is larger. Under FSDP2 a
            bucket also ends with a gathered group.
        config: the PreTrainedConfig, config.json or folder of one that describes the reading model;
            by default a transformers model's own. Names and shapes are then compared with it, and
            experts are separate tensors.
        names: for parameters with different names, such as Megatron's: a dict from a parameter to
            its stored name, or to stored names with the ranges of rows that each of them has.
            Others keep their names.
        dtype: the dtype of tensors that are not quantized; by default the dtype that they compute
            in, which is their own, or that of FSDP2's mixed precision.
        allow_unequal_scales: do not raise for weights that engines fuse and that have different
            tensor amaxes.

    Tensors are contiguous and on the device of the weights; writing to one may write the weight.
    Under FSDP2 and in hosts with gathers to come all ranks call this and read to the end together;
    under ZeroAdamW any single rank may. Gathers in flight are waited for.

    Raises, before the first bucket: ValueError for an unknown naming, for weights that it cannot
    express or that no reader finds, for names that are used twice, and for fused weights with
    different tensor amaxes; TypeError for anything but the above. While it is read: RuntimeError
    for weights that were never cast, are partial or older than their masters as far as that is
    known, and for a cast, or a write to a plain parameter, between two buckets, which would mix the
    weights of two steps.
    """
    live = LiveWeights(model_or_optimizer, naming, bucket_bytes, config, names, dtype, allow_unequal_scales)
    return live.buckets()


class LiveWeights:
    """The live weights of a run as stored tensors. The arguments are those of `named_tensors`.

    Attributes:
        naming: the naming of the stored tensors.
        source: yields the live weights.
    """

    def __init__(
        self,
        what: Any,
        naming: str,
        bucket_bytes: int = BUCKET_BYTES,
        config: Any = None,
        names: Names | None = None,
        dtype: torch.dtype | None = None,
        allow_unequal_scales: bool = False,
    ) -> None:
        check_naming(naming)
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        self._bucket_bytes = bucket_bytes
        self.naming = naming
        self.source = live_source_of(what)
        self._dtype = dtype
        # How transformers stores the model; None if nothing describes it.
        self._stored: StoredModel | None = None
        if config is not None:
            self._stored = StoredModel.from_config(config)
        elif is_stored_by_transformers(what):
            self._stored = StoredModel.from_model(what)
        self._pieces = self._named_pieces(names or {})
        # A model has all weights that a reader expects. An optimizer has those that it trains.
        self._is_whole = isinstance(what, torch.nn.Module)
        self._allow_unequal_scales = allow_unequal_scales
        self._check()

    @property
    def stored_names(self) -> list[str]:
        """The names by which readers know the weights."""
        return [piece.name for pieces in self._pieces.values() for piece in pieces]

    def buckets(self) -> Iterator[Bucket]:
        """Yield the tensors in buckets, each valid until the next one is asked for."""
        # Again, since formats may have changed since the constructor.
        self._check()
        check_unchanged: Callable[[], None] | None = None
        # Another one for each bucket, since masters change only while a bucket is read.
        moment = object()
        pairs: list[tuple[str, Tensor]] = []
        nbytes = 0
        for batch in self.source.batches():
            # Weights change only while a bucket is read or groups are gathered.
            if check_unchanged is None:
                check_unchanged = self.source.watch()
            elif self.source.is_transient:
                check_unchanged()
                moment = object()
            for name, tensor in batch:
                for stored in self._stored_tensors(name, tensor, moment):
                    if pairs and nbytes + stored.nbytes > self._bucket_bytes:
                        yield from _lent(pairs)
                        nbytes = 0
                        check_unchanged()
                        moment = object()
                    pairs.append((stored.name, stored.make()))
                    nbytes += stored.nbytes
            if pairs and self.source.is_transient:
                yield from _lent(pairs)
                nbytes = 0
        if pairs:
            yield from _lent(pairs)
        if check_unchanged is not None:
            check_unchanged()

    def _stored_tensors(self, name: str, tensor: Tensor, moment: object) -> Iterator[StoredTensor]:
        if isinstance(tensor, QuantizedWeight):
            return of_weight(tensor, self.naming, name, self._pieces[name], moment)
        if type(tensor.detach()) is not Tensor:
            raise TypeError(
                f"{name} is a {type(tensor).__name__}, whose bytes only its owner knows: pass the attachment or the "
                "optimizer in place of the model"
            )
        return of_plain(tensor, self._pieces[name], self._plain_dtype(name, tensor))

    def _plain_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        keeps_own = self._stored is not None and self._stored.keeps_dtype(name)
        if keeps_own or not tensor.is_floating_point():
            return tensor.dtype
        return self._dtype or self.source.dtype_of(name, tensor)

    def _named_pieces(self, names: Names) -> Mapping[str, Sequence[Piece]]:
        shapes = self.source.shapes
        unknown = sorted(set(names) - set(shapes))
        if unknown:
            raise ValueError(f"names has {first_of(unknown)}, and the parameters are {first_of(list(shapes))}")
        return {name: pieces_of(self._stored, name, shape, names) for name, shape in shapes.items()}

    def _check(self) -> None:
        if added := self.source.shapes.keys() - self._pieces.keys():
            raise ValueError(
                f"the model has got {first_of(sorted(added))} since its weights were named: make another Sender, or call "
                "named_tensors again"
            )
        # The parameter of each stored name.
        parameter_of: dict[str, str] = {}
        for name, pieces in self._pieces.items():
            for piece in pieces:
                if piece.name in parameter_of:
                    raise ValueError(f"{parameter_of[piece.name]} and {name} are both called {piece.name}")
                parameter_of[piece.name] = name
        check_pieces(self.source, self.naming, self._pieces)
        if self._stored is not None:
            check_stored(self._stored, self._pieces, self._is_whole)
            if self.naming != "bf16":
                quantized_pieces(self._stored, self.source, self._pieces, self.naming)
        if self.naming != "bf16" and not self._allow_unequal_scales:
            check_shared_amaxes(self.naming, self._pieces, self.source.formats, self.source.shared_amaxes)


def _lent(pairs: list[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """Take the pairs out of the list, and yield them as a bucket that is valid until the next one
    is asked for.
    """
    bucket = Bucket(pairs)
    pairs.clear()
    yield bucket
    bucket.give_up()
