"""Sources of masters: safetensors, plain state dicts and torch.distributed.checkpoint folders.
`read_masters` fills masters from any of them, sharded or not.
"""

import fnmatch
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from zerocast.checkpoint.manifest import check_files
from zerocast.checkpoint.sources.dcp import DcpSource
from zerocast.checkpoint.sources.safetensors_files import SafetensorsSource, is_safetensors
from zerocast.checkpoint.sources.source import HIGH_PRECISION, Entry, StateDictSource, TensorSource
from zerocast.checkpoint.store import AnyPath, StorePath, as_location
from zerocast.checkpoint.torch_checkpoint import load_masters
from zerocast.distributed.agreement import first_of, validate_across_ranks
from zerocast.distributed.group import Group

__all__ = ["HIGH_PRECISION", "AnySource", "Entry", "TensorSource", "open_source", "read_masters"]

AnySource = AnyPath | Mapping[str, Any] | TensorSource
# Prefixes that all names in a source may have.
PREFIXES = ("", "model.", "module.", "state_dict.")
# Prefixes in zerocast's own checkpoints of entries that are not masters.
BESIDE_MASTERS = ("optim.", "zerocast.", "extra.")


def open_source(source: AnySource) -> TensorSource:
    """Open the tensors at a path, or of a mapping from names to tensors. A source that is open
    already is returned.

    A path is a safetensors file, an index or a folder of them; a folder of
    torch.distributed.checkpoint; or a file of torch.save. A URL must be a checkpoint. Raises
    FileNotFoundError if the path does not exist, ValueError for a damaged file,
    pickle.UnpicklingError for metadata that would run code.
    """
    if isinstance(source, Mapping):
        return StateDictSource(source)
    if not isinstance(source, (str, os.PathLike, StorePath)):
        return source
    path = as_location(source)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if isinstance(path, StorePath) or (path / ".metadata").is_file():
        return DcpSource(path)
    if is_safetensors(path):
        return SafetensorsSource(path)
    if path.is_dir():
        # The path may be the folder of a run, with checkpoints one or two levels below.
        metadata_files = [*path.glob("*/.metadata"), *path.glob("*/*/.metadata")]
        inside = sorted(str(file.parent.relative_to(path)) for file in metadata_files)
        offer = f"; it holds checkpoints, of which {inside[-1]} is the last: {', '.join(inside[-8:])}" if inside else ""
        raise ValueError(
            f"{path} holds neither safetensors files nor a checkpoint of torch.distributed.checkpoint{offer}"
        )
    return StateDictSource.of_file(path)


def read_masters(
    masters: Mapping[str, Tensor], source: AnySource, ignore: Sequence[str], group: Group, begin: Callable[[], object]
) -> None:
    """Fill the FP32 tensors `masters`, keyed by name, in place; each rank reads the elements it
    owns.

    bf16 and fp16 are widened exactly. All names in the source may begin with "model.", "module." or
    "state_dict.". Tensors that match a glob of `ignore` are skipped. `begin` is called just before
    masters are written.

    Raises on every rank, with nothing changed: ValueError for a tensor that is missing on either
    side, or has a different shape or a dtype that FP32 cannot hold, and for files that differ from
    their manifest; FileNotFoundError if the source does not exist (RuntimeError with several
    ranks). Raises RuntimeError for damage that is detected only while reading; masters are then
    partly overwritten.
    """
    if isinstance(source, (str, os.PathLike, StorePath)):
        check_files(as_location(source), group)
    opened = None
    prefix = ""
    problem: Exception | None = None
    try:
        opened = open_source(source)
        names = [name for name in opened.entries if not any(fnmatch.fnmatchcase(name, glob) for glob in ignore)]
        prefix = max(PREFIXES, key=lambda candidate: sum(candidate + name in opened.entries for name in masters))
        problems = _problems(masters, opened, prefix, names)
        if problems:
            problem = ValueError(f"{opened.location} does not fit the masters: {first_of(problems, '; ')}")
    except (ImportError, OSError, ValueError, pickle.UnpicklingError) as error:
        if group.size == 1:
            raise
        problem = error
    validate_across_ranks(group, [prefix], problem)
    assert opened is not None
    begin()
    state = {prefix + name: tensor for name, tensor in masters.items()}
    load_masters(state, opened.reader(), group, opened.location)


def _problems(masters: Mapping[str, Tensor], source: TensorSource, prefix: str, names: Sequence[str]) -> list[str]:
    """Return the reasons why the tensors `names` of a source cannot be read into the masters."""
    problems = []
    for name, tensor in masters.items():
        entry = source.entries.get(prefix + name)
        shape = tuple(tensor.shape)
        if entry is None:
            problems.append(f"{prefix}{name} of shape {shape} is missing in the source")
        elif entry.shape != shape:
            problems.append(f"{prefix}{name} has shape {entry.shape} in the source, expected {shape}")
        elif entry.dtype not in HIGH_PRECISION:
            problems.append(
                f"{prefix}{name} is {entry.dtype} in the source, expected one of {', '.join(HIGH_PRECISION)}"
            )
    unknown = [name for name in names if not name.startswith(prefix) or name.removeprefix(prefix) not in masters]
    if prefix == "model.":
        # The source may be a checkpoint of zerocast, which has optimizer states and more.
        unknown = [name for name in unknown if not name.startswith(BESIDE_MASTERS)]
    return problems + [
        f"{name} is in the source, but not a master (pass it in `ignore` to skip it)" for name in unknown
    ]
