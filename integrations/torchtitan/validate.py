"""The options of torchtitan that are not supported, and why.

With them weights would be wrong, or a later error would not name the cause.
"""

from collections.abc import Iterator
from typing import Any

from . import host
from .optimizer import DelayedStates, build_optimizers
from .section import NAME, recipe_of


def validate_job(job_config: Any, parallel_dims: Any) -> None:
    """Check the JobConfig for the model converter.

    Raises RuntimeError if it has no section of zerocast; ValueError, with the reason, for an option
    that is not supported.
    """
    if not hasattr(job_config.quantize.linear, "zerocast"):
        raise RuntimeError(
            f"the converter {NAME} finds no such section in torchtitan's JobConfig: launch with "
            "--job.custom_config_module=zerocast.integrations.torchtitan"
        )
    for problem in _job_problems(job_config, parallel_dims):
        raise ValueError(problem)


def validate_trainer(config: Any, parallel_dims: Any) -> None:
    """Check a configuration that `quantized` made.

    Raises ValueError, with the reason, for an option that is not supported.
    """
    for problem in _trainer_problems(config, parallel_dims):
        raise ValueError(problem)


def _job_problems(job_config: Any, parallel_dims: Any) -> Iterator[str]:
    yield from _converter_problems(job_config.model.converters)
    yield from _parallelism_problems(parallel_dims)
    yield from _shard_problems(parallel_dims)
    yield from _slice_problems(job_config, parallel_dims)
    yield from _training_problems(job_config)
    yield from _optimizer_problems(job_config)


def _trainer_problems(config: Any, parallel_dims: Any) -> Iterator[str]:
    if host.has_quantization(config.model_spec.model):
        yield (
            "torchtitan's converters have replaced products in this model's configuration, and zerocast quantizes the weights of "
            "the same products: choose one of the two"
        )
    yield from _parallelism_problems(parallel_dims)
    yield from _training_problems(config)
    if config.compile.enable_async_tensor_parallel:
        yield ASYNC.format("compile")
    if not config.training.disable_cuda_graphs:
        yield (
            "training.disable_cuda_graphs=False is not supported with zerocast: a gather of quantized weights reads on the CPU "
            "the headers of all ranks, which a CUDA graph cannot"
        )
    yield from _delayed_problems(config)


ASYNC = "{}.enable_async_tensor_parallel is not supported with zerocast: it needs plain products of a compiled graph"


def _converter_problems(converters: list[str]) -> Iterator[str]:
    others = [name for name in converters if name != NAME]
    if converters.count(NAME) > 1:
        yield f"{NAME} is in model.converters {converters.count(NAME)} times: weights are prepared once"
    for other in others:
        if other.startswith("quantize.linear"):
            yield f"{other} replaces the products of linear layers, whose weights {NAME} quantizes: choose one of the two"


def _parallelism_problems(parallel_dims: Any) -> Iterator[str]:
    for degree, name in (
        (parallel_dims.ep, "expert_parallel_degree"),
        (getattr(parallel_dims, "etp", 1), "expert_tensor_parallel_degree"),
    ):
        if degree > 1:
            yield (
                f"parallelism.{name}={degree} is not supported with {NAME}: torchtitan deals out the experts of a weight, "
                "and FSDP2 gathers them over other ranks than the rest"
            )
    if parallel_dims.pp > 1:
        yield (
            f"parallelism.pipeline_parallel_degree={parallel_dims.pp} is not supported with {NAME}: torchtitan copies the model "
            "for each stage, and a prepared weight is not copied"
        )


def _shard_problems(parallel_dims: Any) -> Iterator[str]:
    if not parallel_dims.fsdp_enabled:
        yield (
            f"{NAME} quantizes weights that FSDP2 gathers, and torchtitan shards nothing with data_parallel_shard_degree="
            f"{parallel_dims.dp_shard} and context_parallel_degree={parallel_dims.cp}: start at least 2 ranks"
        )


def _slice_problems(job_config: Any, parallel_dims: Any) -> Iterator[str]:
    if parallel_dims.tp == 1:
        return
    name = job_config.model.name
    parallelize_fn = host.get_train_spec(name).parallelize_fn
    if not hasattr(parallelize_fn, "prepares_slices"):
        yield (
            f"parallelism.tensor_parallel_degree={parallel_dims.tp} is not supported with {NAME} and the TrainSpec of {name}: "
            "it slices and shards weights in one go, and they are prepared in between. llama3_zerocast is registered, others "
            "register zerocast.integrations.torchtitan.with_tensor_parallelism(spec)"
        )
    if job_config.parallelism.enable_async_tensor_parallel:
        yield ASYNC.format("parallelism")


def _training_problems(config: Any) -> Iterator[str]:
    if config.training.dtype != "float32":
        yield f"parameters are FP32 masters: training.dtype is float32, got {config.training.dtype}"
    if getattr(config.optimizer, "early_step_in_backward", False):
        yield (
            "optimizer.early_step_in_backward is not supported with zerocast: masters would change under a backward pass that "
            "still gathers them"
        )
    if config.checkpoint.enable and config.checkpoint.last_save_in_hf:
        yield (
            "checkpoint.last_save_in_hf is not supported with zerocast: safetensors cannot read the tensors of sharded masters, so "
            "the save would fail after the last step. Save torchtitan's own checkpoint, which its convert_to_hf.py reads, or a "
            "state dict of full_state_dict=True"
        )


def _optimizer_problems(job_config: Any) -> Iterator[str]:
    ours = job_config.optimizer.implementation == "zerocast"
    build_optimizers_fn = host.get_train_spec(job_config.model.name).build_optimizers_fn
    if ours and build_optimizers_fn is not build_optimizers:
        yield (
            f"optimizer.implementation=zerocast needs a TrainSpec with zerocast's optimizers, and {job_config.model.name} has its "
            "own: llama3_zerocast is registered, others register zerocast.integrations.torchtitan.with_fused_optimizers(spec)"
        )
    delayed = [
        entry for entry in job_config.quantize.linear.zerocast.recipe if entry.rpartition("=")[2] == "fp8_delayed"
    ]
    if delayed and not ours:
        yield (
            f"{delayed[0]} has scales to checkpoint, which only the optimizers of optimizer.implementation=zerocast do, not "
            f"{job_config.optimizer.implementation}"
        )


def _delayed_problems(config: Any) -> Iterator[str]:
    delayed = [f"{pattern}={fmt}" for pattern, fmt in recipe_of(config.zerocast).patterns if fmt.name == "fp8_delayed"]
    if delayed and not issubclass(config.optimizer._owner, DelayedStates):
        yield (
            f"{delayed[0]} has scales to checkpoint, which zerocast's optimizers do, not {config.optimizer._owner.__qualname__}"
        )
