"""Each configuration that the integration refuses raises with the reason, and leaves the host as it was."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zerocast
from tests.torchtitan.host_on_cpu import WHY_NOT, importable, needs_torchtitan
from tests.torchtitan.training import TENSOR, Case, converter_after_sharding, refused
from tests.workers import Ranks

if not WHY_NOT:
    with importable():
        from torchtitan.components import optimizer as host_optimizer
        from torchtitan.config import ConfigManager, JobConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.models.moe.moe import GroupedExperts
        from torchtitan.protocols import model_converter, train_spec

        from zerocast.integrations import torchtitan as integration
        from zerocast.integrations.torchtitan import host

pytestmark = needs_torchtitan
NAME = "quantize.linear.zerocast"
DEGREES = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1}


def converter_of(case: Case, **degrees: int) -> Any:
    """Return the converters that torchtitan builds for a case."""
    given = DEGREES | degrees
    world = given["dp_replicate"] * given["dp_shard"] * given["cp"] * given["tp"] * given["pp"]
    config = ConfigManager().parse_args(case.arguments("nowhere"))
    return model_converter.build_model_converters(config, ParallelDims(**given, world_size=world))


OPTIONS = {
    "twice": (Case(converters=f"{NAME},{NAME}"), "in model.converters 2 times"),
    "float8": (Case(converters=f"{NAME},quantize.linear.float8"), "choose one of the two"),
    "another dtype": (Case(options=("--training.dtype=bfloat16",)), "training.dtype is float32, got bfloat16"),
    "a step in the backward pass": (
        Case(implementation="for-loop", options=("--optimizer.early_step_in_backward",)),
        "masters would change under a backward pass",
    ),
    "a model with optimizers of its own": (
        Case(options=("--model.name=corpus",)),
        "needs a TrainSpec with zerocast's optimizers, and corpus has",
    ),
    "delayed scaling that nobody saves": (Case("fp8_delayed", "for-loop"), "has scales to checkpoint"),
    "no format": (Case("layers.*=,output.*=nvfp4"), r"is a list of pattern=format.*'layers.\*='"),
    "another format": (Case("layers.*=fp3"), "fp3"),
    "no recipe": (Case(options=("--quantize.linear.zerocast.recipe=",)), "is a list of pattern=format"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    case, said = OPTIONS[name]
    with pytest.raises(ValueError, match=said):
        converter_of(case)


def test_a_last_save_in_safetensors() -> None:
    """Sharded states keep the wrapper, by which a load in place is noticed; safetensors reads addresses, and it has none."""
    asked = Case(options=("--checkpoint.enable", "--checkpoint.last-save-in-hf"))
    with pytest.raises(ValueError, match=r"last_save_in_hf is not supported.*full_state_dict=True"):
        converter_of(asked)
    converter_of(Case(options=("--checkpoint.last-save-in-hf",)))  # nothing is saved


@pytest.mark.parametrize(("name", "why"), [("ep", "torchtitan deals out the experts"), ("pp", "torchtitan copies")])
def test_parallelism(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"_degree=2 is not supported with {NAME}: {why}"):
        converter_of(Case(), **{name: 2})


def test_tensor_parallelism() -> None:
    """A TrainSpec of torchtitan's own slices and shards in one go."""
    converter_of(Case(), tp=2)
    with pytest.raises(ValueError, match=r"the TrainSpec of corpus: .*with_tensor_parallelism\(spec\)"):
        converter_of(Case(implementation="foreach"), tp=2)
    with pytest.raises(ValueError, match="enable_async_tensor_parallel is not supported"):
        converter_of(Case(options=("--parallelism.enable_async_tensor_parallel",)), tp=2)


@pytest.mark.slow
def test_slices_that_are_not_whole_blocks(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(4)(refused, Case("fp8_block", options=TENSOR), str(tmp_path)):
        assert "layers.0.attention.wq.weight: a block of fp8_block would span two tensor-parallel slices" in said


def test_nothing_sharded() -> None:
    with pytest.raises(
        ValueError, match="data_parallel_shard_degree=1 and context_parallel_degree=1: start at least 2"
    ):
        converter_of(Case(), dp_shard=1)
    converter_of(Case(), dp_shard=1, cp=2)


def test_a_seed_checkpoint_holds_masters_alone() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    converter_of(Case(options=("--checkpoint.create_seed_checkpoint",)), dp_shard=1).convert(model)
    assert type(model[0].weight) is nn.Parameter


def test_without_the_section() -> None:
    config = JobConfig()
    config.model.converters = [NAME]
    with pytest.raises(RuntimeError, match=r"--job.custom_config_module=zerocast.integrations.torchtitan"):
        model_converter.build_model_converters(config, ParallelDims(**DEGREES, world_size=2))


def test_converting_twice_and_another_model() -> None:
    with torch.device("meta"):
        model, other = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(32, 32)])}), nn.Linear(32, 32)
    container = converter_of(Case("layers.*=nvfp4"))
    container.convert(model)
    with pytest.raises(ValueError, match=r"layers.0.weight is prepared already"):
        container.convert(model)
    with pytest.raises(ValueError, match="matches no weight"):
        container.convert(other)


