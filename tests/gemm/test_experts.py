"""Products of all experts at once in FP8, on any machine: the choice, what torch is handed, what comes out; on a GPU its kernel."""

import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerocast
from tests import casts
from tests.devices import gpus, waiting_is_an_error
from tests.gemm import test_compiled
from tests.gemm.scaled_mm import emulated_grouped
from zerocast import gemm
from zerocast.backends import ops
from zerocast.gemm import per_row
from zerocast.weight.gathered_operands import GatheredOperands

BF16 = torch.bfloat16
EXPERTS, M, K = 4, 96, 64
ENDS = (40, 40, 45, 96)  # the second expert has no rows, the third few
ROWS = 104  # the last ones belong to no expert
EXACT = "nvfp4:exact_in_fp8"
FORMATS = ("fp8_current", "fp8_delayed:amax_history_len=4", EXACT)
DEVICES = ["cpu", pytest.param("cuda", marks=gpus(1))]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A GPU with its kernel, or a CPU on which the path runs by an emulation that checks its arguments."""
    gemm.decide.cache_clear()
    if request.param == "cpu":
        monkeypatch.setattr(torch, "_scaled_grouped_mm", emulated_grouped)
        monkeypatch.setattr(per_row, "hardware", lambda case: iter(()))
    with gemm.use("scaled_mm"):
        yield request.param
    gemm.decide.cache_clear()


def experts(fmt: str, device: str = "cpu", on_demand: bool = False) -> Any:
    value = torch.randn(EXPERTS, M, K) * torch.logspace(-1, 1, EXPERTS * M).view(EXPERTS, M, 1)
    weight = nn.Parameter(casts.cast_whole(fmt, value, BF16, scale=16.0).to(device))
    weight.state.set_columnwise_on_demand(on_demand)  # type: ignore[attr-defined]
    return weight


def ends(device: str) -> Tensor:
    return torch.tensor(ENDS, dtype=torch.int32, device=device)


def inputs(features: int, device: str) -> Tensor:
    """Rows of several magnitudes; those of no expert hold what memory may hold."""
    x = torch.randn(ROWS, features, device=device) * torch.logspace(-3, 3, ROWS, device=device)[:, None]
    x[ENDS[-1] :] = torch.nan
    return x.to(BF16)


def in_fp8(weight: Any) -> tuple[Tensor, Tensor]:
    """(E4M3 values `[E, M, K]`, scale) of the dequantized weight, exactly."""
    values = weight.read(columnwise=False, dtype=torch.float32).view(weight.shape)
    scale = 8 * (weight.amax / 2688) if weight.format.is_exact_in_fp8 else weight.rowwise_scale_inv.view(1)
    codes = (values / scale).to(torch.float8_e4m3fn)
    assert torch.equal(codes.float() * scale, values)
    return codes, scale


def by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """An input as the product sees it."""
    scale = (448 / x.double().abs().amax(-1)).float()
    return (x.float() * scale[..., None]).to(torch.float8_e4m3fn), (1 / scale.double()).float()


def product(x: Tensor, matrices: Tensor, scale: Tensor, offs: Tensor | None, is_gradient: bool) -> Tensor:
    """torch's FP8 product of the dequantized weight, `matrices` `[E, k, n]`."""
    codes, scale_inv = by_row(x)
    column_major = matrices.transpose(1, 2).contiguous().transpose(1, 2)
    scales = scale.expand(matrices.shape[0], matrices.shape[2]).contiguous()
    options = {"offs": offs, "out_dtype": BF16, "use_fast_accum": not is_gradient}
    return torch._scaled_grouped_mm(codes, column_major, scale_inv, scales, **options)


@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize("is_as_stored", [False, True])
@pytest.mark.parametrize("is_grouped", [True, False])
@pytest.mark.parametrize("fmt", FORMATS)
def test_products_are_those_of_the_dequantized_weight(
    fmt: str, is_grouped: bool, is_as_stored: bool, on_demand: bool, device: str
) -> None:
    """To the bit, forward and backward, whichever way the experts are stored, from a kept copy or one made for the product."""
    weight = experts(fmt, device, on_demand)
    codes, scale = in_fp8(weight)
    forward = codes if is_as_stored else codes.transpose(1, 2)
    operand = weight if is_as_stored else weight.transpose(1, 2)
    if is_grouped:
        offs, rows = ends(device), ENDS[-1]
        x = inputs(forward.shape[1], device).requires_grad_()
        y = torch._grouped_mm(x, operand, offs=offs)
        grad = inputs(y.shape[1], device)
    else:
        offs, rows = None, EXPERTS
        x = torch.randn(EXPERTS, 24, forward.shape[1], device=device).to(BF16).requires_grad_()
        y = torch.bmm(x, operand)
        grad = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(y[:rows], product(x.detach(), forward, scale, offs, False)[:rows])
    assert torch.equal(found[:rows], product(grad, forward.transpose(1, 2), scale, offs, True)[:rows])


