"""TransformerEngine's modules under FSDP2: the tensors that they see, how long those live, and what is refused."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zerocast
from tests import casts, growth
from tests.fsdp2 import models
from tests.transformer_engine import tensors
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration, modules_on_cpu, needs_te
from tests.workers import Ranks, error_of, on_ranks
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


class Net(nn.Module):
    """Two blocks of two weights: te.Linear, and a LayerNormLinear, a LayerNormMLP or groups that take turns."""

    def __init__(self, fmt: str, kinds: tuple[str, ...] = ("Linear", "LayerNormLinear"), device: str = "cpu") -> None:
        super().__init__()
        self.fmt, self.clears = fmt, True
        self.seen: list[Any] = []
        self.copies: list[casts.Bytes] = []
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.ModuleList(_layer(kind, device) for kind in kinds) for _ in range(2))
        for block in self.blocks:
            for layer in block:
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


class Block(nn.ModuleList):
    """Linear layers of TransformerEngine, one after another."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def _layer(kind: str, device: str) -> Any:
    options = {"device": device, "params_dtype": torch.float32}
    made: dict[str, Callable[[], Any]] = {
        "Linear": lambda: module("module.linear").Linear(64, 64, **options),
        "LayerNormLinear": lambda: module("module.layernorm_linear").LayerNormLinear(64, 64, **options),
        "LayerNormMLP": lambda: module("module.layernorm_mlp").LayerNormMLP(64, 96, **options),
        "GroupedLinear": lambda: module("module.grouped_linear").GroupedLinear(2, 64, 64, **options),
    }
    return made[kind]()


@contextlib.contextmanager
def host() -> Iterator[None]:
    """TransformerEngine's modules, and the one call of its compiled part that the stand-in needs."""
    with host_on_cpu(), modules_on_cpu():
        tex = importlib.import_module("transformer_engine_torch")
        with mock.patch.object(tex, "fp8_transpose", lambda data, dtype, out=None: data.t().contiguous(), create=True):
            yield


def build(fmt: str, kinds: tuple[str, ...] = ("Linear", "LayerNormLinear"), device: str = "cpu", **options: Any) -> Any:
    """A prepared and sharded model."""
    net = Net(fmt, kinds, device)
    net.blocks = nn.ModuleList(Block(block) for block in net.blocks)
    recipe = zerocast.Recipe({f"blocks.*.{name}": fmt for name in _names(net)})
    zerocast.fsdp2.prepare(net, recipe, present=integration().present)
    shard = {"mesh": models.mesh(), "mp_policy": models.BF16, **options}
    for block in net.blocks:
        fully_shard(block, **shard)
    return fully_shard(net, **shard)


def _names(net: nn.Module) -> list[str]:
    weights = [name for name, parameter in net.named_parameters() if parameter.dim() == 2]
    return sorted({name.split(".", 2)[2] for name in weights})


def _storages(weight: Any) -> list[int]:
    return [data.untyped_storage().nbytes() for name, data in tensors.buffers(weight).items() if name.endswith("_data")]


def train(fmt: str, kinds: tuple[str, ...], clears: bool = True, steps: int = 3) -> list[str]:
    """Steps of a model; what is wrong with the tensors that its modules saw, or with what stays of them."""
    wrong: list[str] = []
    with host():
        net = build(fmt, kinds)
        net.clears = clears
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        kind = integration_class(fmt)
        for step in range(steps):
            net.seen.clear()
            net.copies.clear()
            out = net(models.batch(step, 64).bfloat16().requires_grad_())
            if any(sum(_storages(weight)) for weight in net.seen):
                wrong.append(f"step {step}: gathered bytes stay after the forward pass")
            if {type(weight).__name__ for weight in net.seen} != {kind}:
                wrong.append(f"modules saw {[type(weight).__name__ for weight in net.seen]}")
            out.float().square().mean().backward()
            if any(sum(_storages(weight)) for weight in net.seen):
                wrong.append(f"step {step}: gathered bytes or copies stay after the backward pass")
            optimizer.step()
            optimizer.zero_grad()
            wrong += _wrong_bytes(net, f"{fmt} after step {step}")
            zerocast.verify(net).raise_for_differences()
    return wrong


