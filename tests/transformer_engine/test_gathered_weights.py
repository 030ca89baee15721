"""TransformerEngine's modules under FSDP2: the tensors that they see, how long those live, and what is refused."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import zerocast
from tests import casts, observed
from tests.fsdp2 import models
from tests.transformer_engine import tensors
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration, modules_on_cpu, needs_te
from tests.workers import on_ranks
from zerocast.fsdp2.parameter import MasterParameter

TRANSPOSED = ("fp8_delayed", "fp8_current")  # whose columnwise copies need one call of the compiled part


def module(name: str) -> Any:
    """A module of TransformerEngine's PyTorch part."""
    return importlib.import_module(f"transformer_engine.pytorch.{name}")


def bytes_of(weight: Any) -> casts.Bytes:
    """Copies: FSDP2 cannot free a storage that numpy has looked at."""
    return {name: casts.raw(buffer.clone()) for name, buffer in tensors.buffers(weight).items()}


class _Product(torch.autograd.Function):
    """x @ weight.T, asking of the weight what TransformerEngine's Linear asks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, net: "Net") -> Tensor:
        used, workspace = module("module.base").quantize_weight(tensor=weight, quantizer=weight._quantizer, cache=True)
        assert used is weight, "it was cast again"
        assert workspace is None, "a copy is kept"
        net.seen.append(weight)
        ctx.save_for_backward(x, weight)
        ctx.net = net
        return x @ net.values(weight).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        columnwise = ctx.net.fmt.startswith(TRANSPOSED) or ctx.net.fmt == "mxfp8"
        if columnwise:
            weight.update_usage(columnwise_usage=True)
            ctx.net.copies.append(bytes_of(weight))
        values = ctx.net.values(weight)
        if ctx.net.clears:
            module("tensor.utils").clear_columnwise_cache(weight)
        return gradient @ values, gradient.t() @ x, None


class Block(nn.ModuleList):
    """Layers of TransformerEngine, one after another, whose weights multiply by `_Product`."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class Net(nn.Module):
    """Two blocks of layers: te.Linear, LayerNormLinear, LayerNormMLP or GroupedLinear."""

    def __init__(self, fmt: str, *kinds: str, device: str = "cpu") -> None:
        super().__init__()
        self.fmt, self.clears = fmt, True
        self.seen: list[Any] = []
        self.copies: list[casts.Bytes] = []
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(_layer(kind, device) for kind in kinds or DEFAULT_KINDS) for _ in range(2))
        for layer in (layer for block in self.blocks for layer in block):
            layer.forward = self._forward(layer)

    def _forward(self, layer: Any) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            for name in [name for name, parameter in layer.named_parameters(recurse=False) if parameter.dim() == 2]:
                x = _Product.apply(x, getattr(layer, name), self)
            return x

        return forward

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def values(self, weight: Any) -> Tensor:
        owners = [owner for _, owner in models.masters(self).values() if owner.shown is not None]
        # Autograd may have detached the weight. Tensors whose modules have not run yet point elsewhere.
        codes = tensors.buffers(weight)["rowwise_data"].data_ptr()
        same_codes = [one for one in owners if tensors.buffers(one.shown)["rowwise_data"].data_ptr() == codes]
        (found,) = [one for one in owners if one.shown is weight] or same_codes
        return found.live.dequantize()

    def train_once(self, step: int = 0, x: Tensor | None = None) -> None:
        """A forward and a backward pass, of which the tensors that were seen and the copies are noted."""
        self.seen.clear()
        self.copies.clear()
        x = models.batch(step, WIDTH).bfloat16().requires_grad_() if x is None else x
        self(x).float().square().mean().backward()

    def transposed(self) -> list[Any]:
        """The weights that were seen and hold a transpose."""
        return [weight for weight in self.seen if weight._transpose is not None]

    def sharded(self, **options: Any) -> Any:
        """The model, prepared for TransformerEngine's modules, under FSDP2."""
        weights = [name for name, parameter in self.named_parameters() if parameter.dim() == 2]
        recipe = zerocast.Recipe(dict.fromkeys(weights, self.fmt))
        zerocast.fsdp2.prepare(self, recipe, present=integration().present)
        for block in (*self.blocks, self):
            fully_shard(block, mesh=models.mesh(), mp_policy=models.BF16, **options)
        return self


