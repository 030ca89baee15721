"""torchtitan 0.3, whose models are ModelSpecs: its Trainer learns with quantized weights, every gathered byte is that of an
unsharded cast of the masters, resumed runs are the uninterrupted ones, and what is not supported is refused by the Trainer.
"""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zerocast
from tests.torchtitan.host_on_cpu import importable
from tests.torchtitan.trainer_on_cpu import MIXED, WHY_NOT, Case, needs_model_specs, plain, trainer, trainer_on_cpu
from tests.torchtitan.training import check_resumed, loaded_masters, refused, run_and_save, train
from tests.workers import Ranks, error_of, on_ranks

if not WHY_NOT:
    with importable():
        import torchtitan.train
        from torchtitan.components.optimizer import OptimizersContainer
        from torchtitan.components.quantization import nvfp4
        from torchtitan.config import ConfigManager
        from torchtitan.config.override import derive
        from torchtitan.models.common.linear import Linear

        from zerocast.integrations import torchtitan as integration
        from zerocast.integrations.torchtitan import Optimizers, quantized
        from zerocast.integrations.torchtitan.section import recipe_of

        class OtherOptimizers(OptimizersContainer):
            """Optimizers of a user who knows nothing of zerocast."""

            @dataclass(kw_only=True, slots=True)
            class Config(OptimizersContainer.Config):
                pass

        class ReplacedLinear(Linear):
            """A stand-in for a linear layer of torchao."""

            @dataclass(kw_only=True, slots=True)
            class Config(Linear.Config):
                pass


pytestmark = needs_model_specs
slow = pytest.mark.slow
TENSOR = "--parallelism.tensor_parallel_degree=2"
COMPILED = ("--compile.enable", "--compile.backend=aot_eager")

CASES = {
    "nvfp4": (2, Case("nvfp4")),
    "fp8_block, AdamW of torch": (2, Case("fp8_block", "foreach")),
    "formats side by side": (2, Case(MIXED)),
    "fp8_current": (2, Case("fp8_current")),
    "fp8_delayed, AdamW of torch": (2, Case("fp8_delayed", "for-loop")),
    "one rank": (1, Case("nvfp4")),
    "three ranks, accumulation": (3, Case(MIXED, options=("--training.global_batch_size=12",))),
    "replicas alone": (2, Case("fp8_current", options=("--parallelism.data_parallel_replicate_degree=2",))),
    "shards and replicas": (4, Case(MIXED, options=("--parallelism.data_parallel_replicate_degree=2",))),
    "never resharded": (2, Case(MIXED, options=("--parallelism.fsdp_reshard_after_forward=never",))),
    "validated and verified": (2, Case(MIXED, options=("--validator.enable", "--zerocast.verify_every=2"))),
    "recomputed": (2, Case(MIXED, options=("activation-checkpoint:full",))),
    "selectively recomputed, compiled": (2, Case("nvfp4", options=(*COMPILED, "activation-checkpoint:selective"))),
    "tensor": (4, Case("layers.*=nvfp4,lm_head.*=fp8_current", options=(TENSOR,))),
    "tensor, AdamW of torch, recomputed, compiled": (
        4,
        Case("nvfp4", "foreach", options=(TENSOR, *COMPILED, "activation-checkpoint:full")),
    ),
    "tensor, by DTensors": (4, Case("nvfp4", options=(TENSOR, "--parallelism.spmd_backend=partial_dtensor"))),
    "full_dtensor": (2, Case("nvfp4", options=("--parallelism.spmd_backend=full_dtensor",))),
}
QUICK = ("nvfp4", "one rank", "fp8_delayed, AdamW of torch")
PARALLEL = {"replicas alone": "replicas", "shards and replicas": "data, replicas"}
PARALLEL |= {name: "data, tensor" for name in CASES if name.startswith("tensor")}


@pytest.mark.shows(
    host="torchtitan",
    parallel=lambda name: PARALLEL.get(name, "data"),
    formats=lambda name: CASES[name][1].formats,
    ranks=lambda name: CASES[name][0],
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else slow) for name in CASES])
def test_gathered_bytes_are_the_cast_of_the_masters(ranks: Ranks, name: str, tmp_path: Path) -> None:
    world, case = CASES[name]
    for losses, complaints, differences in ranks(world)(train, case, str(tmp_path), trainer, timeout=240):
        assert not complaints and not differences
        assert len(losses) == case.steps and losses[-1] < losses[0] - 0.5


