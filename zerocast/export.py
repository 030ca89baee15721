"""Export: the weights of a model as safetensors, in the names and layouts of inference engines.

`export_hf` writes a folder that engines load without a conversion, `export_safetensors` only the
weights. `zerocast.serve.namings` describes the tensors of each naming.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerocast.checkpoint.store import Location
from zerocast.distributed.group import GroupLike
from zerocast.serve.hugging_face import write_hf
from zerocast.serve.stored_tensor import Rows
from zerocast.serve.weight_source import source_of
from zerocast.serve.write import SHARD_BYTES, write_safetensors

__all__ = ["export_hf", "export_safetensors"]


def export_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    naming: str = "bf16",
    shard_bytes: int = SHARD_BYTES,
    *,
    group: GroupLike = None,
) -> list[Location]:
    """Write the parameters and persistent buffers of `model` into `folder`, which is new or empty.

    Each rank that calls this writes its own files, tensor by tensor, and rank 0 the index. Beyond
    the model a rank needs memory for one tensor, under FSDP2 for one group that is gathered.

    Args:
        model: unsharded, as under ZeroAdamW, or sharded by FSDP2 and tensor parallelism.
        folder: new or empty; or the URL of such a one that fsspec opens, to which each file goes
            immediately, from memory. Ranks on several machines write into one folder that all of
            them see. It appears complete.
        naming: `compressed-tensors`, `modelopt`, `deepseek` or `bf16`.
        shard_bytes: the largest size of a file, unless a single tensor is larger.
        group: the ranks that call this together, a ProcessGroup or a mesh of one dimension. By
            default all ranks for a sharded model, and this process only for an unsharded one.

    Returns the paths, the index last. Raises ValueError, with nothing written, for an unknown
    naming, a weight whose format or shape the naming cannot express and a folder that is not empty;
    and, with no folder left, for a tensor whose values differ between ranks. An error on one rank
    is raised on all of them, and leaves no folder.
    """
    return write_safetensors(source_of(model, group), folder, naming, shard_bytes)


def export_hf(
    model: nn.Module,
    folder: str | os.PathLike[str],
    naming: str,
    *,
    config: Any = None,
    names: Mapping[str, str | Mapping[str, Sequence[Rows]]] | None = None,
    files_from: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    allow_unequal_scales: bool = False,
    shard_bytes: int = SHARD_BYTES,
    group: GroupLike = None,
) -> list[Location]:
    """Write a folder that transformers and inference engines load: weights under the names that
    transformers stores them by (experts one at a time), config.json with `dtype` and
    `quantization_config`, generation_config.json.

    Args:
        model: of transformers, unsharded, as under ZeroAdamW, or sharded by FSDP2 and tensor
            parallelism. Or any other module, with `config` and `names`.
        folder: new or empty; or the URL of such a one, as for `export_safetensors`. It appears
            complete.
        naming: `compressed-tensors`, `modelopt`, `deepseek` or `bf16`.
        config: the PreTrainedConfig, config.json or folder of one that describes the model; by
            default the model's own.
        names: for a model whose parameters have other names, such as Megatron's: a dict from
            parameter to the stored name, or stored names with the ranges of rows that each of them
            has. Parameters that are not in it keep their names.
        files_from: a folder whose tokenizer and generation files are copied.
        dtype: the dtype of tensors that are not quantized; by default the nominal dtype of the
            quantized weights.
        allow_unequal_scales: log a warning instead of raising if weights that engines fuse have
            different tensor amaxes.
        shard_bytes: the size of a file, as for `export_safetensors`.
        group: the ranks that call this together, each of which writes its own files, as for
            `export_safetensors`.

    Returns the paths. Raises ValueError, with nothing written, for weights that do not belong to
    the model, for weights that the naming cannot express or that no reader finds, and for unequal
    tensor amaxes of weights that engines fuse, TypeError without a config, and ModuleNotFoundError
    without transformers. An error on one rank is raised on all of them, and leaves no folder.
    """
    return write_hf(
        source_of(model, group),
        model,
        folder,
        naming,
        config=config,
        names=names or {},
        files_from=None if files_from is None else Path(files_from),
        dtype=dtype,
        allow_unequal_scales=allow_unequal_scales,
        shard_bytes=shard_bytes,
    )
