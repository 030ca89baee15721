"""pretrain() of megatron.training, called as a script calls it, on the ranks of a pool; install() before it: right bytes, and each
mistake; and the scripts of a checkout.

`python -m tests.megatron.pretraining SCRIPT FLAGS` runs a script of Megatron-LM as it is, with the recipe of `--zerocast-recipe`,
on a rank of torchrun over gloo. What megatron.training needs on the CPU besides megatron-core (`host_on_cpu.py`):

* streams, devices and random states of CUDA are the CPU's, and `pretrain` accepts that there is no GPU;
* interleaved pipeline stages free what they send while gloo still reads it, so copies are sent;
* functions that Megatron compiles run eagerly, and options have no help: both take longer than the steps of a run.
"""

import argparse
import contextlib
import functools
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocast
from tests.megatron import ranks_host
from tests.megatron.attaching import grouped
from tests.megatron.host_on_cpu import WHY_NOT as NO_CORE
from tests.megatron.host_on_cpu import cuda_on_cpu, without_modelopt
from tests.megatron.training import NARROW, Case, Run
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import installation
from zerocast.integrations.megatron.primary import weight_of

WHY_NOT = NO_CORE
try:
    with without_modelopt():
        import megatron.training.training as loop
    from megatron.core import parallel_state
    from megatron.core.datasets import utils as data_utils
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.core.tensor_parallel import random as random_states
    from megatron.core.utils import unwrap_model
    from megatron.training import arguments, get_args, get_timers, global_vars
except Exception as error:
    WHY_NOT = WHY_NOT or f"megatron.training cannot be imported: {error}"


def module_or_none(*paths: str) -> Any:
    """The first of these modules that this release has, None without any."""
    for path in paths:
        with contextlib.suppress(ImportError):
            return importlib.import_module(path)
    return None


# Where releases differ: 0.16 and 0.17 have no container of configurations, and 0.18 none of the model; 0.16 compiles kernels.
fused_kernels = module_or_none("megatron.legacy.fused_kernels")
configs = module_or_none("megatron.training.argument_utils")
tokenizers = module_or_none(
    "megatron.core.tokenizers.utils.build_tokenizer", "megatron.core.tokenizers.text.utils.build_tokenizer"
)
# Imported as a run begins, with transformers: ranks are forked with it.
module_or_none("megatron.core.tokenizers.text.models")
needs_training = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

FLAGS = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 12 --lr 3e-3 --min-lr 1e-3 --lr-decay-iters 100 --clip-grad 1.0 --bf16 "
    "--use-distributed-optimizer --transformer-impl local --mock-data --split 90,5,5 --num-workers 0 --log-interval 1 "
    "--tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 8 --attention-dropout 0 --hidden-dropout 0 "
    "--eval-iters 1 --eval-interval 2 --disable-bias-linear --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-dropout-fusion --no-bias-gelu-fusion --no-rope-fusion --no-persist-layer-norm"
)
ON_CPU = "--distributed-backend gloo --use-cpu-initialization"


@contextlib.contextmanager
def training_on_cpu() -> Iterator[None]:
    """Inside, megatron.training trains on this rank without a GPU."""

    def without_device(*args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        begin(*args, **kwargs)

    sent: list[Tensor] = []

    def send_copies(**tensors: Any) -> Any:
        for name in ("tensor_send_prev", "tensor_send_next"):
            if tensors[name] is not None:
                tensors[name] = tensors[name].clone()
                sent.append(tensors[name])
        return send(**tensors)

    send = p2p_communication._p2p_ops
    begin, found = dist.init_process_group, importlib.import_module("megatron.training.initialize")
    states = {"_get_cuda_rng_state": lambda *_, **__: torch.get_rng_state()}
    states["_set_cuda_rng_state"] = lambda state, *_, **__: torch.set_rng_state(state)
    replaced: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "Event": mock.MagicMock(),
            "device_count": lambda: 1,
            "get_device_capability": lambda *_: (9, 0),
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "manual_seed": torch.manual_seed,
            "set_device": lambda *_: None,
            "set_rng_state": lambda state, *_: torch.set_rng_state(state),
            "set_stream": lambda *_: None,
        },
        nn.Module: {"cuda": lambda self, *_: self},
        dist: {"init_process_group": without_device, "ProcessGroupNCCL": SimpleNamespace(Options=lambda **_: None)},
        random_states: states,
        p2p_communication: {"_p2p_ops": send_copies},
        arguments: {"get_device_arch_version": lambda: 9},
        loop: {"initialize_megatron": functools.partial(found.initialize_megatron, allow_no_cuda=True)},
    }
    if hasattr(configs, "ArgumentGroupFactory"):
        replaced[configs.ArgumentGroupFactory] = {"_get_field_docstrings": lambda *_: {}}
    if fused_kernels is not None:
        replaced[fused_kernels] = {"load": lambda *_: None}
    with contextlib.ExitStack() as stack:
        for owner, names in replaced.items():
            for name, value in names.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=name == "ProcessGroupNCCL"))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(cuda_on_cpu())
        yield


@dataclass
class Trained:
    """What a run of `pretrain` has left: the losses of its steps, and its model with the optimizer."""

    losses: dict[int, float] = field(default_factory=dict)
    evaluated: list[float] = field(default_factory=list)
    run: Run | None = None
    chunks: list[Run] = field(default_factory=list)


def _forward(trained: Trained, data: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    get_timers()("batch-generator", log_level=2).start()
    batch = next(data)
    get_timers()("batch-generator").stop()
    mask = batch["loss_mask"].view(-1).float()
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])

    def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        found = (output.view(-1).float() * mask).sum()
        count = mask.sum().int()
        if not model.training:
            trained.evaluated.append(float(found / count))
        return found, count, {"lm loss": torch.stack([found.detach(), count.float()])}

    return output, loss