def test_experts_one_by_one() -> None:
    """Experts in a loop, which torchtitan uses without grouped products, give the products of grouped ones."""
    experts = GroupedExperts(dim=32, hidden_dim=32, num_experts=2, use_grouped_mm=False).bfloat16()
    with torch.no_grad():
        experts.init_weights(0.1)
    zerocast.quantize_(experts, {"w?": "nvfp4"})
    x, found = torch.randn(64, 32, dtype=torch.bfloat16), []
    for experts.use_grouped_mm in (False, True):
        y = experts(x, torch.tensor([24, 40]))
        found.append([y, *torch.autograd.grad(y.float().square().sum(), list(experts.parameters()))])
    for one_by_one, grouped in zip(*found, strict=True):
        torch.testing.assert_close(one_by_one, grouped, rtol=0.05, atol=0.05 * float(grouped.detach().abs().max()))


def test_converting_what_is_sharded(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2)(converter_after_sharding, Case().plain(), str(tmp_path)):
        assert "is sharded already" in said


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"name": "Adam"}, "optimizer.name=Adam"), ({"early_step_in_backward": True}, "early_step_in_backward")],
)
def test_optimizers(changed: dict[str, Any], said: str) -> None:
    config = dataclasses.replace(ConfigManager().parse_args(Case().arguments("nowhere")).optimizer, **changed)
    with pytest.raises(ValueError, match=f"not with .*{said}"):
        integration.build_optimizers([nn.Linear(2, 2)], config, None)


def test_a_spec_whose_optimizers_do_more() -> None:
    spec = train_spec.get_train_spec("llama3")
    more = dataclasses.replace(spec, build_optimizers_fn=host_optimizer.build_optimizers_with_moe_load_balancing)
    with pytest.raises(ValueError, match="build_optimizers_with_moe_load_balancing, whose work would be lost"):
        integration.with_fused_optimizers(more)


@pytest.mark.parametrize("module", ["components.optimizer", "components.nowhere"])
def test_another_shape(module: str) -> None:
    with pytest.raises(RuntimeError, match=f"no Nothing in torchtitan.{module}"):
        host.import_name(module, "Nothing")


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("find_spec", None, "torchtitan is not installed"),
        (
            "import_module",
            ModuleNotFoundError("No module named 'datasets'", name="datasets"),
            "torchtitan is installed and needs datasets",
        ),
        (
            "import_module",
            ImportError("cannot import name 'x' from 'torch'"),
            "is installed and cannot be imported: cannot import name 'x'",
        ),
    ],
)
def test_torchtitan_that_cannot_be_imported(name: str, error: ImportError | None, said: str) -> None:
    owner = importlib.util if error is None else importlib
    failing = mock.patch.object(owner, name, side_effect=error, return_value=None)
    with failing, pytest.raises(ImportError, match=said):
        host.import_name("components.optimizer", "OptimizersContainer")


def test_the_host_is_as_it_was() -> None:
    """Importing the integration adds a converter and a model to torchtitan's registries, and changes nothing."""
    spec = train_spec.get_train_spec("llama3")
    assert spec.build_optimizers_fn is host_optimizer.build_optimizers
    assert host_optimizer.build_optimizers.__module__ == "torchtitan.components.optimizer"
    assert model_converter._registry_model_converter_cls[NAME] is integration.MasterWeightConverter
    assert not hasattr(JobConfig().quantize.linear, "zerocast")


def test_names_of_the_other_shape() -> None:
    with pytest.raises(ImportError, match=r"quantized is for torchtitan from 0.3 on.*list quantize.linear.zerocast in"):
        from zerocast.integrations.torchtitan import quantized  # noqa: F401
    assert not hasattr(integration, "nothing")