def integration_class(fmt: str) -> str:
    """TransformerEngine's class for a format."""
    classes = {"fp8_block": "Float8BlockwiseQTensor", "mxfp8": "MXFP8Tensor", "nvfp4": "NVFP4Tensor"}
    return classes.get(fmt.partition(":")[0], "Float8Tensor")


def _wrong_bytes(net: Any, what: str) -> list[str]:
    """Gather each block; bytes against the unsharded cast, memory against FSDP2's, quantizers against TransformerEngine's."""
    wrong: list[str] = []
    whole = {name: (parameter.full_tensor(), owner) for name, (parameter, owner) in models.masters(net).items()}
    for number, block in enumerate(net.blocks):
        block.unshard()
        for name, weight in block.named_parameters(f"blocks.{number}"):
            if name not in whole:
                continue
            master, owner = whole[name]
            expected, found = models.expected(master, owner), bytes_of(weight)
            names = {"rowwise_data", "rowwise_scale_inv"} | ({"amax"} if net.fmt.startswith("nvfp4") else set())
            names |= {"columnwise_scale_inv"} if net.fmt.startswith("mxfp8") else set()
            names |= {"columnwise_data"} if net.fmt == "mxfp8" else set()
            try:
                casts.assert_same_bytes(found, {key: expected[key] for key in names}, f"{what}, {name}")
            except AssertionError as error:
                wrong.append(str(error))
            made = tensors.buffers(weight)["rowwise_data"]
            theirs = {output.untyped_storage().data_ptr() for output in owner.group.outputs[owner.index]}
            if made.untyped_storage().data_ptr() not in theirs:
                wrong.append(f"{what}, {name}: the codes were copied")
            quantizer = weight._quantizer
            if type(quantizer) is not type(tensors.quantizer(zerocast.get_format(net.fmt))):
                wrong.append(f"{what}, {name}: its quantizer is a {type(quantizer).__name__}")
        block.reshard()
    return wrong


