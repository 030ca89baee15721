"""What `attach`, `detach` and `quantized_params` say and leave behind, on the ranks of a pool."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.megatron import training
from tests.megatron.ranks_host import host
from tests.megatron.training import MIXED, Case, MegatronModule, Run, build
from tests.workers import error_of
from zerocast import CastPlan, QuantizedWeight, ZeroAdamW
from zerocast.cast import host as cast_host
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats import Columnwise
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import attachment
from zerocast.integrations.megatron import host as seams
from zerocast.integrations.megatron.unattached import RefusedMethod


def _built(case: Case) -> Run:
    with integration.quantized_params():
        return build(case)


def _attach(run: Run) -> Any:
    return integration.attach(run.optimizer, run.ddp)


def _own(run: Run) -> Any:
    return run.optimizer.chained_optimizers[0]


def twice() -> str:
    with host():
        run = _built(Case())
        _attach(run)
        return error_of(lambda: _attach(run))


def owned_twice() -> tuple[str, str]:
    """A ZeroAdamW over attached weights; then an attachment over those of a plan that is attached to something else."""
    with host():
        run = _built(Case())
        attached = _attach(run)
        zero = error_of(lambda: ZeroAdamW(run.ddp.named_parameters()))
        attached.detach()
        weights = [p for p in run.ddp.parameters() if isinstance(p, QuantizedWeight)]
        masters = [nn.Parameter(torch.zeros(w.numel())) for w in weights]
        plan = CastPlan(weights, masters, [0] * len(weights), ONE_PROCESS)
        optimizer = torch.optim.SGD(masters)
        handle = plan.attach(optimizer)  # what detach has freed
        again = error_of(lambda: _attach(run))
        handle.remove()
        _attach(run)
        return zero, again


def after_a_step(only_on: int | None = None) -> str:
    """`only_on` one rank: the others hear of it."""
    with host():
        run = _built(Case())
        if only_on in (None, dist.get_rank()):
            main = _own(run).optimizer.param_groups[0]["params"][0]
            _own(run).optimizer.state[main]["step"] = torch.ones(())
        return error_of(lambda: _attach(run))


def with_setting(of: str, name: str) -> str:
    with host():
        run = _built(Case())
        setattr(getattr(_own(run), of), name, True)
        return error_of(lambda: _attach(run))


def layer_wise() -> str:
    class LayerWiseOptimizer:
        chained_optimizers: tuple[()] = ()

    with host():
        run = _built(Case())
        run.optimizer.chained_optimizers.append(LayerWiseOptimizer())
        return error_of(lambda: _attach(run))


def of_another_shape() -> tuple[str, str]:
    with host():
        run = _built(Case())
        del _own(run).model_float16_groups
        optimizer = error_of(lambda: _attach(run))
        chunk = error_of(lambda: integration.attach(_built(Case()).optimizer, nn.Linear(2, 2)))
        return optimizer, chunk


def not_distributed() -> str:
    with host():
        run = _built(Case())
        run.optimizer.chained_optimizers = [SimpleNamespace()]
        return error_of(lambda: _attach(run))


def of_another_model() -> str:
    with host():
        ours, theirs = _built(Case()), _built(Case())
        return error_of(lambda: integration.attach(ours.optimizer, [ours.ddp, theirs.ddp]))


def with_a_tensor_of_others() -> str:
    with host():
        run = _built(Case())
        buffer = next(b for b in _own(run).buffers if b.param_dtype == torch.uint8)
        buffer.params.append(nn.Parameter(torch.zeros(2)))
        return error_of(lambda: _attach(run))


class Experts(MegatronModule):
    """As GroupedMLP of megatron-core 0.16 keeps them: side by side in one weight."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_local_experts = 4
        self.weight1 = nn.Parameter(torch.zeros(64, 4 * 32, dtype=torch.bfloat16))