WIDTH = 64
DEFAULT_KINDS = ("Linear", "LayerNormLinear")
CLASSES = {
    "Linear": ("linear", (WIDTH, WIDTH)),
    "LayerNormLinear": ("layernorm_linear", (WIDTH, WIDTH)),
    "LayerNormMLP": ("layernorm_mlp", (WIDTH, 96)),
    "GroupedLinear": ("grouped_linear", (2, WIDTH, WIDTH)),
}


def _layer(kind: str, device: str = "cpu", sizes: tuple[int, ...] = (), **options: Any) -> Any:
    file, usual_sizes = CLASSES[kind]
    made = getattr(module(f"module.{file}"), kind)
    return made(*(sizes or usual_sizes), device=device, params_dtype=torch.float32, **options)


@contextlib.contextmanager
def host() -> Iterator[None]:
    """TransformerEngine's modules, and the one call of its compiled part that the stand-in needs."""
    with host_on_cpu(), modules_on_cpu():
        tex = importlib.import_module("transformer_engine_torch")
        with mock.patch.object(tex, "fp8_transpose", lambda data, dtype, out=None: data.t().contiguous(), create=True):
            yield


def held_nbytes(net: Net) -> int:
    """The bytes of the codes of all weights that modules saw."""
    held = [tensors.buffers(weight).items() for weight in net.seen]
    return sum(data.untyped_storage().nbytes() for items in held for name, data in items if name.endswith("_data"))


def check_bytes(net: Any, what: str) -> None:
    """Gather each block; bytes against the unsharded cast, memory against FSDP2's, quantizers against TransformerEngine's."""
    names = {"rowwise_data", "rowwise_scale_inv"}
    names |= {"amax"} if net.fmt.startswith("nvfp4") else set()
    names |= {"columnwise_scale_inv"} if net.fmt.startswith("mxfp8") else set()
    names |= {"columnwise_data"} if net.fmt == "mxfp8" else set()
    whole = {name: (parameter.full_tensor(), owner) for name, (parameter, owner) in models.masters(net).items()}
    for number, block in enumerate(net.blocks):
        block.unshard()
        for name, weight in block.named_parameters(f"blocks.{number}"):
            if name not in whole:
                continue
            master, owner = whole[name]
            expected = models.expected(master, owner)
            casts.assert_same_bytes(bytes_of(weight), {key: expected[key] for key in names}, f"{what}, {name}")
            made = tensors.buffers(weight)["rowwise_data"]
            theirs = {output.untyped_storage().data_ptr() for output in owner.group.outputs[owner.index]}
            assert made.untyped_storage().data_ptr() in theirs, "the codes were copied"
            assert type(weight._quantizer) is type(tensors.quantizer(zerocast.get_format(net.fmt)))
        block.reshard()


