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

from zerocast.checkpoint.store import local_path
from zerocast.serve.hugging_face import write_hf
from zerocast.serve.piece import Rows
from zerocast.serve.weight_source import source_of
from zerocast.serve.write import SHARD_BYTES, write_safetensors

__all__ = ["export_hf", "export_safetensors"]

# What to do with a URL in place of a folder.
COPY = "export to one, then copy the folder"


def export_safetensors(
    model: nn.Module, folder: str | os.PathLike[str], naming: str = "bf16", shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write the parameters and persistent buffers of `model` into `folder`, which is new or empty.

    One process calls it: under ZeroAdamW every rank has whole weights. Under FSDP2 all ranks call
    it, and rank 0 writes. A file has at most `shard_bytes` bytes, unless a single tensor is larger;
    one file at a time is copied to the host. Returns the paths, the index last. Raises ValueError,
    with nothing written, for an unknown naming, a weight whose format or shape the naming cannot
    express and a folder that is not empty; ModuleNotFoundError without the package safetensors.
    """
    return write_safetensors(source_of(model), local_path(folder, COPY), naming, shard_bytes)


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
) -> list[Path]:
    """Write a folder that transformers and inference engines load: weights under the names that
    transformers stores them by (experts one by one), config.json with `dtype` and
    `quantization_config`, generation_config.json.

    Args:
        model: of transformers, trained by ZeroAdamW (one process calls this) or under FSDP2 (all
            ranks do, and rank 0 writes; one group is gathered at a time). Or any other module, with
            `config` and `names`.
        folder: new or empty. It appears complete.
        naming: `compressed-tensors`, `modelopt`, `deepseek` or `bf16`.
        config: the PreTrainedConfig, config.json or folder of one that describes the model; by
            default the model's own.
        names: for a model whose parameters have other names, such as Megatron's: by parameter the
            stored name, or stored names with the ranges of rows that each of them has. Parameters
            that are not in it keep their names.
        files_from: a folder whose tokenizer and generation files are copied.
        dtype: the dtype of tensors that are not quantized; by default the nominal dtype of the
            quantized weights.
        allow_unequal_scales: log a warning instead of raising if weights that engines fuse have
            different tensor amaxes.
        shard_bytes: the size of a file, as for `export_safetensors`.

    Returns the paths. Raises ValueError, with nothing written, for weights that are not those of
    the model, for weights that the naming cannot express or that no reader finds, and for unequal
    tensor amaxes of weights that engines fuse; TypeError without a config; ModuleNotFoundError
    without transformers or safetensors.
    """
    return write_hf(
        source_of(model),
        model,
        local_path(folder, COPY),
        naming,
        config=config,
        names=names or {},
        files_from=None if files_from is None else Path(files_from),
        dtype=dtype,
        allow_unequal_scales=allow_unequal_scales,
        shard_bytes=shard_bytes,
    )
