"""install() before pretrain(), in the ranks of a pool: right bytes, and each mistake."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import zerocast
from tests.megatron import te
from tests.megatron.pretraining import WHY_NOT, Trained, pretrain
from tests.megatron.te_attaching import grouped
from tests.megatron.training import NARROW, Run
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import installation
from zerocast.integrations.megatron.primary import weight_of

if not WHY_NOT:
    import megatron.training.training as loop
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

RECIPE = {"*.linear_fc1.weight": "fp8_block", "*.linear_*.weight": NARROW}
FLAG = ("--zerocast-recipe", *(f"{pattern}={fmt}" for pattern, fmt in RECIPE.items()))
_MXFP8 = ("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8", "--fp8-param-gather")
_TWO_STAGES = ("--num-layers", "2", "--pipeline-model-parallel-size", "2")
ONE_STAGE = {"decoder.layers.1.mlp.*.weight": NARROW}  # settings are checked on the other one too
DISTRIBUTED = "--use-distributed-optimizer"


@contextlib.contextmanager
def uninstalled_afterwards() -> Iterator[None]:
    """Whatever is installed while the context is open is uninstalled when it closes."""
    try:
        yield
    finally:
        integration.uninstall()


@contextlib.contextmanager
def installed(recipe: Any = None, verify_every: int | None = 1) -> Iterator[Any]:
    """While the context is open, zerocast is installed into Megatron."""
    with uninstalled_afterwards():
        yield integration.install(recipe, verify_every)


@dataclass(frozen=True)
class Left:
    """What a run without a stale byte leaves: `formats` are those of its quantized weights."""

    losses: dict[int, float]
    evaluated: list[float]
    masters: dict[str, torch.Tensor]
    formats: dict[str, str]

    def check_same(self, other: "Left") -> None:
        """Losses of the steps that `other` took, and masters in the end."""
        assert other.losses == {step: self.losses[step] for step in other.losses}
        assert self.masters.keys() == other.masters.keys()
        assert all(torch.equal(master, other.masters[name]) for name, master in self.masters.items())

    def check_resumed(self, resumed: "Left") -> None:
        """A run that was resumed after the second of four steps is this one, which was not interrupted."""
        assert list(self.losses) == [1, 2, 3, 4] and list(resumed.losses) == [3, 4]
        assert resumed.formats == self.formats
        self.check_same(resumed)


def saving_to(folder: Path) -> tuple[str, ...]:
    """Flags of a run that saves after its second and fourth step."""
    return ("--save", str(folder / "checkpoint"), "--save-interval", "2")


def loading_from(folder: Path) -> tuple[str, ...]:
    """Flags of a run that resumes after the second step. Collective."""
    dist.barrier()
    (folder / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("2")
    dist.barrier()
    return ("--load", str(folder / "checkpoint"))


def left(trained: Trained, run: Run | None = None) -> Left:
    run = run or trained.run
    assert run is not None
    run.force_sync()
    assert not run.stale_bytes()
    formats = {name: str(weight_of(weight).format) for name, weight in run.weights.items()}
    return Left(trained.losses, trained.evaluated, run.masters(), formats)


def train(*flags: str, recipe: Any = RECIPE, **options: Any) -> Left:
    """A run with zerocast installed, whose bytes are verified."""
    with installed(recipe) as own:

        def after(trained: Trained) -> Left:
            (attachment,) = own.attachments
            assert zerocast.verify(attachment).ok
            return left(trained)

        found: Left = pretrain(*flags, after=after, **options)
        return found


@contextlib.contextmanager
def _te_layers(fmt: str, last_stage: bool = False, with_grouped: bool = False) -> Iterator[None]:
    """While the context is open, the model that `pretrain` builds has tensors of TransformerEngine
    in its MLPs, in the last pipeline stage alone or in all, as its layers have them by
    `--fp8-param-gather`; with several experts in one tensor beside them.
    """

    def build(original: Any) -> Any:
        def call(chunks: Any, *args: Any, **kwargs: Any) -> Any:
            for chunk in [] if last_stage and not parallel_state.is_pipeline_last_stage() else chunks:
                for layer in unwrap_model(chunk).decoder.layers:
                    for name in ("linear_fc1", "linear_fc2"):
                        value = getattr(layer.mlp, name).weight.detach()
                        made = te.TELinear(*reversed(value.shape))
                        made.weight = te.parameter(fmt, value, value.device)
                        setattr(layer.mlp, name, made)
                    if with_grouped:
                        layer.mlp.experts = torch.nn.Module()
                        layer.mlp.experts.weight = torch.nn.Parameter(grouped("nvfp4"))
            return original(chunks, *args, **kwargs)

        return call

    name = "correct_amax_history_if_needed"
    with contextlib.ExitStack() as stack:
        stack.enter_context(te.te_in_the_host())
        for module in installation.model_builders():
            stack.enter_context(mock.patch.object(module, name, build(getattr(module, name))))
        yield


def train_te_layers(fmt: str, *flags: str) -> Left:
    """A run whose weights are TransformerEngine's, and `install({})` its one line."""
    with _te_layers(fmt):
        return train(*_MXFP8, *flags, recipe={})


