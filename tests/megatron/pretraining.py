"""pretrain() of megatron.training, called as a script calls it, on the ranks of a pool; and the scripts of a checkout.

`python -m tests.megatron.pretraining SCRIPT FLAGS` runs a script of Megatron-LM as it is, with the recipe of `--zerocast-recipe`,
on a rank of torchrun over gloo. What megatron.training needs on the CPU besides megatron-core (`host_on_cpu.py`):

* streams, devices and random states of CUDA are the CPU's, and `pretrain` accepts that there is no GPU;
* interleaved pipeline stages free what they send while gloo still reads it, so copies are sent;
* functions that Megatron compiles run eagerly, and options have no help: both take longer than the steps of a run.
"""

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

from tests.megatron.host_on_cpu import WHY_NOT as NO_CORE
from tests.megatron.host_on_cpu import cuda_on_cpu, without_modelopt
from tests.megatron.training import Case, Run
from zerocast.integrations import megatron as integration

WHY_NOT = NO_CORE
try:
    with without_modelopt():
        import megatron.training.training as loop
    from megatron.core.datasets import utils as data_utils
    from megatron.core.tensor_parallel import random as random_states
except Exception as error:
    WHY_NOT = WHY_NOT or f"megatron.training cannot be imported: {error}"
try:  # what a script has of Megatron's
    from megatron.core import parallel_state
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
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