def validated(case: Case, folder: str) -> list[tuple[float, float]]:
    """Return the losses of two validations with the quantized weights."""
    with trainer(case, folder) as made:
        made.train()
        (model,) = made.model_parts
        found: list[float] = []
        made.metrics_processor.log_validation = lambda step, loss, **_: found.append(float(loss))
        made.validator.validate(made.model_parts, case.steps)
        made.validator.validate(made.model_parts, case.steps)
        assert model.training
        return [(found[0], found[1])]


def test_validation(ranks: Ranks, tmp_path: Path) -> None:
    """Evaluation computes with the quantized weights unchanged, repeatably, and below the first
    loss of the training.
    """
    case = Case("nvfp4", options=("--validator.enable",))
    for ((first, second),) in ranks(2)(validated, case, str(tmp_path), timeout=240):
        assert first == second and 0.0 < first < 8.0


def launched(case: Case, folder: str) -> None:
    """Run torchtitan's own entry, `torchtitan.train`, with this case's command line. The pool keeps its process group."""
    group = mock.patch.object(torch.distributed, "destroy_process_group")
    arguments = mock.patch.object(sys, "argv", ["train.py", *case.arguments(folder)])
    with trainer_on_cpu(), group, arguments, mock.patch.object(torchtitan.train, "init_logger"):
        torchtitan.train.main()


def test_the_entry(ranks: Ranks, tmp_path: Path) -> None:
    case = Case("nvfp4", steps=2, options=("--checkpoint.enable", "--checkpoint.interval=2"))
    ranks(2)(launched, case, str(tmp_path), timeout=240)
    assert (tmp_path / "checkpoint" / "step-2" / ".metadata").is_file()


RESUMED = {
    "nvfp4": (2, Case("nvfp4")),
    "fp8_delayed": (2, Case("fp8_delayed")),
    "AdamW of torch": (2, Case(MIXED, "foreach")),
    "saved in the background": (2, Case("fp8_block", options=("--checkpoint.async_mode=async",))),
    "tensor parallelism": (4, Case("nvfp4", options=(TENSOR,))),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "nvfp4" else slow) for name in RESUMED])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(ranks: Ranks, name: str, tmp_path: Path) -> None:
    check_resumed(ranks, *RESUMED[name], str(tmp_path), trainer)


@slow
def test_other_ranks_and_plain_torchtitan_load_the_masters(ranks: Ranks, tmp_path: Path) -> None:
    case = Case("nvfp4", "foreach", steps=2)
    (_, contents, _), _ = ranks(2)(run_and_save, case, str(tmp_path), -1, trainer, timeout=240)
    readers = (
        (3, case),
        (1, case),
        (2, Case("", "foreach", steps=2)),
        (4, case.having(TENSOR)),
        (2, Case("fp8_block", steps=2)),
    )
    for world, reader in readers:
        for masters in ranks(world)(loaded_masters, reader, str(tmp_path), 2, trainer, timeout=240):
            assert masters and masters.items() <= contents.items()


def with_converter() -> Any:
    """Return a configuration with a product that torchtitan's own converter replaced, as far as
    `has_quantization` sees.
    """
    config = plain()
    attention = config.model_spec.model.layers[0].attention
    attention.wo = derive(attention.wo, nvfp4.NVFP4Linear.Config)
    return config


REFUSED = {
    "pipeline": (
        ("--parallelism.pipeline_parallel_degree=2",),
        "pipeline_parallel_degree=2 is not supported with zerocast",
    ),
    "experts": (("--parallelism.expert_parallel_degree=2",), "expert_parallel_degree=2 is not supported with zerocast"),
    "another dtype": (("--training.dtype=bfloat16",), "training.dtype is float32, got bfloat16"),
    "graphs": (("--training.no-disable_cuda_graphs",), "reads on the CPU the headers of all ranks"),
    "safetensors": (
        ("--checkpoint.enable", "--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"),
        "safetensors",
    ),
    "asynchronous products": (
        (*COMPILED, "--compile.enable_async_tensor_parallel"),
        "compile.enable_async_tensor_parallel",
    ),
    "another format": (("--zerocast.recipe=layers.*=nvfp5",), "nvfp5"),
    "another name": (("--zerocast.recipe=blocks.*=nvfp4",), "'blocks.*' matches no weight"),
    "no recipe": (("--zerocast.recipe=",), "zerocast.recipe is a list of pattern=format"),
}


@on_ranks(2, timeout=240)
def test_refusals(tmp_path: Path) -> None:
    folder = str(tmp_path)
    said = {name: refused(Case("nvfp4", options=options), folder, trainer) for name, (options, _) in REFUSED.items()}
    assert {name: text for name, text in said.items() if REFUSED[name][1] not in text} == {}


def build(config: Any, folder: str) -> str:
    """Return the error of a Trainer for a configuration that was made in Python."""
    with mock.patch.object(Case, "config", return_value=config):
        return error_of(lambda: trainer(Case(), folder).__enter__())