def train(net: Net, steps: int = 3) -> None:
    """Steps of a sharded model; modules see TransformerEngine's tensors, of which no bytes stay after a pass."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kind = TENSORS.get(net.fmt.partition(":")[0], "Float8Tensor")
    for step in range(steps):
        net.seen.clear()
        out = net(models.batch(step, WIDTH).bfloat16().requires_grad_())
        assert held_nbytes(net) == 0, "gathered bytes stay after the forward pass"
        assert {type(weight).__name__ for weight in net.seen} == {kind}
        out.float().square().mean().backward()
        assert held_nbytes(net) == 0, "gathered bytes or copies stay after the backward pass"
        optimizer.step()
        optimizer.zero_grad()
        check_bytes(net, f"{net.fmt} after step {step}")
        zerocast.verify(net).raise_for_differences()


TENSORS = {"fp8_block": "Float8BlockwiseQTensor", "mxfp8": "MXFP8Tensor", "nvfp4": "NVFP4Tensor"}
RECIPES = {
    "fp8_delayed": "DelayedScaling",
    "fp8_current": "Float8CurrentScaling",
    "fp8_block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}

pytestmark = needs_te


@on_ranks(1, 2)
@pytest.mark.parametrize("fmt", [*RECIPES, "mxfp8:block=32x32", "nvfp4:exact_in_fp8"])
@host()
def test_modules_compute_with_their_own_tensors(fmt: str) -> None:
    """Class, quantizer and bytes, over FSDP2's memory, after each step; nothing stays once it is resharded."""
    train(Net(fmt, *(CLASSES if fmt == "fp8_current" else ())).sharded())


@on_ranks(1)
@host()
def test_copies_that_the_host_leaves_are_dropped() -> None:
    """GroupedLinear never clears the transposes that its backward pass makes, here no module does; weights may be frozen."""
    net = Net("fp8_current", "Linear", "GroupedLinear").sharded()
    net.clears = False
    train(net)
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    net.train_once()
    assert net.seen and not net.transposed()


class FromParameter(nn.Module):
    """A layer whose input is a parameter, as learned queries are, which lives as long as the model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.queries = layer, nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.queries) + x
        return out


@on_ranks(2)
@host()
def test_inputs_that_live_as_long_as_the_model() -> None:
    """With a parameter as the input each pass drops its copies, and no pass leaves a hook more."""
    net = Net("fp8_current", "Linear")
    net.clears = False
    net.blocks = nn.ModuleList(FromParameter(block[0]) for block in net.blocks)
    zerocast.fsdp2.prepare(net, zerocast.Recipe({"*.layer.weight": net.fmt}), present=integration().present)
    for block in (*net.blocks, net):
        fully_shard(block, mesh=models.mesh(), mp_policy=models.BF16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(12):
        if step == 2:
            before = observed.process_counts()
        net.train_once(step, models.batch(step, WIDTH).bfloat16())
        optimizer.step()
        optimizer.zero_grad()
    assert not observed.grown(before, observed.process_counts())
    assert net.seen and not net.transposed()


@host()
def test_a_class_that_derives_from_the_hosts() -> None:
    """Megatron's TELinear is one: its forward pass is the host's, and so is what it multiplies."""
    layer = type("Mine", (module("module.linear").Linear,), {})(64, 64, device="cpu", params_dtype=torch.float32)
    said = "weight of a Mine is multiplied as one of transformer_engine's own tensors"
    with pytest.raises(ValueError, match=said):
        zerocast.fsdp2.prepare(nn.ModuleDict({"layer": layer}), zerocast.Recipe({"*weight": "fp8_current"}))
    assert not isinstance(layer.weight, MasterParameter)
    assert type(integration().present(layer, "weight", layer.weight)).__name__ == "GatheredWeight"


@on_ranks(2)
@pytest.mark.parametrize("fmt", ["fp8_current", "mxfp8"])
@host()
def test_weights_that_stay_gathered(fmt: str) -> None:
    """What TransformerEngine clears after a backward pass is there again in the next one; after a step copies are new."""
    net = Net(fmt).sharded(reshard_after_forward=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e4)
    last_codes = []
    for step in range(2):
        net.set_reshard_after_backward(False)
        net.train_once(step)
        before = list(net.copies)
        net.train_once(step)
        for one, other in zip(net.copies, before, strict=True):
            casts.assert_same_bytes(one, other, f"{fmt}, step {step}")
        last_codes.append(net.copies[-4]["columnwise_data"])
        optimizer.step()
        optimizer.zero_grad()
    assert (last_codes[0] != last_codes[1]).any()


@on_ranks(2)
@host()
def test_a_model_of_the_meta_device() -> None:
    """`reset_parameters` of sharded modules writes masters."""
    net = Net("fp8_current", device="meta").sharded()
    net.to_empty(device="cpu")
    for layer in (layer for block in net.blocks for layer in block):
        layer.reset_parameters()
    net.train_once()
    check_bytes(net, "of the meta device")


@on_ranks(2)
@host()
def test_a_recomputed_forward_pass_changes_nothing() -> None:
    gradients = []
    for recompute in (False, True):
        net = Net("fp8_current").sharded()
        if recompute:
            for block in net.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        net.train_once()
        gradients.append([parameter.grad.to_local() for parameter in net.parameters() if parameter.grad is not None])
    assert gradients[0] and all(map(torch.equal, *gradients))


def run_under_recipe(fmt: str, recipe: str, **options: Any) -> None:
    """A forward pass under a recipe of TransformerEngine's."""
    net = Net(fmt).sharded()
    state = module("quantization").FP8GlobalStateManager.quantization_state
    chosen = getattr(importlib.import_module("transformer_engine.common.recipe"), recipe)(**options)
    with mock.patch.object(state, "fp8_enabled", True), mock.patch.object(state, "fp8_recipe", chosen):
        net(models.batch(0, WIDTH).bfloat16())


