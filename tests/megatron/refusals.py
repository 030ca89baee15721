"""Settings and orders that are refused, each built in the real host as a user would, on the ranks of a pool."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import zerocast
from tests.megatron import training
from tests.megatron.checkpoints import save
from tests.megatron.host_on_cpu import WHY_NOT
from tests.megatron.ranks_host import host
from tests.megatron.training import FORMATS, Case, build, build_attached, build_chunk, build_optimizer
from tests.workers import error_of
from zerocast.integrations import megatron as integration

if not WHY_NOT:
    import megatron.core.distributed as wrappers
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection


def _options(ddp: dict[str, Any] | None = None, **options: Any) -> Callable[[], Any]:
    """A run with these settings, attached and stepped."""

    def run() -> None:
        with integration.quantized_params():
            built = build(Case("fp8_current", options=options, ddp_options=ddp or {}))
        integration.attach(built.optimizer, built.ddp)
        built.step(0)

    return run


def _wrapped_by(name: str) -> Callable[[], Any]:
    def run() -> None:
        config = training.configuration()
        model = training.Model(config)
        zerocast.quantize_(model, zerocast.Recipe(FORMATS["fp8_current"]))
        with integration.quantized_params():
            getattr(wrappers, name)(config=config, ddp_config=DistributedDataParallelConfig(), module=model)

    return run


def _in_a_format(fmt: str) -> Callable[[], Any]:
    def run() -> None:
        with integration.quantized_params():
            build(Case(fmt))

    return run


def two_blocks() -> None:
    with integration.quantized_params():
        ddp = build_chunk(Case("fp8_current"))
    with integration.quantized_params():
        build_optimizer(Case(), [ddp])


def nested_blocks() -> None:
    with integration.quantized_params():
        with integration.quantized_params():
            ddp = build_chunk(Case("fp8_current"))
        build_optimizer(Case(), [ddp])


def without_a_block() -> None:
    build(Case("fp8_current"))


def optimizer_without_a_block() -> None:
    with integration.quantized_params():
        ddp = build_chunk(Case("fp8_current"))
    build_optimizer(Case(), [ddp])


def quantized_after_ddp() -> None:
    with integration.quantized_params():
        ddp = build_chunk(Case("plain"))
        zerocast.quantize_(ddp, zerocast.Recipe(FORMATS["fp8_current"]))
        build_optimizer(Case(), [ddp])


def quantized_after_the_optimizer() -> None:
    with integration.quantized_params():
        run = build(Case("plain"))
    zerocast.quantize_(run.ddp, zerocast.Recipe(FORMATS["fp8_current"]))
    integration.attach(run.optimizer, run.ddp)


def _by_hand(kind: str) -> Callable[[], Any]:
    """An optimizer of the host's that is made without its factory."""

    def run() -> None:
        with integration.quantized_params():
            ddp = build_chunk(Case("fp8_current"))
            config = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True)
            inner = torch.optim.AdamW([{"params": list(ddp.parameters()), "is_expert_parallel": False}])
            if kind == "layer-wise":
                groups = ProcessGroupCollection.use_mpu_process_groups()
                LayerWiseDistributedOptimizer([inner], config, groups, init_state_fn_list=[None], model_chunks=[ddp])
            elif kind == "whole masters":
                Float16OptimizerWithFloat16Params(inner, config, None, None)
            else:
                FP32Optimizer(inner, config, None)

    return run


def saved_as_it_is() -> None:
    dist_checkpointing.save({"model": _attached().ddp.module.sharded_state_dict()}, _folder())


def loaded_as_it_is() -> None:
    folder, run = _folder(), _attached()
    save(run, folder, "dp_reshardable")
    dist_checkpointing.load({"model": run.ddp.sharded_state_dict()}, folder)


def _folder() -> str:
    """An empty one, the same on every rank."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    return made[0]


def _attached() -> Any:
    run, _ = build_attached(Case("fp8_current"))
    run.step(0)
    return run


CASES: dict[str, Callable[[], Any]] = {
    "whole masters": _options(use_distributed_optimizer=False),
    "whole masters in DDP": _options(ddp={"use_distributed_optimizer": False}),
    "whole masters in both": _options(ddp={"use_distributed_optimizer": False}, use_distributed_optimizer=False),
    "masters in half precision": _options(
        optimizer_cpu_offload=True, use_precision_aware_optimizer=True, main_params_dtype=torch.float16
    ),
    "sgd": _options(optimizer="sgd"),
    "sgd on the host": _options(optimizer="sgd", optimizer_cpu_offload=True, optimizer_offload_fraction=1.0),
    "mxfp8 through gradients": _options(reuse_grad_buf_for_mxfp8_param_ag=True),
    "mxfp8 through gradients in DDP": _options(
        ddp={"reuse_grad_buf_for_mxfp8_param_ag": True, "fp8_param_gather": True}
    ),
    "fsdp in DDP": _options(ddp={"use_megatron_fsdp": True}),
    "fsdp": _wrapped_by("FullyShardedDataParallel"),
    "torch's fsdp": _wrapped_by("TorchFullyShardedDataParallel"),
    "muon": _options(optimizer="muon"),
    "dist_muon": _options(optimizer="dist_muon"),
    "lion": _options(optimizer="lion"),
    "lion beside muon": _options(optimizer="dist_muon", muon_scalar_optimizer="lion"),
    "layer-wise by hand": _by_hand("layer-wise"),
    "whole masters by hand": _by_hand("whole masters"),
    "no masters by hand": _by_hand("no masters"),
    "mxfp8": _in_a_format("mxfp8"),
    "two blocks": two_blocks,
    "nested blocks": nested_blocks,
    "no block": without_a_block,
    "no block around the optimizer": optimizer_without_a_block,
    "quantized after DDP": quantized_after_ddp,
    "quantized after the optimizer": quantized_after_the_optimizer,
    "saved as it is": saved_as_it_is,
    "loaded as it is": loaded_as_it_is,
}

BUILT_SINCE_0_18 = ("masters in half precision", "muon", "dist_muon", "lion", "lion beside muon", "layer-wise by hand")


def say(name: str) -> str:
    """The message that a case raises."""
    with host():
        return error_of(CASES[name])
