"""Mistakes and unsupported settings are errors that say what was found, on every rank; the host comes back as it was."""

import importlib
import re
from typing import Any

import pytest

from tests.megatron import attaching
from tests.megatron.host_on_cpu import needs_four_bits, needs_megatron
from tests.workers import Ranks
from zerocast.integrations.megatron import host, quantized_params

pytestmark = needs_megatron


def _everything() -> dict[str, Any]:
    found = {}
    for path in (host.FP8, host.FP4, host.BUFFER, host.DDP, host.OPTIMIZER):
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


def test_a_host_without_a_seam_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _everything()
    monkeypatch.delattr(importlib.import_module(host.FP8), "_modify_underlying_storage_impl")
    with pytest.raises(RuntimeError, match=r"fp8_utils has no _modify_underlying_storage_impl"), quantized_params():
        pass
    monkeypatch.undo()
    assert not _changed(before)


@needs_four_bits
@pytest.mark.parametrize("module", [host.BUFFER, host.OPTIMIZER])
def test_a_host_with_a_part_of_a_seam_is_named(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    before = _everything()
    monkeypatch.delattr(importlib.import_module(module), "group_params_for_buffers")
    with (
        pytest.raises(RuntimeError, match=f"looked for {module}.group_params_for_buffers: this megatron-core has"),
        quantized_params(),
    ):
        pass
    monkeypatch.undo()
    assert not _changed(before)


def test_a_host_without_buffers_of_four_bits_is_named(ranks: Ranks) -> None:
    for said in ranks(2)(attaching.without_four_bits):
        assert "its buffers cannot hold two elements per byte; those of 0.19 can" in said


def test_a_host_without_a_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "FP4", "megatron.core.fp2_utils")
    with pytest.raises(RuntimeError, match=r"looked for megatron.core.fp2_utils"), quantized_params():
        pass


@pytest.mark.parametrize(
    ("case", "arguments", "message"),
    [
        (attaching.twice, (), "RuntimeError: .* is attached already"),
        (attaching.after_a_step, (), "RuntimeError: rank 0: the optimizer has stepped"),
        (attaching.after_a_step, (1,), "RuntimeError: rank 1: the optimizer has stepped"),
        (attaching.with_setting, ("ddp_config", "use_megatron_fsdp"), "ValueError: use_megatron_fsdp"),
        (attaching.with_setting, ("config", "main_params_dtype"), "ValueError: main_params_dtype"),
        (attaching.with_setting, ("ddp_config", "reuse_grad_buf_for_mxfp8_param_ag"), "ValueError: reuse_grad_buf"),
        (attaching.layer_wise, (), "ValueError: LayerWiseOptimizer is not supported"),
        (attaching.not_distributed, (), "RuntimeError: the optimizer, a SimpleNamespace, has no _copy_main_params"),
        (attaching.of_another_model, (), "ValueError: no optimizer that was given owns the quantized weights"),
        (attaching.with_a_tensor_of_others, (), "TypeError: .* is in a byte buffer and is a Parameter"),
        (
            attaching.with_grouped_experts,
            (),
            "ValueError: module.weight1 holds 4 experts side by side, .* set moe_grouped_gemm=False",
        ),
        (attaching.in_a_format, ("mxfp8",), "ValueError: .* mxfp8 needs both directions gathered"),
        (attaching.built_outside, (), "RuntimeError: cannot set the data of QuantizedWeight"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else getattr(value, "__name__", ""),
)
def test_refused_with_the_reason(ranks: Ranks, case: Any, arguments: tuple[Any, ...], message: str) -> None:
    for said in ranks(2)(case, *arguments):
        assert re.match(message, said), said


@pytest.mark.notices(
    "two owners of the same weights: an attachment and a ZeroAdamW or a plan", where="Megatron", answer="raises"
)
def test_weights_have_one_owner(ranks: Ranks) -> None:
    for zero, again in ranks(2)(attaching.owned_twice):
        assert "an attachment to Megatron-Core writes weights that a ZeroAdamW is built over" in zero
        assert "a CastPlan that is attached to SGD writes weights of this CastPlan" in again


def test_an_optimizer_or_a_chunk_of_another_shape_is_named(ranks: Ranks) -> None:
    for optimizer, chunk in ranks(2)(attaching.of_another_shape):
        assert "DistributedOptimizer, has no model_float16_groups" in optimizer
        assert "Linear, has no bucket_groups" in chunk


def test_detach_gives_the_host_back(ranks: Ranks) -> None:
    assert ranks(2)(attaching.left_behind) == [[], []]


def test_an_attachment_that_fails_half_way_leaves_nothing(ranks: Ranks) -> None:
    assert ranks(2)(attaching.interrupted) == [[("ValueError: rank 0: no", False), ("ValueError: no", False)]] * 2


def test_a_forced_sync_leaves_nothing_stale(ranks: Ranks) -> None:
    for found in ranks(2)(attaching.forced_sync):
        assert found.stale and all(found.stale)
        assert not found.first and not found.second
        assert all(found.same.values())


def test_masters_written_by_hand_are_cast_by_refresh(ranks: Ranks) -> None:
    assert ranks(2)(attaching.masters_by_hand) == [{}, {}]
