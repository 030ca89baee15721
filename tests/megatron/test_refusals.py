"""What Megatron can and zerocast cannot is refused in the real host, and the error says what to do. Where model, wrapper and
optimizer are built: test_unattached.py.
"""

import re
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zerocast
from tests.megatron import training
from tests.megatron.host_on_cpu import KNOWS_FOUR_BITS, WHY_NOT, needs_megatron
from tests.megatron.ranks_host import host
from tests.megatron.training import FORMATS, Case, build, build_attached, build_chunk, build_optimizer, save_checkpoint
from tests.workers import error_of, on_ranks
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import validate

if not WHY_NOT:
    import megatron.core.distributed as wrappers
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
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


def nested_blocks() -> None:
    with integration.quantized_params():
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
    save_checkpoint(run, folder, "dp_reshardable")
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


def cast_by_another_method() -> None:
    """A step of a Megatron that copies masters by a method of another name."""
    with mock.patch.object(DistributedOptimizer, "step_with_ready_grads", return_value=True):
        run, _ = build_attached(Case("fp8_current"))
        run.step(0)


NEVER_SHARDED = "ValueError: use_megatron_fsdp is not supported: .* use zerocast.fsdp2"
WHOLE = "ValueError: .*use_distributed_optimizer=False is not supported: .* set it in DistributedDataParallelConfig and in Opt"
OTHERS = "ValueError: optimizer=.* is not supported without use_layer_wise_distributed_optimizer=True"
SGD = "ValueError: optimizer='sgd' is not supported: .* only at the first checkpoint: use optimizer='adam'"
NO_LAYOUT = (
    "ValueError: .* is in no bucket of whole matrices: .* call tag_params_for_buffer_routing.* or use optimizer='adam'"
)
BLOCK = (
    "RuntimeError: QuantizedWeight.* call quantize_, then build DistributedDataParallel and the optimizer, both inside"
)
AS_IT_IS = (
    "RuntimeError: QuantizedWeight.* call zerocast.integrations.megatron.dequantize_ on the sharded state dict before"
)
# By name, what happens, and the error.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "whole masters": (_options(use_distributed_optimizer=False), WHOLE),
    "whole masters in DDP": (_options(ddp={"use_distributed_optimizer": False}), WHOLE),
    "masters in half precision": (
        _options(optimizer_cpu_offload=True, use_precision_aware_optimizer=True, main_params_dtype=torch.float16),
        "ValueError: main_params_dtype is not supported: .* leave it at torch.float32",
    ),
    "sgd": (_options(optimizer="sgd"), SGD),
    "sgd on the host": (_options(optimizer="sgd", optimizer_cpu_offload=True, optimizer_offload_fraction=1.0), SGD),
    "mxfp8 through gradients": (
        _options(reuse_grad_buf_for_mxfp8_param_ag=True),
        "ValueError: reuse_grad_buf_for_mxfp8_param_ag is not supported: .* use mxfp8:block=32x32",
    ),
    "mxfp8 through gradients in DDP": (
        _options(ddp={"reuse_grad_buf_for_mxfp8_param_ag": True, "fp8_param_gather": True}),
        "ValueError: reuse_grad_buf_for_mxfp8_param_ag is not .* use mxfp8:block=32x32",
    ),
    "fsdp in DDP": (_options(ddp={"use_megatron_fsdp": True}), NEVER_SHARDED),
    "fsdp": (_wrapped_by("FullyShardedDataParallel"), NEVER_SHARDED),
    "torch's fsdp": (_wrapped_by("TorchFullyShardedDataParallel"), NEVER_SHARDED),
    "muon": (_options(optimizer="muon"), OTHERS),
    "dist_muon": (_options(optimizer="dist_muon"), NO_LAYOUT),
    "lion beside muon": (
        _options(optimizer="dist_muon", muon_scalar_optimizer="lion"),
        "ValueError: muon_scalar_optimizer='lion' is not supported: use 'adam'",
    ),
    "layer-wise by hand": (_by_hand("layer-wise"), NO_LAYOUT),
    "whole masters by hand": (_by_hand("whole masters"), WHOLE),
    "no masters by hand": (_by_hand("no masters"), WHOLE),
    "mxfp8": (_in_a_format("mxfp8"), "ValueError: .* mxfp8 needs both directions gathered.* use mxfp8:block=32x32"),
    "nested blocks": (nested_blocks, BLOCK),
    "quantized after DDP": (quantized_after_ddp, BLOCK),
    "quantized after the optimizer": (
        quantized_after_the_optimizer,
        "ValueError: .* is quantized and in no bucket .* call quantize_ before Distributed",
    ),
    "cast by another method": (
        cast_by_another_method,
        "RuntimeError: an attachment to Megatron-Core: an optimizer step returned without a cast of its masters",
    ),
    "saved as it is": (saved_as_it_is, AS_IT_IS),
    "loaded as it is": (loaded_as_it_is, AS_IT_IS),
}

SINCE_0_18 = pytest.mark.skipif(
    not KNOWS_FOUR_BITS,
    reason="0.16 and 0.17 refuse this without TransformerEngine or emerging_optimizers, or know other arguments",
)
BUILT_SINCE_0_18 = ("masters in half precision", "muon", "dist_muon", "lion beside muon", "layer-wise by hand")


pytestmark = needs_megatron


@on_ranks(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SINCE_0_18 if name in BUILT_SINCE_0_18 else ()) for name in CASES]
)
@pytest.mark.notices(
    "`dist_checkpointing.save` or `load` without `dequantize_`", where="Megatron", answer="raises on all ranks"
)
def test_refused_in_the_real_host_with_what_to_do(name: str) -> None:
    mistake, message = CASES[name]
    with host():
        said = error_of(mistake)
    assert re.match(message, said), said


def test_every_setting_is_in_the_table() -> None:
    for setting, *_ in validate.SETTINGS:
        assert any(f"ValueError: {setting} " in message for _, message in CASES.values()), setting