def rounded(x: Tensor, rows: int) -> Tensor:
    """Rows as a weight gradient sees them: one scale for a feature."""
    scale = (448 / x[:rows].double().abs().amax(0)).float()
    return (x[:rows].float() * scale).to(torch.float8_e4m3fn).double() / scale.double()


@pytest.mark.parametrize("is_as_stored", [False, True])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_weight_gradients_in_fp8(is_grouped: bool, is_as_stored: bool, device: str) -> None:
    """The sums of each expert's rows, of operands rounded under one scale a feature; an expert without rows learns nothing."""
    weight, offs = experts(EXACT, device), ends(device)
    operand = weight if is_as_stored else weight.mT
    x = inputs(operand.shape[1], device)
    cuts = [0, *ENDS]
    if not is_grouped:
        x = x[: EXPERTS * 24]
        cuts = list(range(0, EXPERTS * 24 + 1, 24))
    with gemm.use(weight_gradients="fp8"):
        y = torch._grouped_mm(x, operand, offs=offs) if is_grouped else x.view(EXPERTS, 24, -1).bmm(operand)
    grad = inputs(y.shape[-1], device)[: y.numel() // y.shape[-1]]
    y.backward(grad.view(y.shape))
    left, right = (rounded(t, cuts[-1]) for t in ((x, grad) if is_as_stored else (grad, x)))
    for number, (first, last) in enumerate(zip(cuts, cuts[1:], strict=False)):
        exact = left[first:last].t() @ right[first:last]
        # The accumulator of a GPU has about 14 bits.
        bound = 2**-8 * exact.abs() + (2**-9 if device == "cuda" else 2**-12) * (
            left[first:last].abs().t() @ right[first:last].abs()
        )
        assert ((weight.grad[number].double() - exact).abs() <= bound).all(), number
    assert weight.grad.dtype is BF16 and (not is_grouped or not weight.grad[1].any())


def test_a_recipe_that_is_fast_has_them(device: str) -> None:
    block = nn.Module()
    block.weight = nn.Parameter(torch.randn(EXPERTS, M, K, dtype=BF16, device=device))
    zerocast.quantize_(nn.ModuleList([block]), zerocast.Recipe({"*": EXACT}, fast=True))
    weight: Any = block.weight
    calls = mock.Mock(side_effect=per_row.weight_gradient)
    with mock.patch.object(per_row, "weight_gradient", calls):
        x = inputs(K, device)[: ENDS[-1]]
        torch._grouped_mm(x, weight.transpose(1, 2), offs=ends(device)).sum().backward()
        assert calls.call_count == 1
        weight.grad, weight.grad_dtype = None, torch.float32  # which these products do not make
        torch.bmm(x.view(EXPERTS, -1, K), weight.mT).sum().backward()
    assert calls.call_count == 1 and weight.grad.dtype is torch.float32


def test_no_rows(device: str) -> None:
    weight = experts(EXACT, device)
    x = torch.empty(0, K, dtype=BF16, device=device, requires_grad=True)
    nothing = torch.zeros(EXPERTS, dtype=torch.int32, device=device)
    with gemm.use(weight_gradients="fp8"):
        y = torch._grouped_mm(x, weight.mT, offs=nothing)
    (found,) = torch.autograd.grad(y, x, torch.empty_like(y))
    assert y.shape == (0, M) and found.shape == (0, K)


def grouped(x: Tensor, weight: Any, offs: Tensor) -> Tensor:
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=offs)


def batched(x: Tensor, weight: Any, offs: Tensor) -> Tensor:
    return torch.bmm(x.view(EXPERTS, -1, K), weight.mT).flatten(0, 1)


@pytest.mark.parametrize("way", ["nominal", "fp8"])
@pytest.mark.parametrize("function", [grouped, batched])
@pytest.mark.parametrize("fmt", ["fp8_current", EXACT])
def test_compiled_products(fmt: str, function: Callable[..., Tensor], way: str, device: str) -> None:
    """The bits of eager, and one op of ours for a product in each graph: no plain weight can be kept."""
    weight, offs = experts(fmt, device, on_demand=True), ends(device)
    x, grad = (inputs(n, device)[: ENDS[-1]] for n in (K, M))
    call, graphs = test_compiled.compiled(function)
    found = []
    with gemm.use(weight_gradients=way):
        for run in (call, function):
            leaf = x.clone().requires_grad_()
            y = run(leaf, weight, offs)
            found.append([y, *torch.autograd.grad(y, [leaf, weight], grad)])
    assert all(map(torch.equal, *found))
    product = {"zerocast.multiply_experts.default": 1}
    gradient = {"zerocast.experts_weight_gradient.default": 1} if way == "fp8" else {}
    for graph, expected in (("forward", product), ("backward", product | gradient)):
        assert {name: n for name, n in graphs.counts(graph).items() if name.startswith("zerocast")} == expected