RECIPES = {
    "fp8_delayed": "DelayedScaling",
    "fp8_current": "Float8CurrentScaling",
    "fp8_block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}


def under_recipe(fmt: str, recipe: str, options: dict[str, Any]) -> str:
    """The error of a forward pass under a recipe of TransformerEngine's, or nothing."""
    with host():
        net = build(fmt)
        recipes = importlib.import_module("transformer_engine.common.recipe")
        manager = module("quantization").FP8GlobalStateManager
        state = manager.quantization_state
        chosen = getattr(recipes, recipe)(**options)
        with mock.patch.object(state, "fp8_enabled", True), mock.patch.object(state, "fp8_recipe", chosen):
            return error_of(lambda: net(models.batch(0, 64).bfloat16()))


def by_meta_device() -> list[str]:
    """A model that is made on the meta device and initialised by TransformerEngine once it is sharded."""
    with host():
        net = build("fp8_current", device="meta")
        net.to_empty(device="cpu")
        for layer in (layer for block in net.blocks for layer in block):
            layer.reset_parameters()
        net(models.batch(0, 64).bfloat16().requires_grad_()).float().square().mean().backward()
        return _wrong_bytes(net, "of the meta device")


def recomputed() -> list[str]:
    """Losses and gradients with and without activation checkpoints around blocks."""
    from torch.utils.checkpoint import checkpoint

    found = []
    with host():
        for again in (False, True):
            net = build("fp8_current")
            if again:
                for block in net.blocks:
                    plain = block.forward
                    block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
            net(models.batch(0, 64).bfloat16().requires_grad_()).float().square().mean().backward()
            found.append(
                [parameter.grad.to_local().clone() for parameter in net.parameters() if parameter.grad is not None]
            )
    return [f"gradient {i}" for i, (a, b) in enumerate(zip(*found, strict=True)) if not torch.equal(a, b)]


def frozen() -> list[str]:
    """A model of frozen weights: what stays after a backward pass that makes copies and clears none."""
    with host():
        net = build("fp8_current")
        net.clears = False
        for parameter in net.parameters():
            parameter.requires_grad_(False)
        net(models.batch(0, 64).bfloat16().requires_grad_()).float().square().mean().backward()
        return [type(weight).__name__ for weight in net.seen if weight._transpose is not None]


class FromParameter(nn.Module):
    """A layer whose input is a parameter, as learned queries are, which lives as long as the model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.queries = layer, nn.Parameter(torch.randn(8, 64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.queries) + x
        return out


def of_long_lived_inputs(steps: int) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """What there is more of after some steps, and the copies that stay after a backward pass that clears none."""
    with host():
        net = Net("fp8_current", ("Linear",))
        net.clears = False
        net.blocks = nn.ModuleList(FromParameter(block[0]) for block in net.blocks)
        recipe = zerocast.Recipe({"blocks.*.layer.weight": "fp8_current"})
        zerocast.fsdp2.prepare(net, recipe, present=integration().present)
        for module_ in (*net.blocks, net):
            fully_shard(module_, mesh=models.mesh(), mp_policy=models.BF16)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(number: int) -> None:
            net.copies.clear()
            net.seen.clear()
            net(models.batch(number, 64).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for number in range(2):
            step(number)
        before = growth.held()
        for number in range(steps):
            step(number)
        return growth.grown(before, growth.held()), [
            type(weight).__name__ for weight in net.seen if weight._transpose is not None
        ]


pytestmark = needs_te

FORMATS = (*RECIPES, "mxfp8:block=32x32", "nvfp4:exact_in_fp8")
EVERY_MODULE = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("fmt", FORMATS)
def test_modules_compute_with_their_own_tensors(ranks: Ranks, world: int, fmt: str) -> None:
    """Class, quantizer and bytes, over FSDP2's memory, after each step; nothing stays once it is resharded."""
    kinds = EVERY_MODULE if fmt == "fp8_current" else ("Linear", "LayerNormLinear")
    for wrong in ranks(world)(train, fmt, kinds):
        assert wrong == []


def test_copies_that_the_host_leaves_are_dropped(ranks: Ranks) -> None:
    """GroupedLinear never clears the transposes that its backward pass makes, here no module does; weights may be frozen."""
    for wrong in ranks(1)(train, "fp8_current", ("Linear", "GroupedLinear"), False):
        assert wrong == []
    assert ranks(1)(frozen) == [[]]


def test_inputs_that_live_as_long_as_the_model(ranks: Ranks) -> None:
    """A parameter as the input: each pass drops its copies, and no pass leaves a hook more."""
    for grown, copies in ranks(2)(of_long_lived_inputs, 10):
        assert not grown and not copies


def test_a_class_that_derives_from_the_hosts() -> None:
    """As Megatron's TELinear does: its forward pass is the host's, and so is what it multiplies."""
    with host():
        layer = type("Mine", (module("module.linear").Linear,), {})(64, 64, device="cpu", params_dtype=torch.float32)
        model = nn.ModuleDict({"layer": layer})
        with pytest.raises(
            ValueError, match="weight of a Mine is multiplied as one of transformer_engine's own tensors"
        ):
            zerocast.fsdp2.prepare(model, zerocast.Recipe({"*weight": "fp8_current"}))
        assert not isinstance(layer.weight, MasterParameter)
        presented = integration().present(layer, "weight", layer.weight)
        assert type(presented).__name__ == "GatheredWeight"


@on_ranks(2)
@pytest.mark.parametrize("fmt", ["fp8_current", "mxfp8"])
def test_weights_that_stay_gathered(fmt: str) -> None:
    """What TransformerEngine clears after a backward pass is there again in the next one; after a step copies are new."""
    with host():
        net = build(fmt, reshard_after_forward=False)
        net.set_reshard_after_backward(False)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e4)
        for step in range(2):
            for _ in range(2):
                net(models.batch(step, 64).bfloat16().requires_grad_()).float().square().mean().backward()
            before, after = net.copies[-4:], net.copies[-8:-4]
            for one, other in zip(before, after, strict=True):
                casts.assert_same_bytes(one, other, f"{fmt}, step {step}")
            optimizer.step()
            optimizer.zero_grad()
            net.set_reshard_after_backward(False)
        assert (net.copies[0]["columnwise_data"] != net.copies[-4]["columnwise_data"]).any()