def with_grouped_experts() -> str:
    with host(), mock.patch.object(training, "Model", lambda config, *_: Experts(config)):
        return error_of(lambda: _attach(_built(Case("experts"))))


def in_a_format(fmt: str) -> str:
    with host():
        return error_of(lambda: _built(Case(fmt)))


def without_four_bits() -> str:
    """An nvfp4 weight in a megatron-core that has FP8 buffers only, or as if this one had."""
    with host(), mock.patch.object(seams, "has_four_bit_buffers", return_value=False):
        return error_of(lambda: _built(Case("nvfp4")))


def built_outside() -> str:
    with host():
        return error_of(lambda: build(Case()))


def left_behind() -> list[str]:
    """What differs after attaching, training and detaching from before: methods of the host, and what stands in their place."""
    with host():
        run = _built(Case(MIXED, overlap=True))
        owners = [_own(run), *run.ddp.bucket_groups, *run.ddp.expert_parallel_bucket_groups]
        before = [_methods(owner) for owner in owners]
        hooks = [len(module._load_state_dict_pre_hooks) for module in run.ddp.modules()]
        attached = _attach(run)
        run.step(0)
        attached.detach()
        changed = [
            str(old ^ _methods(owner)) for old, owner in zip(before, owners, strict=True) if old != _methods(owner)
        ]
        if hooks != [len(module._load_state_dict_pre_hooks) for module in run.ddp.modules()]:
            changed.append("hooks")
        return changed + [error for error in (error_of(lambda: _attach(run)),) if error]


def _methods(owner: Any) -> set[tuple[str, Any]]:
    """What is replaced on an instance; what refuses there is a new object after each attachment."""
    held = [(name, value) for name, value in vars(owner).items() if callable(value)]
    return {(name, RefusedMethod if isinstance(value, RefusedMethod) else id(value)) for name, value in held}


def interrupted() -> list[tuple[str, bool]]:
    """Where the plan of the second optimizer fails, and where methods were replaced: the error, and whether any still are."""
    with host():
        run = _built(Case(MIXED, experts=True))
        owners = [run.optimizer, *run.optimizer.chained_optimizers, *run.ddp.bucket_groups, run.ddp.module]
        before, found = [_methods(owner) for owner in owners], []
        plans = [cast_host.CastPlan([], [], []), ValueError("no")]
        for failing in (
            mock.patch.object(cast_host, "CastPlan", side_effect=plans),
            mock.patch.object(attachment, "refusing_quantized", side_effect=ValueError("no")),
        ):
            with failing:
                said = error_of(lambda: _attach(run))
            found.append((said, [_methods(owner) for owner in owners] != before))
        return found


def forced_sync() -> SimpleNamespace:
    """With overlap, between the step and the next forward pass."""
    with host():
        run = _built(Case(MIXED, overlap=True))
        _attach(run)
        run.step(0)
        copied = [w.state for w in run.weights.values() if w.format.columnwise is Columnwise.TRANSPOSE]
        stale = [not state.columnwise_is_fresh() for state in copied]
        run.force_sync()
        first = run.stale_bytes()
        run.step(1)
        for group in run.ddp.bucket_groups:
            group.start_param_sync()  # in flight
        read = {name: weight.rowwise_data.clone() for name, weight in run.weights.items()}
        same = {name: torch.equal(data, run.weights[name].rowwise_data) for name, data in read.items()}
        run.force_sync()
        same |= {name: torch.equal(data, run.weights[name].rowwise_data) for name, data in read.items()}
        return SimpleNamespace(stale=stale, first=first, second=run.stale_bytes(), same=same)


def masters_by_hand() -> dict[str, int]:
    """After masters were written by hand."""
    with host():
        run = _built(Case(MIXED))
        attached = _attach(run)
        run.step(0)
        for group in _own(run).shard_fp32_from_float16_groups:
            for master in group:
                master.mul_(1.5)
        assert run.stale_bytes()
        attached.refresh()
        return run.stale_bytes()
