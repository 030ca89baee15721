"""The options of the commands. --help shows their docstrings.

Nothing here imports torch, so help and mistyped options are answered immediately. The options of
`zerocast bench` are in `zerocast.bench.config`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from zerocast.bench.config import MAX_SECONDS, MAX_SEED, check_range
from zerocast.footprint.model_files import presets

# The names of dtypes of masters and of nominal weights.
Dtype = Literal["bfloat16", "float16", "float32"]
# The targets that use an option. Options that are not listed are used by all targets.
TARGETS = {
    "naming": ("hf", "safetensors"),
    "model": ("hf",),
    "share_amax": ("hf", "safetensors"),
    "allow_unequal_scales": ("hf",),
    "shard_bytes": ("hf", "safetensors"),
    "masters": ("checkpoint",),
}


@dataclass(frozen=True)
class DoctorConfig:
    """Show versions, devices, the backends that are chosen and why, and compare every usable
    backend with the reference.

    Example: zerocast doctor --seconds 30

    Exit status: 0 if every usable backend gives the bytes of the reference, 1 if one does not, 2
    for invalid options.
    """

    json: bool = False
    """Print JSON."""
    seconds: float = 10.0
    """How long to compare backends with the reference; each makes at least one round."""
    seed: int | None = None
    """Seed of the random inputs, by default a new one. A reported problem names the seed that
    repeats it.
    """

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        check_range("seconds", self.seconds, 0, MAX_SECONDS)
        if self.seed is not None:
            check_range("seed", self.seed, 0, MAX_SEED)


@dataclass(frozen=True)
class PlanConfig:
    """Show the bytes per rank in memory and in a step's communication, compared with FP8 and BF16
    weights, and the memory of an H100, H200 and B200 that remains for activations.

    Laid out by the code that training uses, so padding is counted. Activations are not counted.

    Example: zerocast plan llama3-8b --ranks 8 --format nvfp4 --parallel zero2 --png
    plan.png

    Exit status: 0, or 2 for a model or setup that cannot be planned.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")] = ""
    """A preset (llama3-8b, llama3-70b, llama3-405b, qwen3-8b, qwen3-235b-a22b, mixtral-8x7b,
    deepseek-v3, gpt-oss-20b, gpt-oss-120b), a config.json of any model that transformers builds, or
    its folder, or a JSON file with a list of parameters.
    """
    ranks: int = 8
    """Data-parallel ranks. Tensor, pipeline and expert parallelism are not modelled."""
    format: str = "nvfp4"
    """Format of the linear weights inside blocks; the rest is bf16. Options inline, as in
    fp8_block:power_of_2_scale=False.
    """
    parallel: Literal["zero1", "zero2", "fsdp2", "hsdp"] = "zero2"
    """zero1 and zero2 are ZeroAdamW or ZeroMuon; fsdp2 and hsdp shard every parameter by rows as
    torch's fully_shard does.
    """
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon, for zero1 and zero2, is ZeroMuon with the linear weights inside blocks as Muon's."""
    shard_ranks: int = 8
    """For hsdp: the number of ranks that share one copy of the model."""
    bucket_size: int | None = None
    """For zero1 and zero2: elements per bucket, by default the number in ZeroConfig."""
    moment_dtype: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Dtype of AdamW's moments; Muon's momentum is float32, or in 8 bits if they are."""
    grad_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype in which gradients are reduced."""
    grad_wire: Literal["fp8_1x128"] | None = None
    """How gradients are sent: in the dtype of the reduction, or as FP8 with one scale per 128
    elements.
    """
    keep_columnwise: bool = False
    """For zero1 and zero2: keep the columnwise copies of all weights."""
    sweep: bool = False
    """Show instead the bytes of every collective on 8 to 16,384 ranks, under zero2, fsdp2 and hsdp
    in groups of 8 and of 64.
    """
    json: bool = False
    """Print JSON."""
    png: Path | None = None
    """Also draw the footprints as stacked bars, or a sweep as curves."""

    def __post_init__(self) -> None:
        """Raise ValueError unless a model is named."""
        if not self.model:
            names = ", ".join(presets())
            raise ValueError(f"pass one model, as in zerocast plan llama3-8b: {names}, or a config.json")


