"""Runs with the precision-aware optimizer, on the ranks of a pool."""

import dataclasses

import torch

from tests.megatron.host_on_cpu import WHY_NOT
from tests.megatron.training import Case, Run, build, build_attached, build_chunk, build_optimizer, optimizer_config
from tests.workers import error_of
from zerocast import verify
from zerocast.integrations import megatron as integration

if not WHY_NOT:
    from megatron.core.optimizer import get_megatron_optimizer


def train_experts(case: Case) -> tuple[dict[str, int], bool]:
    """Stale bytes after three steps, and what verify says."""
    with case.host():
        run, attached = build_attached(case)
        for number in range(3):
            run.step(number)
        return run.stale_bytes(), verify(attached).ok


def built_outside(case: Case) -> str:
    """What `attach` says of a model and an optimizer that Megatron built by itself."""
    with case.host():
        run = build(case)
        return error_of(lambda: integration.attach(run.optimizer, run.ddp))


def optimizer_inside(case: Case) -> dict[str, int]:
    """Stale bytes where Megatron wrapped a model by itself, and the optimizer alone was built in `quantized_params()`."""
    with case.host():
        ddp = build_chunk(case)
        with integration.quantized_params():
            run = Run(ddp, build_optimizer(case, [ddp]), case)
        integration.attach(run.optimizer, ddp)
        run.step(0)
        return run.stale_bytes()


def one_configuration(case: Case, first: bool) -> tuple[dict[str, int], bool, bool]:
    """A quantized model, and a plain one of the same OptimizerConfig that is built outside, `first` or last: stale bytes of the
    one, whether the FusedAdam of the other finds its gradients, and whether the configuration is as it was.
    """
    with case.host():
        config, plain = optimizer_config(case), dataclasses.replace(case, formats="plain")
        before = dict(vars(config))

        def built(case: Case) -> Run:
            ddp = build_chunk(case)
            return Run(ddp, get_megatron_optimizer(config, [ddp]), case)

        other = built(plain) if first else None
        with integration.quantized_params():
            run = built(case)
        integration.attach(run.optimizer, run.ddp)
        other = other or built(plain)
        run.step(0)
        other.forward_and_backward(0)
        other.optimizer.prepare_grads()
        shards = [
            shard
            for one in other.optimizer.chained_optimizers
            for group in one.optimizer.param_groups
            for shard in group["params"]
        ]
        return run.stale_bytes(), all(hasattr(shard, "decoupled_grad") for shard in shards), before == vars(config)


def half_masters() -> str:
    """What is said where masters are FP16."""
    options = {"use_precision_aware_optimizer": True, "main_params_dtype": torch.float16}
    case = dataclasses.replace(Case("fp8_current", fused_adam=True), options=options)
    with case.host():
        return error_of(lambda: build_attached(case))
