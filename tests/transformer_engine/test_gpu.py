"""On GPUs, with TransformerEngine's compiled extension: the bytes that it leaves are those that zerocast leaves."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerocast
from tests import casts, devices
from tests.casts import Weight
from tests.transformer_engine import tensors
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration, needs_te
from tests.transformer_engine.tensors import Casting, bytes_of
from tests.workers import Ranks
from zerocast import get_format
from zerocast.formats import layout

Both = tuple[list[casts.Bytes], list[casts.Bytes]]


def theirs() -> Any:
    import transformer_engine.pytorch.tensor.utils as module

    return module


def cast_by_both(cases: tuple[Weight, ...], steps: int = 2) -> tuple[Both, list[str]]:
    """Bytes of all tensors after the last of some casts, gathers and transposes, by TransformerEngine and by zerocast."""
    with host_on_cpu():
        runs = Casting(cases, "cuda", columnwise=True), Casting(cases, "cuda", columnwise=True)
        for calls, run in zip((theirs(), integration()), runs, strict=True):
            run.group = dist.group.WORLD
            for step in range(steps):
                masters, starts = run.masters(step)
                for i, one in enumerate(run.tensors):  # TransformerEngine takes one FP8 dtype a call
                    calls.quantize_master_weights(
                        [one], masters[i : i + 1], starts[i : i + 1], run.group, manual_post_all_gather_processing=True
                    )
                run.gather()
                for one in run.tensors:
                    calls.post_all_gather_processing([one])
        torch.cuda.synchronize()
        found = [[bytes_of(one) for one in run.tensors] for run in runs]
        return (found[0], found[1]), runs[1].complaints


def host_makes_copies(cases: tuple[Weight, ...]) -> list[casts.Bytes]:
    """A cast with the default, automatic post-processing; then what TransformerEngine's forward pass asks of a weight."""
    with host_on_cpu():
        casting = Casting(cases, "cuda", columnwise=True)
        casting.group = dist.group.WORLD
        casting.cast()
        casting.gather()
        for one in casting.tensors:
            one.update_usage(rowwise_usage=True, columnwise_usage=True)
        torch.cuda.synchronize()
        return [bytes_of(one) for one in casting.tensors]


def train(recipe: str, by_zerocast: bool, steps: int = 4) -> tuple[list[float], casts.Bytes]:
    """Losses of a loop over TransformerEngine's layers with FP8 weights and FP32 masters cut over the ranks; the last bytes."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    with host_on_cpu():
        torch.manual_seed(7)
        chosen, calls = getattr(recipes, recipe)(), integration() if by_zerocast else theirs()
        with te.quantized_model_init(enabled=True, recipe=chosen, preserve_high_precision_init_val=True):
            layers = [te.Linear(256, 256, bias=False, params_dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        weights = [layer.weight for layer in layers]
        rank, world, losses = dist.get_rank(), dist.get_world_size(), []
        share = weights[0].numel() // world
        starts = [rank * share] * len(weights)
        whole = [weight.get_high_precision_init_val().cuda().float().view(-1) for weight in weights]
        masters: list[Tensor] = [one[start : start + share].clone() for one, start in zip(whole, starts, strict=True)]
        x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
        for _ in range(steps):
            with te.autocast(enabled=True, recipe=chosen):
                y = layers[1](layers[0](x))
            loss = (y.float() - 1).square().mean()
            loss.backward()
            if by_zerocast and losses:  # the forward pass has made the columnwise copies of the last cast
                zerocast.verify(calls.masters_of(weights, dist.group.WORLD)).raise_for_differences()
            losses.append(float(loss))
            for weight, master, start in zip(weights, masters, starts, strict=True):
                master -= 10.0 * weight.grad.float().view(-1)[start : start + share]
                weight.grad = None
            calls.quantize_master_weights(weights, masters, starts, dist.group.WORLD)
            for weight in weights:
                data = weight._data if hasattr(weight, "_data") else weight._rowwise_data
                part = data.view(-1).chunk(world)[rank].clone()
                dist.all_gather_into_tensor(data.view(-1), part)
        return losses, bytes_of(weights[0])


def _transformer_layer(dtype: torch.dtype) -> Any:
    import transformer_engine.pytorch as te

    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True, "params_dtype": dtype}
    return te.TransformerLayer(256, 512, 4, device="cuda", **options)


def _initial() -> dict[str, Tensor]:
    torch.manual_seed(11)
    return {
        name: parameter.detach().clone() for name, parameter in _transformer_layer(torch.float32).named_parameters()
    }


def _losses(layer: Any, chosen: Any, step: Any, steps: int, recompute: bool = False) -> list[float]:
    """Passes of two microbatches each, equal on all ranks, and `step` after them."""
    import transformer_engine.pytorch as te

    torch.manual_seed(3)
    # Without `requires_grad` te.checkpoint has no backward pass.
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    batches, losses = [torch.randn(64, 2, 256, **like) for _ in range(2)], []
    for _ in range(steps):
        for microbatch, x in enumerate(batches):
            with te.autocast(enabled=True, recipe=chosen):
                first = {"is_first_microbatch": microbatch == 0}
                y = te.checkpoint(layer, x, **first) if recompute else layer(x, **first)
            loss = (y.float() - 1).square().mean()
            loss.backward()
        losses.append(float(loss))
        step()
    return losses


def train_gathered(recipe: str, fmt: str, steps: int = 4, recompute: bool = False) -> list[float]:
    """Losses of a TransformerLayer under FSDP2, whose weights zerocast gathers as TransformerEngine's tensors, bytes verified."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformer_engine.common import recipe as recipes

    with host_on_cpu():
        layer, start = _transformer_layer(torch.float32), _initial()
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(start[name])
        weights = [name for name, parameter in start.items() if parameter.dim() == 2]
        zerocast.fsdp2.prepare(layer, zerocast.Recipe(dict.fromkeys(weights, fmt)), present=integration().present)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(layer, mesh=init_device_mesh("cuda", (dist.get_world_size(),)), mp_policy=policy)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()
            zerocast.verify(layer).raise_for_differences()

        return _losses(layer, getattr(recipes, recipe)(), step, steps, recompute)