@dataclass(frozen=True)
class InspectConfig:
    """Show the contents of a checkpoint, and for each weight its amax, saturated and flushed shares
    and error.

    Weights are listed in the order of the model, as far as their names show it. Reads a million
    elements at a time, or one weight of a checkpoint folder. Files are first compared with their
    hashes, if any.

    Example: zerocast inspect run/checkpoints/step_00001000 --format nvfp4 --weights "*.mlp.*" --png
    histogram.png

    Exit status: 0; 1 for damaged files and masters that are not finite; 2 for invalid options.
    """

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """A checkpoint of zerocast, also by its URL, or of torch.distributed.checkpoint, the folder
    of a trainer or of its run, safetensors (file, index or folder), or a file of torch.save.
    """
    format: str | None = None
    """Format to cast to, options inline as in fp8_block:power_of_2_scale=False. By default the
    stored formats.
    """
    weights: tuple[str, ...] = ("*",)
    """With --format: globs on names of parameters of two or more dimensions."""
    dtype: Dtype = "bfloat16"
    """With --format: the nominal dtype, to which masters are rounded first."""
    png: Path | None = None
    """Also draw a histogram of masters and casts by power of two."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class ExportConfig:
    """Export masters: to a folder that transformers and inference engines load, to safetensors, or
    to a checkpoint of masters for a training run.

    Example: zerocast export run/checkpoints/step_00001000 served --model llama-3-8b --naming
    modelopt

    Exit status: 0, or 2 if the source cannot be exported; the target is then not created.
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """A checkpoint of zerocast, also by its URL, or of torch.distributed.checkpoint, the folder
    of a trainer or of its run, safetensors (file, index or folder), or a file of torch.save.
    """
    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")]
    """A new folder to write."""
    to: Literal["hf", "safetensors", "checkpoint"] = "hf"
    """hf: a folder that transformers and engines load. safetensors: the weights only, under their
    own names. checkpoint: masters for zerocast.optim.load_masters and for any reader of
    torch.distributed.checkpoint.
    """
    naming: Literal["bf16", "compressed-tensors", "modelopt", "deepseek"] = "bf16"
    """The naming that the reader of hf or safetensors expects for quantized weights; bf16
    dequantizes them.
    """
    model: Path | None = None
    """For hf: config.json of the model, or a folder with it, whose tokenizer files are copied; by
    default the source.
    """
    format: str | None = None
    """Format to cast --weights to. By default the formats stored with a checkpoint, if any."""
    weights: tuple[str, ...] = ()
    """With --format: globs on names of parameters of two or more dimensions."""
    share_amax: Literal["llama"] | None = None
    """With --format: weights that engines fuse share one tensor amax."""
    ignore: tuple[str, ...] = ()
    """Globs on names of tensors to leave out."""
    dtype: Dtype = "bfloat16"
    """Nominal dtype, in which hf and safetensors hold other tensors."""
    masters: Literal["float32", "bfloat16"] | None = None
    """For a checkpoint: dtype of the masters, by default float32; bfloat16 needs half the bytes and
    rounds them.
    """
    allow_unequal_scales: bool = False
    """For hf: log, instead of raising, if global scales differ among weights that engines fuse.
    """
    shard_bytes: int | None = None
    """Most bytes in a safetensors file, by default 5 GB; about the same amount is held in
    memory.
    """
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        """Raise ValueError for options that need others, or that the target does not use."""
        for option, targets in TARGETS.items():
            if getattr(self, option) != getattr(ExportConfig, option) and self.to not in targets:
                named = " and ".join(targets)
                raise ValueError(f"--{option.replace('_', '-')} is for --to {named}, got --to {self.to}")
        if self.format is not None and not self.weights:
            raise ValueError(
                "--format needs --weights, such as --weights '*.mlp.*': embeddings and heads often stay as they are"
            )
        if self.share_amax is not None and self.format is None:
            raise ValueError(
                "--share-amax needs --format: without it weights share the amaxes that they shared in training"
            )

    @property
    def written_dtype(self) -> Dtype:
        """The dtype of the masters, or of the tensors that are not quantized."""
        return (self.masters or "float32") if self.to == "checkpoint" else self.dtype
