"""Mistakes and unsupported settings are errors that say what was found, on every rank; the host comes back as it was."""

import importlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.megatron import attaching, training
from tests.megatron.attaching import methods_of, offloaded
from tests.megatron.host_on_cpu import needs_four_bits, needs_megatron
from tests.megatron.ranks_host import host
from tests.megatron.training import ALL_LAYERS, MIXED, Case, MegatronModule, Run, build
from tests.transformer_engine.host_on_cpu import needs_te
from tests.workers import Ranks, error_of, on_ranks
from zerocast import CastPlan, QuantizedWeight, ZeroAdamW
from zerocast.cast import host as cast_host
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats import Columnwise
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import checkpoint, quantized_params
from zerocast.integrations.megatron import host as megatron_names


def _built(case: Case) -> Run:
    with integration.quantized_params():
        return build(case)


def _attach(run: Run) -> Any:
    return integration.attach(run.optimizer, run.ddp)


def _own(run: Run) -> Any:
    return run.optimizer.chained_optimizers[0]


@on_ranks(2)
@pytest.mark.notices(
    "two owners of the same weights: an attachment and a ZeroAdamW or a plan", where="Megatron", answer="raises"
)
@host()
def test_weights_have_one_owner() -> None:
    run = _built(Case())
    attached = _attach(run)
    owned = "an attachment to Megatron-Core writes weights that a ZeroAdamW is built over"
    with pytest.raises(RuntimeError, match=owned):
        ZeroAdamW(run.ddp.named_parameters())
    attached.detach()
    weights = [p for p in run.ddp.parameters() if isinstance(p, QuantizedWeight)]
    masters = [nn.Parameter(torch.zeros(w.numel())) for w in weights]
    plan = CastPlan(weights, masters, [0] * len(weights), ONE_PROCESS)
    optimizer = torch.optim.SGD(masters)
    handle = plan.attach(optimizer)  # what detach has freed
    with pytest.raises(ValueError, match="a CastPlan that is attached to SGD writes weights of this CastPlan"):
        _attach(run)
    handle.remove()
    _attach(run)


