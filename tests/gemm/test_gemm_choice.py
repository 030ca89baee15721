"""Which GEMM path runs and why not another, on any device, decided on any machine."""

import contextlib
import logging
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.gemm.test_gemm import cast
from zerocast import QuantizedWeight, Recipe, backends, gemm, get_format, quantize_
from zerocast.gemm import blackwell, choice

H200 = {"device": "cuda", "capability": (9, 0), "cuda": (13, 0)}
B200 = {"device": "cuda", "capability": (10, 0), "cuda": (13, 0)}
B300 = {"device": "cuda", "capability": (10, 3), "cuda": (13, 0)}
THOR = {"device": "cuda", "capability": (11, 0), "cuda": (13, 0)}
GEFORCE = {"device": "cuda", "capability": (12, 0), "cuda": (13, 0)}
A100 = {"device": "cuda", "capability": (8, 0), "cuda": (13, 0)}
L40 = {"device": "cuda", "capability": (8, 9), "cuda": (12, 8)}
ROCM: dict[str, Any] = {"device": "cuda"}
CPU: dict[str, Any] = {"device": "cpu"}
SIZE = (256, 384)
BF16 = torch.bfloat16


def case(fmt: str, on: dict[str, Any], **changes: Any) -> gemm.Case:
    return gemm.Case(**{"format": get_format(fmt), "matrix_shape": SIZE, "dtype": BF16, **on, **changes})


CHOSEN = [
    ("fp8_current", H200, "per_tensor"),
    ("fp8_delayed", H200, "per_tensor"),
    ("fp8_current:element=e5m2", H200, "per_tensor"),
    ("fp8_current", L40, "per_tensor"),
    ("fp8_current", B200, "per_tensor"),
    ("fp8_block", H200, "block_128"),
    ("fp8_block:power_of_2_scale=False", H200, "block_128"),
    ("mxfp4", H200, "block_128"),
    ("mxfp4:scale_rounding=floor", H200, "block_128"),
    ("mxfp8", B200, "mxfp8"),
    ("mxfp8:block=32x32", B200, "mxfp8"),
    ("mxfp8", B300, "mxfp8"),
    ("nvfp4", B300, "nvfp4"),
    ("mxfp4", B200, "mxfp4"),
    ("mxfp4:exact_in_fp8=False", B200, "mxfp4"),
    ("nvfp4", B200, "nvfp4"),
    ("nvfp4:exact_in_fp8", B200, "nvfp4"),
    ("nvfp4:exact_in_fp8", H200, "per_tensor"),
    ("nvfp4:exact_in_fp8", L40, "per_tensor"),
]
EXPERTS = {"experts": 4, "matrix_shape": (96, 64)}
NOT_CHOSEN = [
    ("fp8_current", A100, {}, "8.9, this device has 8.0"),
    ("fp8_current", ROCM, {}, "needs an NVIDIA GPU"),
    ("fp8_current", CPU, {}, r"only when asked for: zerocast.gemm.use\('scaled_mm'\)"),
    ("fp8_current", H200, {"dtype": torch.float32}, "bfloat16 or float16, not float32"),
    ("fp8_current", H200, {"matrix_shape": (256, 200)}, r"multiples of 16, the weight is \[256, 200\]"),
    ("fp8_current", H200, {"matrix_shape": (200, 256)}, r"multiples of 16, the weight is \[200, 256\]"),
    ("fp8_current", H200, {"transposed": True}, "x @ W needs the operand in its transposed layout"),
    ("fp8_current", H200, {"aligned": False}, "multiple of 16 bytes"),
    ("fp8_block", B200, {}, r"Hopper GPUs \(compute capability 9.x\), this device has 10.0"),
    ("fp8_block", L40, {}, "this device has 8.9"),
    ("fp8_block", ROCM, {}, "not on cuda tensors"),
    ("fp8_block", H200, {"cuda": (12, 8)}, "CUDA 12.9 on, torch was built with 12.8"),
    ("fp8_block:element=e5m2", H200, {}, "must be e4m3, it is e5m2"),
    ("fp8_block", H200, {"matrix_shape": (256, 192)}, "multiples of 128"),
    ("mxfp8", H200, {}, r"Blackwell GPUs \(compute capability 10.x\), this device has 9.0"),
    ("mxfp8", GEFORCE, {}, "this device has 12.0"),
    ("mxfp8", THOR, {}, "this device has 11.0"),
    ("mxfp4", A100, {}, "runs on Hopper .* this device has 8.0; runs on Blackwell .* this device has 8.0"),
    ("mxfp4", H200, {"matrix_shape": (4128, 256)}, r"multiples of 128, the weight is \[4128, 256\]"),
    ("mxfp4", H200, {"matrix_shape": (256, 4128)}, r"multiples of 128, the weight is \[256, 4128\]"),
    ("mxfp4:exact_in_fp8=False", H200, {}, r"Blackwell GPUs \(compute capability 10.x\), this device has 9.0"),
    ("mxfp4", B200, {"dtype": torch.float16}, "bfloat16, not float16"),
    ("nvfp4", H200, {}, "this device has 9.0"),
    ("nvfp4:exact_in_fp8", A100, {}, "this device has 8.0; FP8 tensor cores come with compute capability 8.9"),
    ("nvfp4", GEFORCE, {}, "this device has 12.0"),
    ("nvfp4", CPU, {}, "not on cpu tensors"),
    ("nvfp4", B200, {"matrix_shape": (256, 48)}, "multiples of 32"),
    ("identity", H200, {}, "identity has no scaled product"),
    ("nvfp4:exact_in_fp8", CPU, EXPERTS, "runs on Hopper GPUs .* not on cpu tensors"),
    ("nvfp4:exact_in_fp8", A100, EXPERTS, "this device has 8.0"),
    ("nvfp4:exact_in_fp8", L40, EXPERTS, "this device has 8.9"),
    ("nvfp4:exact_in_fp8", B200, EXPERTS, "this device has 10.0"),
    ("nvfp4:exact_in_fp8", H200, {**EXPERTS, "dtype": torch.float16}, "results are bfloat16, not float16"),
    ("nvfp4:exact_in_fp8", H200, {**EXPERTS, "dtype": torch.float32}, "not float32"),
    ("nvfp4:exact_in_fp8", H200, {**EXPERTS, "experts": 1024}, "fewer than 1024 experts, the weight has 1024"),
    ("nvfp4:exact_in_fp8", H200, {**EXPERTS, "aligned": False}, "multiple of 16 bytes"),
    ("fp8_current", H200, {"experts": 4, "matrix_shape": (40, 64)}, r"multiples of 16, the weight is \[40, 64\]"),
    ("fp8_current:element=e5m2", H200, EXPERTS, "must be e4m3, it is e5m2"),
    ("fp8_block", H200, EXPERTS, "fp8_block.* has no scaled product of all experts"),
    ("mxfp4", H200, EXPERTS, "mxfp4.* has no scaled product of all experts"),
    ("mxfp8", B200, EXPERTS, "mxfp8.* has no scaled product of all experts"),
    ("nvfp4", B200, EXPERTS, "nvfp4 has no scaled product of all experts"),
]