def train_primary(recipe: str, steps: int = 4) -> list[float]:
    """Losses of the same layer, whose weights TransformerEngine casts from masters, whole on every rank."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    with host_on_cpu():
        start, chosen = _initial(), getattr(recipes, recipe)()
        with te.quantized_model_init(enabled=True, recipe=chosen):
            layer = _transformer_layer(torch.bfloat16)
        alone, _ = dist.new_subgroups(group_size=1)
        parameters = dict(layer.named_parameters())
        weights = [name for name, parameter in parameters.items() if parameter.dim() == 2]

        def cast() -> None:
            held = [parameters[name] for name in weights]
            theirs().quantize_master_weights(
                held, [start[name].view(-1) for name in weights], [0] * len(weights), alone
            )
            with torch.no_grad():
                for name in set(parameters) - set(weights):
                    parameters[name].copy_(start[name])

        def step() -> None:
            for name, parameter in parameters.items():
                start[name] -= parameter.grad.float()
                parameter.grad = None
            cast()

        cast()
        return _losses(layer, chosen, step, steps)


pytestmark = [needs_te, pytest.mark.te, *devices.gpus(1)]

SHAPES = ((288, 128), (768, 288), (128, 768), (32, 4096))
ONLY_ZEROCAST = ("nvfp4",)  # TransformerEngine's FP4 conversion is for Blackwell
BY_BOTH = ("fp8_delayed", "fp8_current", "fp8_current:element=e5m2,power_of_2_scale=True", "fp8_block", "mxfp8")
CONTENTS = ("lcg", "normal", "wide", "zero", "some_zero")
WORLDS = [1, pytest.param(2, marks=devices.gpus(2))]


def cut(world: int, numel: int, offset: int) -> tuple[tuple[int, int], ...]:
    """Near-even spans of `world` ranks."""
    inner = [numel * rank // world + offset for rank in range(1, world)]
    return tuple(zip([0, *inner], [*inner, numel], strict=True))


def cases(world: int, formats: tuple[str, ...], offset: int = 0) -> tuple[Weight, ...]:
    """Every format, shape and content."""
    return tuple(
        Weight(fmt, shape, cut(world, shape[0] * shape[1], offset), torch.bfloat16, content, seed)
        for fmt in formats
        for shape in SHAPES
        for seed, content in enumerate(CONTENTS)
    )


def without_padding(case: Weight, found: casts.Bytes) -> casts.Bytes:
    """TransformerEngine leaves the padding of columnwise scales as it was allocated."""
    fmt, name = get_format(case.fmt), "columnwise_scale_inv"
    if fmt.name == "fp8_block" and name in found:
        across = -(-case.shape[0] // 128)
        shape = layout.buffers(fmt, layout.matrix_shape(case.shape), case.nominal)[name]
        assert shape is not None
        found[name] = np.ascontiguousarray(found[name].view(np.float32).reshape(shape.shape)[:, :across]).view(np.uint8)
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("fmt", BY_BOTH)
def test_bytes_are_those_of_transformer_engine(gpu_ranks: Ranks, world: int, fmt: str) -> None:
    """Data, scales and their padding, amaxes, columnwise copies, after two steps, from masters cut anywhere."""
    drawn = cases(world, (fmt,), offset=5 if fmt != "fp8_block" else 64)
    for (their, our), complaints in gpu_ranks(world)(cast_by_both, drawn, timeout=300.0):
        assert not complaints
        for case, expected, found in zip(drawn, their, our, strict=True):
            assert set(found) == set(expected)
            casts.assert_same_bytes(without_padding(case, found), without_padding(case, expected), str(case))


@pytest.mark.shows(host="TransformerEngine", parallel="data", formats=(*BY_BOTH, *ONLY_ZEROCAST))
@pytest.mark.parametrize("world", WORLDS)
def test_every_format_on_a_gpu(gpu_ranks: Ranks, world: int) -> None:
    """NVFP4 too, on any GPU, K of any multiple of 16, odd cuts: the bytes of the unsharded reference."""
    drawn = cases(world, (*BY_BOTH, "nvfp4", "identity"), offset=7)
    drawn += tuple(Weight("nvfp4", (144, 272), cut(world, 144 * 272, 1), torch.bfloat16, "lcg", s) for s in range(3))
    for outcome in gpu_ranks(world)(tensors.cast_and_gather, drawn, 1, "cuda", timeout=300.0):
        assert not outcome.complaints
        for case, found in zip(drawn, outcome.steps[0], strict=True):
            expected = casts.expected_of_shards(case)
            casts.assert_same_bytes(found, {name: expected[name] for name in expected if name in found}, str(case))


def test_the_host_makes_the_copies_by_default(gpu_ranks: Ranks) -> None:
    """Automatic post-processing: what TransformerEngine's own kernels make of the rowwise codes is what zerocast would."""
    drawn = cases(1, ("fp8_delayed", "fp8_current", "fp8_block", "nvfp4"))
    (found,) = gpu_ranks(1)(host_makes_copies, drawn)
    for case, held in zip(drawn, found, strict=True):
        expected = casts.expected_of_shards(case)
        names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data")
        casts.assert_same_bytes(held, {name: expected[name] for name in names}, str(case))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