def _te_layers_of(fmt: str, *flags: str, **where: bool) -> Callable[[], Any]:
    def case() -> None:
        with _te_layers(fmt, **where):
            run_with(*flags, recipe={})()

    return case


def plain(*flags: str) -> Left:
    """The same run without zerocast."""
    found: Left = pretrain(*flags, after=left)
    return found


def _two_recipes() -> None:
    with installed({"*.linear_*.weight": ("fp8_block", "fp8_current")[dist.get_rank()]}):
        pretrain("--train-iters", "1")


def run_with(*flags: str, recipe: Any = RECIPE, without: str = "") -> Callable[[], Any]:
    """A run of one step with these flags, which nothing verifies."""

    def case() -> None:
        with installed(recipe, None):
            pretrain("--train-iters", "1", *flags, without=without)

    return case


def _twice() -> None:
    with installed(RECIPE):
        integration.install(RECIPE)


def _after_setup(then: Callable[[Any, Any], object]) -> None:
    """A run in which something is called with the model and the optimizer once they are built."""
    setup = loop.setup_model_and_optimizer

    def setup_and_more(*args: Any, **kwargs: Any) -> Any:
        built = setup(*args, **kwargs)
        then(*built[:2])
        return built

    with mock.patch.object(loop, "setup_model_and_optimizer", setup_and_more):
        pretrain("--train-iters", "1")


def _after_building() -> None:
    setup = loop.setup_model_and_optimizer
    try:
        with uninstalled_afterwards():
            _after_setup(lambda model, optimizer: integration.install(RECIPE))
    finally:
        # What was there when it was installed has ended.
        loop.setup_model_and_optimizer = setup


def _attached_by_hand() -> None:
    """A script that attaches what install() has attached."""
    with installed(RECIPE):
        _after_setup(lambda model, optimizer: integration.attach(optimizer, model))


def _quantized_te_layer() -> None:
    """A layer that says it is TransformerEngine's, as far as a check can see without it."""

    class Linear(torch.nn.Linear):
        __module__ = "transformer_engine.pytorch.module.linear"

    model = torch.nn.ModuleDict({"linear_fc1": Linear(64, 64)})
    installation.quantize_chunks([model], zerocast.Recipe({"linear_*.weight": "fp8_block"}))


def _without_a_name() -> None:
    """A megatron.training that has another name for what trains."""
    step = loop.train_step
    del loop.train_step
    try:
        integration.install(RECIPE)
    finally:
        loop.train_step = step


def _built_otherwise() -> None:
    """A host that builds by other functions than those that are replaced."""
    with installed(RECIPE), mock.patch.object(installation.Installation, "_building", return_value=[]):
        pretrain("--train-iters", "1")


def _both() -> None:
    with installed(RECIPE):
        pretrain("--train-iters", "1", *FLAG)