def _datasets(samples: Any, vp_stage: Any = None) -> Any:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=tokenizers.build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()


_datasets.is_distributed = True  # type: ignore[attr-defined]


def _model(pre_process: bool = True, post_process: bool = True, config: Any = None, **kwargs: Any) -> Any:
    """The `model_provider` of a script, for releases that do not build models from the configuration."""
    args = get_args()
    from_args = (
        getattr(arguments, "core_transformer_config_from_args", None) or configs.core_transformer_config_from_args
    )
    return GPTModel(
        config or from_args(args),
        get_gpt_layer_local_spec(num_experts=args.num_experts),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process,
        post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        **kwargs,
    )


def _call(forward: Any, extra_args_provider: Any, provides_model: bool) -> None:
    """`pretrain` as the script of this release calls it, or as one that provides its model."""
    kind = ModelType.encoder_or_decoder
    if not hasattr(arguments, "parse_and_validate_args"):
        loop.pretrain(_datasets, _model, kind, forward, extra_args_provider=extra_args_provider)
        return
    args = arguments.parse_and_validate_args(extra_args_provider=extra_args_provider)
    if hasattr(configs, "gpt_config_from_args") and provides_model:
        loop.pretrain(configs.pretrain_cfg_container_from_args(args), _datasets, kind, forward, _model)
    elif hasattr(configs, "gpt_config_from_args"):
        config = configs.pretrain_cfg_container_from_args(args, configs.gpt_config_from_args(args))
        loop.pretrain(config, _datasets, kind, forward)
    else:
        loop.pretrain(configs.pretrain_cfg_container_from_args(args), _datasets, _model, kind, forward)


@contextlib.contextmanager
def _observed(trained: Trained) -> Iterator[None]:
    """Keep what steps are given and return, outside of whatever is installed."""
    step = loop.train_step

    def observed(forward_step: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(forward_step, data, model, optimizer, *args, **kwargs)
        trained.chunks = [Run(chunk, optimizer, Case()) for chunk in model]
        trained.run = trained.chunks[0]
        trained.losses[get_args().curr_iteration + 1] = float(
            next(iter(result[0].values())) if result[0] else torch.nan
        )
        return result

    with mock.patch.object(loop, "train_step", observed):
        yield


def pretrain(
    *flags: str,
    extra_args_provider: Any = None,
    without: str = "",
    provides_model: bool = False,
    after: Callable[[Trained], Any] | None = None,
) -> Any:
    """`pretrain` with these flags beside FLAGS, in this process, and what is looked at `after` it.

    With `provides_model` the script makes the model, as all did before 0.19. Megatron's globals are as before afterwards; what is
    installed stays.
    """
    trained = Trained()
    line = ["pretrain_gpt.py", *(flag for flag in (*FLAGS.split(), *ON_CPU.split(), *flags) if flag != without)]
    ranks = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": str(dist.get_rank())}
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    with contextlib.ExitStack() as stack:
        stack.enter_context(training_on_cpu())
        stack.enter_context(mock.patch.object(sys, "argv", line))
        # the host forks to write
        stack.enter_context(mock.patch.dict(vars(multiprocessing.current_process())["_config"], daemon=False))
        stack.enter_context(mock.patch.object(data_utils, "compile_helpers"))  # which are, where it was installed
        stack.callback(_forget_globals)
        stack.enter_context(mock.patch.dict(os.environ, ranks))
        stack.enter_context(_observed(trained))
        _call(functools.partial(_forward, trained), extra_args_provider, provides_model)
        return after(trained) if after else None


def _forget_globals() -> None:
    global_vars.destroy_global_vars()
    global_vars.unset_global_variables()
    destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()  # what an error has left of it, too


def main() -> None:
    """Run a script of Megatron-LM on this rank of torchrun: with a GPU, or on the CPU."""
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    integration.install()  # its recipe is in the flags
    with contextlib.nullcontext() if torch.cuda.is_available() else training_on_cpu():
        exec(compile(Path(script).read_text(), script, "exec"), {"__name__": "__main__", "__file__": script})


if __name__ == "__main__":
    main()


RECIPE = {"*.linear_fc1.weight": "fp8_block", "*.linear_*.weight": NARROW}
FLAG = ("--zerocast-recipe", *(f"{pattern}={fmt}" for pattern, fmt in RECIPE.items()))
_MXFP8 = ("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8", "--fp8-param-gather")
_TWO_STAGES = ("--num-layers", "2", "--pipeline-model-parallel-size", "2")
ONE_STAGE = {"decoder.layers.1.mlp.*.weight": NARROW}  # settings are checked on the other one too
DISTRIBUTED = "--use-distributed-optimizer"


@contextlib.contextmanager
def uninstalled_afterwards() -> Iterator[None]:
    """Uninstall, when the context closes, all that was installed while it was open."""
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
                        made = ranks_host.TELinear(*reversed(value.shape))
                        made.weight = ranks_host.te_parameter(fmt, value, value.device)
                        setattr(layer.mlp, name, made)
                    if with_grouped:
                        layer.mlp.experts = torch.nn.Module()
                        layer.mlp.experts.weight = torch.nn.Parameter(grouped("nvfp4"))
            return original(chunks, *args, **kwargs)

        return call

    name = "correct_amax_history_if_needed"
    with contextlib.ExitStack() as stack:
        stack.enter_context(ranks_host.te_in_the_host())
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
