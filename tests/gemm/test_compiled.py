"""Products under torch.compile, on any machine: the bits of eager, what the graphs compute, and what they keep.

The kernels of a GPU and inductor's fusion: test_compiled_gpu.py. Models that FSDP2 shards: tests/fsdp2/test_compile.py.
"""

import functools
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

import zerocast
from tests import casts
from tests.fsdp2.models import slow
from tests.gemm.scaled_mm import emulated
from zerocast import QuantizedWeight, gemm, get_format
from zerocast.gemm import block_128
from zerocast.weight import compiled_ops
from zerocast.weight.compiled_ops import digest_of_sources

BF16 = torch.bfloat16
# Few rows: torch emulates a product of FP8 on a CPU, a hundred times slower than one in BF16.
ROWS, WIDTH, HIDDEN = 32, 128, 384


class Mlp(nn.Module):
    """A norm, two products of its result, an activation, a third product: `[rows, WIDTH]` to the same."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def built(
    fmt: str | None, on_demand: bool = True, device: str = "cpu", shape: tuple[int, int] = (WIDTH, HIDDEN)
) -> Any:
    """The same model in BF16 for None, else with quantized products, whose columnwise copies are made on demand or kept."""
    torch.manual_seed(0)
    model = Mlp(*shape).to(device, BF16)
    if fmt is not None:
        zerocast.quantize_(model, zerocast.Recipe({"gate.*": fmt, "up.*": fmt, "down.weight": fmt}))
        for layer in (model.gate, model.up, model.down):
            layer.weight.state.columnwise_on_demand = on_demand
    return model


def run(model: Any, x: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.float().square().mean().backward()
    gradients = [leaf.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return [y.detach(), *(gradient for gradient in gradients if gradient is not None)]


class Checked(torch.fx.Interpreter):
    """Runs a graph. Ops of ours give the strides that a compiler expects of them."""

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if str(n.target).startswith("zerocast"):
            found, expected = ([t.stride() for t in tree_leaves(value)] for value in (result, n.meta["val"]))
            assert found == expected, n.target
        return result


class Graphs:
    """A compiler that keeps the forward and the backward graph and runs them as they are."""

    def __init__(self) -> None:
        self.forward: GraphModule
        self.backward: GraphModule
        self.compiler = aot_autograd(
            fw_compiler=functools.partial(self._keep, "forward"),
            bw_compiler=functools.partial(self._keep, "backward"),
            partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        )

    def _keep(self, name: str, graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        setattr(self, name, graph)
        boxed: Callable[..., Any] = make_boxed_func(Checked(graph).run)
        return boxed

    def counts(self, of: str) -> Counter[str]:
        """Count each operator in one of the graphs."""
        nodes = getattr(self, of).graph.nodes
        return Counter(str(node.target) for node in nodes if node.op == "call_function")

    def kept(self) -> int:
        """Bytes that the forward graph makes for the backward graph."""
        (output,) = (node for node in self.forward.graph.nodes if node.op == "output")
        values = [node.meta["val"] for node in output.args[0][1:] if node is not None and node.op == "call_function"]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


def compiled(model: nn.Module) -> tuple[Any, Graphs]:
    """The model without a graph break, and the graphs, which are there after its first passes."""
    torch._dynamo.reset()
    graphs = Graphs()
    return torch.compile(model, backend=graphs.compiler, fullgraph=True), graphs


CASES = [
    ("nvfp4", "auto"),
    ("mxfp8", "auto"),
    ("fp8_block", "auto"),
    ("fp8_current", "auto"),
    ("fp8_current", "scaled_mm"),
    ("nvfp4:exact_in_fp8", "scaled_mm"),
    ("fp8_delayed:amax_history_len=4", "scaled_mm"),
]
# The graphs of every run, of which each other is one: products of ours, by torch with and without columnwise copies that are
# kept, and by torch of weights that are upcast.
QUICK = [
    ("nvfp4", "auto", True),
    ("fp8_current", "scaled_mm", True),
    ("fp8_current", "scaled_mm", False),
    ("nvfp4:exact_in_fp8", "scaled_mm", True),
]


@functools.cache
def kept_in_bf16() -> int:
    """The bytes that the graph of BF16 products keeps."""
    function, graphs = compiled(built(None))
    run(function, torch.ones(ROWS, WIDTH, dtype=BF16))
    return graphs.kept()


@pytest.mark.parametrize(
    ("fmt", "preference", "on_demand"),
    [*QUICK, *(slow(*case, kept) for case in CASES for kept in (True, False) if (*case, kept) not in QUICK)],
)
def test_a_graph_has_the_bits_of_eager_and_keeps_what_that_of_bf16_keeps(
    fmt: str, preference: str, on_demand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_compiling` is patched because torch 2.11 returns False there while it compiles."""
    # This compiles first: Dynamo makes its table of torch's functions once, and must not find the patch in it.
    most_kept = kept_in_bf16()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    x, model = torch.randn(ROWS, WIDTH).to(BF16), built(fmt, on_demand)
    with gemm.use(preference):
        expected = run(model, x)
        function, graphs = compiled(model)
        found = run(function, x)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert graphs.kept() <= most_kept
    forward, backward = graphs.counts("forward"), graphs.counts("backward")
    opaque, plain_product = "zerocast.multiply.default", "aten._scaled_mm.default"
    is_operator = preference == "scaled_mm"
    products = [
        plain_product if is_operator else opaque,
        plain_product if is_operator and on_demand else opaque,
    ]
    assert [forward[products[0]], backward[products[1]]] == [3, 3]
    made = [graph.pop("zerocast.operand.default", 0) for graph in (forward, backward)]
    by_graph = [is_operator and get_format(fmt).is_exact_in_fp8, products[1] == plain_product]
    assert made == [3 * is_made for is_made in by_graph], "else made by its product"
    ours = {name for name in forward | backward if name.startswith("zerocast")}
    assert ours <= {opaque}, "neither a dequantized nor a kept transposed weight is a value of a graph"
    if preference == "scaled_mm":
        assert forward["aten.abs.default"] == 2, "the input of gate is that of up: quantized once"
        assert backward["aten.abs.default"] == 3


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products of path block_128 on a CPU, by the emulation, which asserts the strides of codes and scales."""

    name_of = {member.value: name for name, member in torch.nn.functional.ScalingType.__members__.items()}

    def operator(
        a: Tensor, b: Tensor, a_scale: Any, a_recipe: Any, _: Any, b_scale: Any, b_recipe: Any, *rest: Any
    ) -> Tensor:
        _, bias, dtype = rest
        (a_scaling,), (b_scaling,) = ([name_of[number] for number in recipe] for recipe in (a_recipe, b_recipe))
        return emulated(a, a_scale[0], b, b_scale[0], [a_scaling], [b_scaling], bias, dtype)

    monkeypatch.setattr(block_128, "hardware", lambda case: iter(()))
    monkeypatch.setattr(torch, "_scaled_mm_v2", operator)
    gemm.decide.cache_clear()
    with gemm.use("block_128"):
        monkeypatch.setattr(gemm.choice, "AUTOMATIC_DEVICES", ("cpu",))
        yield
    gemm.decide.cache_clear()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("fmt", "weight_gradients", "backend"),
    [
        ("fp8_block", "nominal", "graphs"),
        pytest.param("fp8_block", "fp8_groups", "graphs", marks=pytest.mark.slow),
        ("mxfp4", "fp8", "graphs"),
        pytest.param("nvfp4:exact_in_fp8", "fp8", "graphs", marks=pytest.mark.slow),
        pytest.param("fp8_block", "nominal", "inductor", marks=pytest.mark.slow),
        pytest.param("mxfp4", "fp8", "inductor", marks=pytest.mark.slow),
    ],
)
def test_products_of_blocks_are_one_op_each(fmt: str, weight_gradients: str, backend: str) -> None:
    """The op takes the buffers that it multiplies, and the compiler keeps the strides that it
    needs.
    """
    x, model = torch.randn(200, WIDTH).to(BF16), built(fmt)
    with gemm.use(weight_gradients=weight_gradients):
        expected = run(model, x)
        if backend == "inductor":
            torch._dynamo.reset()
            found = run(torch.compile(model, fullgraph=True), x)
            assert all((a - b).norm() <= 0.05 * b.norm() for a, b in zip(found, expected, strict=True))
            return
        function, graphs = compiled(model)
        found = run(function, x)
    assert all(map(torch.equal, found, expected))
    is_quantized = weight_gradients != "nominal"
    forward, backward = graphs.counts("forward"), graphs.counts("backward")
    assert [forward["zerocast.scaled_mm.default"], backward["zerocast.scaled_mm.default"]] == [
        3,
        6 if is_quantized else 3,
    ]
    ours = {name for name in forward | backward if name.startswith("zerocast")}
    ours -= {"zerocast.groups_both_ways.default"} if is_quantized else set()
    assert ours == {"zerocast.scaled_mm.default", "zerocast.operand.default"}


def test_a_quantized_weight_gradient_keeps_no_way_of_the_input() -> None:
    """The backward graph makes the codes from what it has of the input, once for gate and up, and turns them in one op."""
    x, model = torch.randn(ROWS, WIDTH).to(BF16), built("fp8_current")
    with gemm.use("scaled_mm"):
        nominal = run(model, x)
    with gemm.use("scaled_mm", weight_gradients="fp8"):
        expected = run(model, x)
        function, graphs = compiled(model)
        found = run(function, x)
    assert all(map(torch.equal, found, expected))
    assert graphs.counts("backward")["aten._scaled_mm.default"] == 6
    assert graphs.counts("backward")["zerocast.turned.default"] == 2
    assert "zerocast.turned.default" not in graphs.counts("forward")
    assert graphs.kept() <= ROWS * 2 * 2 * HIDDEN + 8 * ROWS, "gate and up, and a number a row"
    assert all(map(torch.equal, expected[:3], nominal)), "the output and the input gradient are as before"
    for ours, theirs in zip(expected[3:6], nominal[3:6], strict=True):
        assert 0 < (ours - theirs).norm() <= 0.08 * theirs.norm()


def test_what_a_cached_graph_depends_on() -> None:
    """torch keeps graphs by this key, across processes too: another way of computing is another graph."""
    weight: Any = built("fp8_current").gate.weight
    weight.state.columnwise_on_demand = False
    with FakeTensorMode() as mode:
        buffers = {name: mode.from_tensor(b) for name, b in weight.state.buffers.items() if b is not None}
        fake = QuantizedWeight.of_buffers(weight.shape, weight.format, BF16, buffers)
    keys, pickles = set(), set()
    for preference, weight_gradients in (
        ("auto", None),
        ("scaled_mm", None),
        ("dequantize", None),
        ("scaled_mm", "fp8"),
    ):
        with gemm.use(preference, weight_gradients=weight_gradients):
            keys.add(weight._stable_hash_for_caching())
            pickles.add(pickle.dumps(fake))
    assert len(keys) == len(pickles) == 3, "the CPU dequantizes unless asked"


@pytest.mark.parametrize("changed", ["__init__.py", "gemm/inputs.py", "gemm/new.py"])
def test_changed_sources_are_another_digest(tmp_path: Path, changed: str) -> None:
    for name in ("__init__.py", "gemm/inputs.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    before = digest_of_sources.__wrapped__(tmp_path)
    assert before == digest_of_sources.__wrapped__(tmp_path)
    (tmp_path / changed).write_text("x = 2")
    assert before != digest_of_sources.__wrapped__(tmp_path)


@pytest.mark.slow
def test_a_graph_of_other_sources_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh process would find torch's cache on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, model = torch.randn(16, 32).to(BF16).requires_grad_(), nn.Linear(32, 32, bias=False).bfloat16()
    zerocast.quantize_(model, zerocast.Recipe({"weight": "fp8_current"}))
    found = []
    for digest in ("one", "one", "another"):
        monkeypatch.setattr(compiled_ops, "digest_of_sources", lambda digest=digest: digest)
        torch._dynamo.reset()
        counters.clear()
        torch.compile(model, fullgraph=True)(x).sum().backward()
        found.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert found == [0, 1, 0]


def test_a_compiled_function_follows_the_preference() -> None:
    model: Any = nn.Sequential(nn.Linear(WIDTH, HIDDEN)).to(BF16)
    zerocast.quantize_(model, zerocast.Recipe({"0.weight": "fp8_current"}))
    x, (function, graphs) = torch.randn(ROWS, WIDTH).to(BF16), compiled(model)
    # Dequantized products always have nominal gradients, so the second run takes the first one's graph.
    for preference, weight_gradients in (
        ("auto", "nominal"),
        ("auto", "fp8"),
        ("scaled_mm", "nominal"),
        ("scaled_mm", "fp8"),
    ):
        with gemm.use(preference, weight_gradients=weight_gradients):
            assert all(map(torch.equal, run(function, x), run(model, x)))
        quantized = preference == "scaled_mm" and weight_gradients == "fp8"
        assert graphs.counts("backward")["aten._scaled_mm.default"] == int(quantized), "the weight gradient"


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_takes_weights_beside_other_subclasses(dynamic: bool) -> None:
    """The inputs of the graph are the parts of both, and with dynamic shapes the sizes of the other tensor."""

    def both(x: Tensor, weight: Any, other: Any) -> tuple[Tensor, Any]:
        return F.linear(x, weight), other.sin()

    function = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    weight = casts.cast_whole("fp8_current", torch.randn(64, 32))
    for rows in (8, 12):
        leaf = torch.randn(rows, 32).to(BF16).requires_grad_()
        parts = torch.randn(rows, 4), torch.randn(rows, 4)
        y, sines = function(leaf, weight, TwoTensor(*parts))
        y.sum().backward()
        assert torch.equal(y, F.linear(leaf, weight))
        assert torch.equal(sines.b, parts[1].sin())
        assert torch.equal(leaf.grad, torch.autograd.grad(F.linear(leaf, weight).sum(), leaf)[0])