# By name, what happens, and the error.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "twice": (_twice, r"RuntimeError: zerocast is installed in megatron.training already: call uninstall\(\) first"),
    "after building": (
        _after_building,
        r"RuntimeError: install\(\) came after setup_model_and_optimizer, .* Call .*install\(recipe\) before",
    ),
    "attached by hand": (_attached_by_hand, r"RuntimeError: a \w+ is attached already: detach\(\) first"),
    "two recipes": (_two_recipes, "ValueError: .*recipe.*fp8_current"),
    "refused on one rank": (
        run_with(
            "--num-layers", "2", "--pipeline-model-parallel-size", "2", recipe={"*embedding*.weight": "fp8_block"}
        ),
        "ValueError: rank 0: embedding.word_embeddings.weight is the table of an embedding",
    ),
    "a recipe and a flag": (_both, r"ValueError: .*install\(\) was given a recipe, and .* by --zerocast-recipe"),
    "a flag that is none": (
        run_with("--zerocast-recipe", "nvfp4", recipe=None),
        "ValueError: .*--zerocast-recipe is a list of pattern=format, .* got 'nvfp4'",
    ),
    "a pattern of nothing": (
        run_with(recipe={"*.linear_*.weight": "fp8_block", "*.liner.weight": "fp8_block"}),
        r"ValueError: .*recipe pattern '\*.liner.weight' matches no weight; there are: embedding",
    ),
    "nothing quantized": (
        run_with(recipe={}),
        r"ValueError: Recipe\(.* quantizes no weight of the model, .* name weights in the recipe",
    ),
    "a layer of TransformerEngine": (
        _quantized_te_layer,
        "ValueError: .*linear_fc1.weight is a weight of TransformerEngine's Linear, .* --transf",
    ),
    "verified never": (lambda: integration.install(RECIPE, 0), "ValueError: verify_every is None or at least 1, got 0"),
    "verified never by the flag": (
        run_with(*FLAG, "--zerocast-verify-every", "-1", recipe=None),
        "ValueError: .*verify_every is None or at least 1, got -1",
    ),
    "torch": (run_with("--ckpt-format", "torch"), "ValueError: .*--ckpt-format torch, .* saved as torch_dist only"),
    "whole masters": (
        run_with(*_TWO_STAGES, recipe=ONE_STAGE, without=DISTRIBUTED),
        "ValueError: .*use_distributed_optimizer=False is not supported",
    ),
    "muon": (
        run_with("--optimizer", "muon", *_TWO_STAGES, recipe=ONE_STAGE, without=DISTRIBUTED),
        "ValueError: .*optimizer='muon' is not supported without .* In pretrain.. that is --use-distributed-optimizer",
    ),
    "upcycling": (
        run_with("--moe-use-upcycling", "--num-experts", "2", "--save", "upcycled", "--save-interval", "1"),
        "ValueError: .*--moe-use-upcycling is not supported: .* then train from its checkpoint",
    ),
    "mxfp8 through gradients": (
        run_with(*_MXFP8, "--reuse-grad-buf-for-mxfp8-param-ag", *_TWO_STAGES, recipe=ONE_STAGE),
        "ValueError: .*reuse_grad_buf_for_mxfp8_param_ag is not supported: .* use mxfp8:block=32x32",
    ),
    "MXFP8Tensors of blocks on one stage": (
        _te_layers_of("mxfp8", *_MXFP8, *_TWO_STAGES, last_stage=True),
        "ValueError: rank 1: .*linear_fc1.weight: a MXFP8Tensor of 1x32 blocks needs",
    ),
    "experts in one tensor on one stage": (
        _te_layers_of("fp8_current", *_TWO_STAGES, last_stage=True, with_grouped=True),
        "ValueError: rank 1: .*experts.weight is a .* with the codes of several experts",
    ),
    "mxfp8 without TransformerEngine": (
        run_with(*_MXFP8, recipe={}),
        r"ValueError: Recipe\(.* quantizes no weight of the model, and it has none of Tr",
    ),
    "torch's fsdp": (
        run_with("--use-torch-fsdp2", "--untie-embeddings-and-output-weights", without=DISTRIBUTED),
        "ValueError: .*--use-torch-fsdp2 is not supported: .* use zerocast.fsdp2",
    ),
    "a name that is gone": (_without_a_name, "RuntimeError: .*training.training' has no attribute 'train_step'"),
    "a model that is built otherwise": (
        _built_otherwise,
        "RuntimeError: megatron.training.training.setup_model_and_optimizer has not called correct_amax_history_if_needed, "
        "get_megatron_optimizer: this megatron-core has an API that",
    ),
}


def parsed(*line: str) -> Any:
    """What the added arguments are, read from `line`."""
    with uninstalled_afterwards():
        return integration.add_arguments(argparse.ArgumentParser()).parse_args(line)