@pytest.fixture(autouse=True)
def mxfp4_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of torch for GPUs have it."""
    monkeypatch.setattr(blackwell, "_has_mxfp4_kernel", lambda: True)


@pytest.mark.parametrize(("fmt", "on", "path"), CHOSEN)
def test_the_path_that_a_device_runs(fmt: str, on: dict[str, Any], path: str) -> None:
    """A preferred path is chosen if the weight has two paths on this device. Other weights keep
    their only path.
    """
    for preference in ("auto", "scaled_mm"):
        assert gemm.decide(case(fmt, on), preference) == (path, "")
    assert gemm.decide(case(fmt, on), "dequantize") == ("dequantize", "asked for")
    takes_both = fmt == "nvfp4:exact_in_fp8" and on is H200
    assert gemm.decide(case(fmt, on), "block_128") == ("block_128" if takes_both else path, "")
    narrow = case(fmt, on, matrix_shape=(272, 528))
    assert gemm.decide(narrow, "block_128") == gemm.decide(narrow, "auto")


@pytest.mark.parametrize(("fmt", "on", "changes", "reason"), NOT_CHOSEN)
def test_the_reason_why_not(fmt: str, on: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    found = gemm.decide(case(fmt, on, **changes), "auto")
    assert found.path == "dequantize"
    assert re.search(reason, found.reason), found.reason
    if "only when asked" not in reason:
        assert gemm.decide(case(fmt, on, **changes), "scaled_mm") == (None, found.reason)
    # A fallback is what the device could run.
    could_run = on in (H200, L40, B200) and "device" not in reason and "no scaled product" not in reason
    assert gemm.falls_back(case(fmt, on, **changes), "auto") == could_run
    assert not gemm.falls_back(case(fmt, on, **changes), "dequantize")


@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_delayed", "nvfp4:exact_in_fp8"])
def test_hopper_multiplies_all_experts_at_once(fmt: str) -> None:
    for preference in ("auto", "scaled_mm", "block_128"):
        assert gemm.decide(case(fmt, H200, **EXPERTS), preference) == ("per_row", "")
    assert gemm.decide(case(fmt, H200, **EXPERTS), "dequantize") == ("dequantize", "asked for")


def test_a_torch_without_the_kernel_of_mxfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "this torch was built without USE_FBGEMM_GENAI and USE_MSLK, one of which has the product"
    monkeypatch.setattr(blackwell, "_has_mxfp4_kernel", lambda: False)
    assert next(blackwell.MXFP4.unsupported_reasons(case("mxfp4", B200))) == missing


def test_a_fallback_is_said_once_with_its_layer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "AUTOMATIC_DEVICES", ("cpu",))
    gemm.decide.cache_clear()
    model = quantize_(nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 40)).to(BF16), Recipe({"*.weight": "fp8_current"}))
    with caplog.at_level(logging.WARNING, "zerocast"):
        for _ in range(2):
            model(torch.randn(3, 64).to(BF16))
    monkeypatch.undo()
    gemm.decide.cache_clear()
    (said,) = caplog.messages
    assert re.search(r"products of 1\.weight are dequantized .* multiples of 16, the weight is \[40, 48\]", said)


# --- the preference --------------------------------------------------------------------------------------------------------------


def test_a_preference_ends_with_its_block() -> None:
    weight: Any = cast("fp8_current")
    assert weight.gemm_choice().path == "dequantize"
    with gemm.use("scaled_mm"):
        assert weight.gemm_choice() == ("per_tensor", "")
        with contextlib.suppress(KeyError), gemm.use("dequantize"):
            assert weight.gemm_choice() == ("dequantize", "asked for")
            raise KeyError
        assert weight.gemm_choice().path == "per_tensor"
    assert weight.gemm_choice().path == "dequantize"
    gemm.use("scaled_mm")
    with pytest.raises(ValueError, match="one of auto, dequantize, scaled_mm, block_128, got 'fast'"):
        gemm.use("fast")
    assert weight.gemm_choice().path == "per_tensor"
    gemm.use("auto")
    assert weight.gemm_choice().path == "dequantize"


@pytest.mark.parametrize(
    ("fmt", "shape", "reason"),
    [
        ("nvfp4", (48, 64), "Blackwell"),
        ("mxfp8", (64, 64), "Blackwell"),
        ("fp8_block", (128, 128), "Hopper"),
        ("fp8_current", (40, 64), "multiples of 16"),
        ("identity", (48, 64), "no scaled product"),
    ],
)
@pytest.mark.usefixtures("scaled_mm")
def test_a_preference_that_cannot_be_met_raises(fmt: str, shape: tuple[int, int], reason: str) -> None:
    weight = cast(fmt, shape)
    with pytest.raises(RuntimeError, match=rf"'scaled_mm' was asked for and QuantizedWeight\(.*{reason}"):
        F.linear(torch.randn(3, 64).to(BF16).requires_grad_(), weight)
    with pytest.raises(RuntimeError, match="in its transposed layout"):
        torch.randn(3, 48).to(BF16) @ cast("fp8_current")


def test_a_backward_pass_takes_the_way_of_its_forward_pass() -> None:
    weight, x, grad = cast("fp8_current"), torch.randn(5, 64).to(BF16).requires_grad_(), torch.randn(5, 48).to(BF16)
    with gemm.use("scaled_mm"):
        y = F.linear(x, weight)
    (outside,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    with gemm.use("scaled_mm"):
        (inside,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(outside, inside)
    assert not torch.equal(outside, grad @ weight.read(columnwise=True, dtype=BF16))  # type: ignore[operator]


@pytest.mark.usefixtures("scaled_mm")
def test_a_weight_that_moves_is_looked_at_again() -> None:
    weight, x = cast("fp8_current"), torch.randn(2, 64).to(BF16)
    y = F.linear(x, weight)
    odd, even = torch.empty(2, 48 * 64 + 32, dtype=torch.uint8)
    weight.rebind(rowwise_data=odd[8:-24].view(48, 64))  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        F.linear(x, weight)
    weight.rebind(rowwise_data=even[16:-16].view(48, 64))  # type: ignore[operator]
    assert torch.equal(F.linear(x, weight), y)


def test_the_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, made = cast("fp8_current"), torch.randn(2, 64).to(BF16), []
    real = gemm.Case.of
    monkeypatch.setattr(gemm.Case, "of", lambda *args: made.append(args) or real(*args))
    for _ in range(3):
        F.linear(x, weight)
    assert len(made) == 1


def test_report_names_path_and_reason() -> None:
    model = nn.ModuleDict({name: nn.Linear(64, 48) for name in "abc"}).to(BF16)
    model["a"].weight, model["b"].weight = cast("fp8_current"), cast("nvfp4")
    path = f"dequantize to bfloat16, {backends.choose(torch.device('cpu'))} backend"
    rows = backends.report(model).layers
    assert [(row.name, row.path) for row in rows] == [("a.weight", path), ("b.weight", path)]
    assert "only when asked for" in rows[0].reason and "Blackwell" in rows[1].reason
    with gemm.use("scaled_mm"):
        found = backends.report(model)
    assert [(row.path, bool(row.reason)) for row in found.layers] == [("per_tensor", False), ("refused", True)]
    assert "b.weight  nvfp4  refused (runs on Blackwell GPUs" in str(found)
    experts = nn.Module()
    experts.weight = nn.Parameter(QuantizedWeight.empty((2, 32, 64), "fp8_current"))
    (row,) = backends.report(experts).layers
    assert row.path == path and "runs on Hopper GPUs" in row.reason