def test_experts_are_made_with_the_other_weights_of_a_gather(device: str) -> None:
    """One launch makes all experts of both layers."""
    weights = [experts(EXACT, device, on_demand=True) for _ in range(2)]
    operands = GatheredOperands.by_format([weight.state for weight in weights])
    x, offs = inputs(K, device), ends(device)
    made = mock.Mock(side_effect=ops.upcast_together)
    results = []
    with mock.patch.object(ops, "upcast_together", made):
        for _ in range(3):
            before = made.call_count
            results.append([grouped(x, weight.detach(), offs)[: ENDS[-1]] for weight in weights])
            launches = made.call_count - before
            for of_format in operands:
                of_format.end_round()
    assert launches == 1 and made.call_args.args[5] == ((EXPERTS * M, K),) * 2
    assert all(torch.equal(a, b) for others in results[1:] for a, b in zip(results[0], others, strict=True))


def test_what_autograd_keeps(device: str) -> None:
    """The input as it is and the quantized weight: codes of the input are made again for a weight gradient, and one
    quantization of an input serves both products that read it.
    """
    first, second = experts(EXACT, device), experts(EXACT, device)
    x, offs = inputs(K, device).requires_grad_() * 1, ends(device)
    kept: list[Tensor] = []
    made = mock.Mock(side_effect=per_row.quantize)
    with (
        mock.patch.object(per_row, "quantize", made),
        gemm.use(weight_gradients="fp8"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        grouped(x, first, offs)
        grouped(x, second, offs)
    assert made.call_count == 1
    assert {t.data_ptr() for t in kept if type(t) is Tensor} == {x.data_ptr(), offs.data_ptr()}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(bad: float, device: str) -> None:
    weight, offs = experts(EXACT, device), ends(device)
    x = inputs(K, device)[: ENDS[-1]].clone()
    x[50, 7] = bad
    with gemm.use(weight_gradients="fp8"):
        y = grouped(x, weight, offs)
    assert y[50].isnan().all() and torch.cat((y[:50], y[51:])).isfinite().all()
    y.backward(torch.ones_like(y))
    assert weight.grad[3, :, 7].isnan().all() and weight.grad[..., 8:].isfinite().all()


def test_a_layer_says_what_it_takes(device: str) -> None:
    model = nn.ParameterDict({"exact": experts(EXACT, device), "blocks": experts("mxfp4", device)})
    rows = {row.name: row for row in zerocast.backends.report(model).layers}
    assert re.fullmatch("per_row after upcast to e4m3, .* backend", rows["exact"].path) and not rows["exact"].reason
    assert rows["blocks"].path == "refused" and "no scaled product of all experts" in rows["blocks"].reason
    weight: Any = model["blocks"]
    with pytest.raises(RuntimeError, match=r"'scaled_mm' was asked for and .* no scaled product of all experts"):
        grouped(inputs(K, device), weight, ends(device))
    with gemm.use("auto"):
        assert weight.gemm_choice().path == "dequantize"


# --- on a GPU ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnAGpu:
    """Tests of what only the kernel itself can show."""

    def test_the_product_by_the_kernel_against_fp64(self) -> None:
        """Many experts have uneven numbers of rows, in the shapes of a model."""
        weight: Any = nn.Parameter(casts.cast_whole(EXACT, torch.randn(16, 512, 256), BF16).cuda())
        offs = torch.randint(0, 300, (16,)).cumsum(0).to(torch.int32).cuda()
        last = int(offs[-1])
        x = torch.randn(last + 40, 256, device="cuda", dtype=BF16)
        with gemm.use(weight_gradients="fp8"):
            y = grouped(x, weight, offs)
        grad = torch.randn_like(y)
        y.backward(grad)
        codes, scale = in_fp8(weight)
        values, cuts = codes.double() * scale.double(), [0, *offs.tolist()]
        x_codes, x_scale = by_row(x)
        seen = x_codes.double() * x_scale.double()[:, None]
        left, right = rounded(grad, last), rounded(x, last)
        for number, (first, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
            for result, a, b in (
                (y[first:end], seen[first:end], values[number].t()),
                (weight.grad[number], left[first:end].t(), right[first:end]),
            ):
                exact = a @ b
                bound = 2**-8 * exact.abs() + 2**-9 * (a.abs() @ b.abs()) + 1e-30
                assert ((result.double() - exact).abs() <= bound).all(), number

    def test_the_host_waits_for_nothing(self) -> None:
        weight, x, offs = experts(EXACT, "cuda", on_demand=True), inputs(K, "cuda"), ends("cuda")
        grad = torch.randn(ROWS, M, device="cuda", dtype=BF16)

        def step() -> list[Tensor]:
            leaf = x.clone().requires_grad_()
            with gemm.use(weight_gradients="fp8"):
                y = grouped(leaf, weight, offs)
            return [y[: ENDS[-1]], *torch.autograd.grad(y, [leaf, weight], grad)]

        expected = step()
        with waiting_is_an_error():
            found = step()
        expected[1], found[1] = expected[1][: ENDS[-1]], found[1][: ENDS[-1]]
        assert all(map(torch.equal, expected, found))

    def test_auto_takes_it(self) -> None:
        weight = experts(EXACT, "cuda")
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip(weight.gemm_choice().reason)
        assert weight.gemm_choice() == ("per_row", "")