def without_policies(model: Any, *, ac_config: Any, **given: Any) -> Any:
    """Recompute in a way of its own, like flux's parallelize_fn."""
    return plain().model_spec.parallelize_fn(model, ac_config=None, **given)


def other_optimizers() -> Any:
    config = plain()
    return dataclasses.replace(config, optimizer=OtherOptimizers.Config(param_groups=config.optimizer.param_groups))


@on_ranks(2)
def test_configurations_that_python_made(tmp_path: Path) -> None:
    folder = str(tmp_path)
    if nvfp4.NVFP4Linear is None:  # without torchao
        nvfp4.NVFP4Linear = ReplacedLinear
    recipe = {"layers.*": "nvfp4"}
    config = plain()
    unprepared = dataclasses.replace(config.model_spec, parallelize_fn=without_policies)
    converted, delayed, unprepared = [
        build(quantized(with_converter(), recipe), folder),
        build(quantized(other_optimizers(), {"layers.*": "fp8_delayed"}), folder),
        build(quantized(dataclasses.replace(config, model_spec=unprepared), recipe), folder),
    ]
    assert "converters have replaced products" in converted
    assert "has scales to checkpoint, which zerocast's optimizers do, not OtherOptimizers" in delayed
    assert "test_model_spec.without_policies builds no activation checkpointing" in unprepared


def test_the_configuration_is_another_one() -> None:
    config = plain()
    found = quantized(
        config, {"layers.*.w2.*": "fp8_block", "layers.*": "nvfp4"}, verify_every=9, implementation="zerocast"
    )
    assert found.zerocast.recipe == ["layers.*.w2.*=fp8_block", "layers.*=nvfp4"] and found.zerocast.verify_every == 9
    assert isinstance(found, type(config)) and isinstance(found.optimizer, Optimizers.Config)
    assert (found.optimizer.implementation, config.optimizer.implementation) == ("zerocast", "fused")
    assert (found.training.disable_cuda_graphs, config.training.disable_cuda_graphs) == (True, False)
    assert found.model_spec is config.model_spec and not hasattr(config, "zerocast")
    with pytest.raises(ValueError, match="this configuration is quantized already, with Section"):
        quantized(found, {"lm_head.*": "nvfp4"})


def test_recipes_of_all_kinds() -> None:
    recipe = zerocast.Recipe(
        {"tok_embeddings.*": "identity", "norm.*": "identity"}, "nvfp4", share_amax=[("*.w1.*", "*.w3.*")]
    )
    section = quantized(plain(), recipe).zerocast
    assert section.recipe == ["tok_embeddings.*=identity", "norm.*=identity", "*=nvfp4"]
    assert recipe_of(section).share_amax == recipe.share_amax
    with pytest.raises(TypeError, match="maps patterns of parameter names to formats"):
        quantized(plain(), ["layers.*=nvfp4"])
    with pytest.raises(ValueError, match="nvfp5"):
        quantized(plain(), {"layers.*": "nvfp5"})


def test_what_is_no_configuration() -> None:
    with pytest.raises(TypeError, match=r"is a Trainer.Config, as its config registries make them, got ModelSpec"):
        quantized(plain().model_spec, {"layers.*": "nvfp4"})
    with pytest.raises(ValueError, match=r"is for torchtitan's OptimizersContainer, these are .*OtherOptimizers"):
        quantized(other_optimizers(), {"layers.*": "nvfp4"}, implementation="zerocast")


def test_configurations_of_torchtitan_by_their_names() -> None:
    arguments = ["--module=zerocast.integrations.torchtitan", "--zerocast.recipe=layers.*=nvfp4,lm_head.*=fp8_block"]
    with importable():
        config = ConfigManager().parse_args([*arguments, "--config=llama3_8b", "--optimizer.implementation=zerocast"])
        assert config.model_spec.flavor == "8B" and config.zerocast.recipe == ["layers.*=nvfp4", "lm_head.*=fp8_block"]
        assert isinstance(config.optimizer, Optimizers.Config) and config.training.disable_cuda_graphs
        assert ConfigManager().parse_args([*arguments, "--config=sft_debugmodel"]).model_spec.name
        with pytest.raises(ValueError, match="Config function 'llama9' not found"):
            ConfigManager().parse_args([*arguments, "--config=llama9"])


def test_names_of_the_other_shape() -> None:
    with pytest.raises(ImportError, match=r"JobConfig is for torchtitan up to 0.2.*quantized"):
        from zerocast.integrations.torchtitan import JobConfig  # noqa: F401
    assert not hasattr(integration, "nothing")