class Experts(MegatronModule):
    """Experts side by side in one weight, where GroupedMLP of megatron-core 0.16 has them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_local_experts = 4
        self.weight1 = nn.Parameter(torch.zeros(64, 4 * 32, dtype=torch.bfloat16))


@on_ranks(2)
def test_a_host_without_buffers_of_four_bits_is_named() -> None:
    older = mock.patch.object(megatron_names, "has_four_bit_buffers", return_value=False)
    with host(), older, pytest.raises(RuntimeError, match=r"its buffers cannot hold two elements per byte"):
        _built(Case("nvfp4"))


TE_TENSORS, TILES = (Case(formats, te=ALL_LAYERS) for formats in ("te", "tiles"))
NEEDS_TE = [needs_four_bits, needs_te]


@pytest.mark.parametrize("case", [Case(MIXED, overlap=True), pytest.param(TE_TENSORS, marks=NEEDS_TE)])
def test_detach_gives_the_host_back(ranks: Ranks, case: Case) -> None:
    ranks(2)(attaching.detach, case)


@pytest.mark.parametrize(
    ("case", "with_state"),
    [
        (offloaded(), False),
        (offloaded(), True),
        pytest.param(TE_TENSORS, False, marks=NEEDS_TE),
        pytest.param(TILES, False, marks=NEEDS_TE),
    ],
)
def test_masters_of_a_finetuning_run(ranks: Ranks, case: Case, with_state: bool) -> None:
    ranks(2)(training.finetune, case, with_state)


@on_ranks(2)
@host()
def test_an_attachment_that_fails_half_way_leaves_nothing() -> None:
    """The plan of the second optimizer fails, or what replaces methods does."""
    run = _built(Case(MIXED, experts=True))
    owners = [run.optimizer, *run.optimizer.chained_optimizers, *run.ddp.bucket_groups, run.ddp.module]
    before = [methods_of(owner) for owner in owners]
    plans = [cast_host.CastPlan([], [], []), ValueError("no")]
    for failing, error in (
        (mock.patch.object(cast_host, "CastPlan", side_effect=plans), "ValueError: rank 0: no"),
        (mock.patch.object(checkpoint, "refusing_quantized", side_effect=ValueError("no")), "ValueError: no"),
    ):
        with failing:
            assert error_of(lambda: _attach(run)) == error
        assert [methods_of(owner) for owner in owners] == before


@on_ranks(2)
@host()
def test_a_forced_sync_leaves_nothing_stale() -> None:
    """With overlap it comes between the step and the next forward pass."""
    run = _built(Case(MIXED, overlap=True))
    _attach(run)
    run.step(0)
    copied = [w.state for w in run.weights.values() if w.format.columnwise is Columnwise.TRANSPOSE]
    assert copied and not any(state.columnwise_is_fresh() for state in copied)
    run.force_sync()
    assert not run.stale_bytes()
    run.step(1)
    for group in run.ddp.bucket_groups:
        group.start_param_sync()  # in flight
    read = {name: weight.rowwise_data.clone() for name, weight in run.weights.items()}
    assert all(torch.equal(data, run.weights[name].rowwise_data) for name, data in read.items())
    run.force_sync()
    assert all(torch.equal(data, run.weights[name].rowwise_data) for name, data in read.items())
    assert not run.stale_bytes()


pytestmark = needs_megatron


def _everything() -> dict[str, Any]:
    found = {}
    for path in (getattr(megatron_names, name) for name in ("FP8", "FP4", "BUFFER", "DDP", "OPTIMIZER")):
        module = importlib.import_module(path)
        found |= {f"{path}.{name}": value for name, value in vars(module).items()}
        for kind in (value for value in vars(module).values() if isinstance(value, type)):
            found |= {f"{path}.{kind.__name__}.{name}": value for name, value in vars(kind).items()}
    return found


def _changed(before: dict[str, Any]) -> set[str]:
    after = _everything()
    return {name for name in {**before, **after} if before.get(name, before) is not after.get(name, after)}


def test_nothing_stays_patched_after_quantized_params() -> None:
    before = _everything()
    with quantized_params():
        assert _changed(before)
    assert not _changed(before)
    with pytest.raises(ZeroDivisionError), quantized_params():
        raise ZeroDivisionError
    assert not _changed(before)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (megatron_names.FP8, "_modify_underlying_storage_impl"),
        (megatron_names.FP8, "HAVE_TE_FP8_TENSOR_CLASS"),
        pytest.param(megatron_names.OPTIMIZER, "group_params_for_buffers", marks=needs_four_bits),
    ],
)
def test_a_host_without_a_seam_is_named(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    before = _everything()
    monkeypatch.delattr(importlib.import_module(module), name)
    said = f"{module}' has no attribute '{name}': this megatron-core has an API that"
    with pytest.raises(RuntimeError, match=said), quantized_params():
        pass
    monkeypatch.undo()
    assert not _changed(before)


def test_a_host_without_a_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_names, "FP4", "megatron.core.fp2_utils")
    with pytest.raises(RuntimeError, match=r"looked for megatron.core.fp2_utils"), quantized_params():
        pass


def _stepped_on_rank_1(run: Run) -> None:
    if dist.get_rank() == 1:
        main = _own(run).optimizer.param_groups[0]["params"][0]
        _own(run).optimizer.state[main]["step"] = torch.ones(())


class LayerWiseOptimizer:
    """An optimizer of a release that zerocast does not know."""

    chained_optimizers: tuple[()] = ()


def _add_a_tensor_of_others(run: Run) -> None:
    buffer = next(b for b in _own(run).buffers if b.param_dtype == torch.uint8)
    buffer.params.append(nn.Parameter(torch.zeros(2)))


def _without_a_master_on_rank_1(run: Run) -> None:
    for params, masters in zip(_own(run).model_float16_groups, _own(run).shard_fp32_from_float16_groups, strict=True):
        for index in [i for i, param in enumerate(params) if isinstance(param, QuantizedWeight)][: dist.get_rank()]:
            del params[index], masters[index]


# What happens to a run before it is attached, and the error.
REFUSED: dict[str, tuple[Callable[[Run], object], str]] = {
    "attached already": (_attach, "RuntimeError: .* is attached already"),
    "stepped on one rank": (_stepped_on_rank_1, "RuntimeError: rank 1: the optimizer has stepped"),
    "fsdp": (
        lambda run: setattr(_own(run).ddp_config, "use_megatron_fsdp", True),
        "ValueError: use_megatron_fsdp",
    ),
    "half masters": (
        lambda run: setattr(_own(run).config, "main_params_dtype", torch.float16),
        "ValueError: main_params_dtype",
    ),
    "layer-wise": (
        lambda run: run.optimizer.chained_optimizers.append(LayerWiseOptimizer()),
        "ValueError: LayerWiseOptimizer is not supported",
    ),
    "not distributed": (
        lambda run: setattr(run.optimizer, "chained_optimizers", [SimpleNamespace()]),
        "RuntimeError: .*SimpleNamespace' object has no attribute .*: this megatron-core has an API that",
    ),
    "another shape of optimizer": (
        lambda run: delattr(_own(run), "model_float16_groups"),
        "RuntimeError: 'DistributedOptimizer' object has no attribute 'model_float16_groups': this megatron-core has",
    ),
    "another shape of chunk": (
        lambda run: setattr(run, "ddp", nn.Linear(2, 2)),
        "RuntimeError: 'Linear' object has no attribute 'bucket_groups': this megatron-core has an API that",
    ),
    "a master is missing": (_without_a_master_on_rank_1, r"ValueError: no rank .* elements of .*: build the"),
    "a tensor of others": (_add_a_tensor_of_others, "TypeError: .* is in a byte buffer and is a Parameter"),
}


@on_ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    change, message = REFUSED[name]
    with host():
        run = _built(Case())
        change(run)
        said = error_of(lambda: _attach(run))
    assert re.match(message, said), said


@on_ranks(2)
def test_grouped_experts_are_refused() -> None:
    grouped = mock.patch.object(training, "Model", lambda config, *_: Experts(config))
    said = r"module.weight1 holds 4 experts side by side.* set moe_grouped_gemm=False"
    with host(), grouped, pytest.raises(ValueError, match=said):
        _attach(_built(Case("experts")))