def test_another_import_and_the_same_training(gpu_ranks: Ranks, world: int, recipe: str) -> None:
    """Losses and bytes of a loop over TransformerEngine's layers, cast by it and by zerocast, are equal to the bit."""
    expected = gpu_ranks(world)(train, recipe, False, timeout=300.0)
    found = gpu_ranks(world)(train, recipe, True, timeout=300.0)
    for (their_losses, their_bytes), (losses, held) in zip(expected, found, strict=True):
        assert losses == their_losses
        assert losses[-1] < losses[0]
        for name in ("rowwise_data", "rowwise_scale_inv"):
            casts.assert_same_bytes(held, {name: their_bytes[name]}, recipe)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("recipe", "fmt"),
    [("Float8CurrentScaling", "fp8_current"), ("Float8BlockScaling", "fp8_block")],
)
def test_a_transformer_layer_under_fsdp2(gpu_ranks: Ranks, world: int, recipe: str, fmt: str) -> None:
    """Gathered bytes computed with by TransformerEngine's modules: verified, with the losses of its own FP8 primary weights.

    Attention may add in another order from run to run. Activation recomputation changes no more than that.
    """
    expected = gpu_ranks(world)(train_primary, recipe, timeout=300.0)
    for recompute in (False, True):
        found = gpu_ranks(world)(train_gathered, recipe, fmt, 4, recompute, timeout=300.0)
        for theirs, ours in zip(expected, found, strict=True):
            assert ours[-1] < ours[0]
            np.testing.assert_allclose(ours, theirs, rtol=2e-3)