def test_meta_device_and_recomputation(ranks: Ranks) -> None:
    """`reset_parameters` of sharded modules writes masters; a recomputed forward pass changes nothing."""
    for wrong in [*ranks(2)(by_meta_device), *ranks(2)(recomputed)]:
        assert wrong == []


@pytest.mark.notices(
    "te.autocast computes in another format than that of the gathered weights",
    where="TransformerEngine",
    answer="raises before the pass, and names both formats",
)
def test_the_recipe_in_use_must_be_that_of_the_weights(ranks: Ranks) -> None:
    """Each recipe takes the weights that it would cast, and no others, whatever its options are."""
    for fmt, recipe in RECIPES.items():
        assert ranks(1)(under_recipe, fmt, recipe, {}) == [""]
    (error,) = ranks(1)(under_recipe, "fp8_block", "Float8CurrentScaling", {})
    assert "is gathered as fp8_block" in error
    assert "fp8_current: pass that format to zerocast.fsdp2.prepare" in error
    (error,) = ranks(1)(under_recipe, "nvfp4", "NVFP4BlockScaling", {"disable_2d_quantization": True})
    assert "16x16 tiles" in error


def refusal(layer: Any, fmt: str = "fp8_current") -> str:
    """The error of `prepare`, which leaves the model as it was."""
    model = nn.Module()
    model.layer = layer
    before = dict(model.named_parameters())
    with pytest.raises((TypeError, ValueError)) as caught:
        zerocast.fsdp2.prepare(model, zerocast.Recipe({"*weight*": fmt}), present=integration().present)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not layer._forward_pre_hooks
    return str(caught.value)


def test_exact_scales_are_said_not_to_be_the_hosts(caplog: pytest.LogCaptureFixture) -> None:
    """Once, since its own quantizer, which the gathered tensors have, would make other bytes of the same masters."""
    with host(), caplog.at_level("INFO"):
        gathered = importlib.import_module("zerocast.integrations.transformer_engine.gathered_weights")
        gathered._log_exact_scales.cache_clear()
        for fmt, count in (("nvfp4", 0), ("nvfp4:exact_in_fp8", 1), ("nvfp4:exact_in_fp8", 1)):
            gathered.GatheredWeight().check(zerocast.get_format(fmt))
            assert (
                len([line for line in caplog.messages if "NVFP4Quantizer would make the scales of plain" in line])
                == count
            )


def test_what_is_refused() -> None:
    """Before anything has changed, with what to do instead."""
    with host():
        linear = module("module.linear").Linear
        options: dict[str, Any] = {"device": "cpu", "params_dtype": torch.float32}
        split = linear(64, 96, bias=False, parameters_split=("query", "key", "value"), **options)
        assert "fuse_qkv_params=True" in refusal(split)
        assert "fuse_wgrad_accumulation=False" in refusal(linear(64, 64, fuse_wgrad_accumulation=True, **options))
        quantized = linear(64, 64, **options)
        quantized.primary_weights_in_fp8 = True
        assert "outside of te.quantized_model_init" in refusal(quantized)
        assert "no tensor that holds mxfp4" in refusal(linear(64, 64, **options), "mxfp4")