@on_ranks(1)
@pytest.mark.notices(
    "te.autocast computes in another format than that of the gathered weights",
    where="TransformerEngine",
    answer="raises before the pass",
)
@host()
def test_the_recipe_in_use_must_be_that_of_the_weights() -> None:
    """Each recipe takes the weights that it would cast, and no others, whatever its options are."""
    for fmt, recipe in RECIPES.items():
        run_under_recipe(fmt, recipe)
    with pytest.raises(RuntimeError, match=r"is gathered as fp8_block.* fp8_current: pass that format to"):
        run_under_recipe("fp8_block", "Float8CurrentScaling")
    with pytest.raises(RuntimeError, match="16x16 tiles"):
        run_under_recipe("nvfp4", "NVFP4BlockScaling", disable_2d_quantization=True)


@host()
def test_exact_scales_are_said_not_to_be_the_hosts(caplog: pytest.LogCaptureFixture) -> None:
    """They are once, since its own quantizer, which the gathered tensors have, would make other bytes of the same masters."""
    caplog.set_level("INFO")
    gathered = importlib.import_module("zerocast.integrations.transformer_engine.gathered_weights")
    gathered._log_exact_scales.cache_clear()
    for fmt, count in (("nvfp4", 0), ("nvfp4:exact_in_fp8", 1), ("nvfp4:exact_in_fp8", 1)):
        gathered.GatheredWeight().check(zerocast.get_format(fmt))
        said = [line for line in caplog.messages if "NVFP4Quantizer would make the scales of plain" in line]
        assert len(said) == count


@host()
def test_what_is_refused() -> None:
    """The model is as it was, and the error says what to do instead."""

    def check(layer: Any, said: str, fmt: str = "fp8_current") -> None:
        model = nn.ModuleDict({"layer": layer})
        before = dict(model.named_parameters())
        with pytest.raises((TypeError, ValueError), match=said):
            zerocast.fsdp2.prepare(model, zerocast.Recipe({"*weight*": fmt}), present=integration().present)
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        assert not layer._forward_pre_hooks

    parts = ("query", "key", "value")
    check(_layer("Linear", sizes=(64, 96), bias=False, parameters_split=parts), "fuse_qkv_params=True")
    check(_layer("Linear", fuse_wgrad_accumulation=True), "fuse_wgrad_accumulation=False")
    check(_layer("Linear"), "no tensor that holds mxfp4", "mxfp4")
    quantized = _layer("Linear")
    quantized.primary_weights_in_fp8 = True
    check(quantized, r"outside of te.quantized_model_init")
