"""What `attach` does with TransformerEngine's tensors beyond their bytes, on the ranks of a pool."""

import gc
import importlib
import types
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.megatron import te
from tests.megatron.ranks_host import host
from tests.megatron.training import ALL_LAYERS, Case, build, build_attached
from tests.transformer_engine import tensors
from tests.workers import error_of
from zerocast import get_format, verify
from zerocast.distributed.group import Group
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import host as megatron_names
from zerocast.integrations.megatron.primary import weight_of
from zerocast.integrations.megatron.unattached import RefusedMethod


def train_delayed(formats: str, layers: str) -> None:
    """TransformerEngine sets scales and rolls histories, in the third step those of new quantizers; a cast scales by what is there,
    and raises the amax. One all-reduce serves all formats.
    """
    reduce = Group.all_reduce_max
    with host(layers):
        run, attached = build_attached(Case(formats, te=layers))
        for number in range(5):
            quantizers = {name: w._quantizer for name, w in run.te_tensors.items() if hasattr(w._quantizer, "scale")}
            scales = {name: float(quantizer.scale) for name, quantizer in quantizers.items()}
            with mock.patch.object(Group, "all_reduce_max", autospec=True, side_effect=reduce) as reduced:
                run.step(number)
            assert reduced.call_count == 1
            masters = run.masters()
            for name, quantizer in quantizers.items():
                assert float(quantizer.amax) == float(masters[name].to(run.weights[name].dtype).abs().max())
            assert te.move_scales(run.te_tensors) == scales
            assert not run.stale_bytes(scales) and verify(attached).ok
            for weight in run.te_tensors.values() if number == 2 else ():
                one = weight._quantizer.copy()
                if hasattr(one, "scale"):  # scaling is delayed: with buffers of its own
                    one.scale, one.amax = one.scale / 2, torch.zeros_like(one.amax)
                weight.update_quantizer(one)


def flip_every_buffer(formats: str) -> None:
    """Each flipped byte makes one difference, of the right name."""
    with host(ALL_LAYERS):
        run, attached = build_attached(Case(formats, te=ALL_LAYERS))
        for number in range(2):
            run.step(number)
        assert verify(attached).ok
        count, rank = 0, dist.get_rank()
        for name, weight in run.ddp.named_parameters():
            if name.removeprefix("module.") not in run.te_tensors:
                continue
            for buffer, tensor in tensors.buffers(weight).items():
                if buffer == "columnwise_scale_inv" and tensor.shape == (1,):
                    continue  # one scale serves both directions
                if buffer == "columnwise_data":  # TransformerEngine may make it in other memory
                    tensor = tensor.detach().clone()
                    setattr(weight, "_transpose" if hasattr(weight, "_transpose") else "_columnwise_data", tensor)
                at = tensor.nbytes - 1
                flat = tensor.detach().view(-1).view(torch.uint8)
                flat[at] ^= rank == 1
                (found,) = verify(attached).differences[:1]
                assert (found.name, found.rank, found.buffer, found.wrong, found.offset) == (name, 1, buffer, 1, at)
                flat[at] ^= rank == 1
                count += 1
        assert verify(attached).ok and count > 12


def break_a_gather() -> None:
    """After a gather that raised, a forward pass, one of a single layer, and a save raise; a refresh mends it."""
    with host(ALL_LAYERS):
        run, attached = build_attached(Case("te", te=ALL_LAYERS))
        run.step(0)
        buffers = importlib.import_module(megatron_names.BUFFER)
        broken = mock.patch.object(buffers, "dist_all_gather_func", side_effect=RuntimeError("no"))
        with broken, pytest.raises(RuntimeError, match="no"):
            run.force_sync()
        layer = run.ddp.module.layers[0]
        x = torch.zeros(1, layer.weight.shape[1], dtype=torch.bfloat16, device=layer.weight.device)
        for call in (
            lambda: run.forward_and_backward(1),
            lambda: layer(x),
            lambda: integration.dequantize_(run.ddp.module.sharded_state_dict()),
        ):
            assert "an all-gather failed partway" in error_of(call)
        attached.refresh()
        run.step(1)
        assert not run.stale_bytes()


def detach(case: Case) -> None:
    """The host is as it was before it was attached, and can be attached again. Its gathers make its own copies meanwhile."""
    with case.host():
        with integration.quantized_params():
            run = build(case)
        owners = [*run.optimizer.chained_optimizers, *run.ddp.bucket_groups]
        tensors = run.te_tensors.values()

        def held() -> list[Any]:
            """Replaced methods, hooks and fields."""
            hooks = [(len(m._forward_pre_hooks), len(m._load_state_dict_pre_hooks)) for m in run.ddp.modules()]
            return [*map(methods_of, owners), *hooks, *(sorted(vars(tensor)) for tensor in tensors)]

        before = held()
        attached = integration.attach(run.optimizer, run.ddp)
        run.step(0)
        twins = [weakref.ref(weight_of(tensor)) for tensor in tensors]
        fp8 = importlib.import_module(megatron_names.FP8)
        with mock.patch.object(fp8, "te_post_all_gather_processing", create=True) as theirs:
            run.force_sync()
            assert not theirs.called
            attached.detach()
            gc.collect()
            assert not any(twin() for twin in twins)
            if tensors:
                run.force_sync()
            asked = {id(param) for call in theirs.call_args_list for param in call.args[0]}
        assert asked == set(map(id, tensors))
        assert held() == before
        # Megatron itself steps over TransformerEngine's tensors meanwhile, so those are not attached again.
        if not tensors:
            integration.attach(run.optimizer, run.ddp)


def methods_of(owner: Any) -> set[tuple[str, Any]]:
    """What is replaced on an instance. What refuses there is a new object after each attachment."""
    held = [(name, value) for name, value in vars(owner).items() if callable(value)]
    return {(name, RefusedMethod if isinstance(value, RefusedMethod) else id(value)) for name, value in held}


TILES = "mxfp8:block=32x32"


def train_tiles(overlap: bool) -> None:
    """MXFP8 in tiles of 32x32 has one set of codes, in a byte buffer, and equal values in both directions. That holds after steps
    between which the host moves its memory.
    """
    with host(ALL_LAYERS):
        run, attached = build_attached(Case("tiles", overlap, te=ALL_LAYERS))
        tiles = [weight for weight in run.te_tensors.values() if str(te.format_of(weight)) == TILES]
        assert len(tiles) == 2
        for number in range(4):
            run.step(number)
            run.force_sync()
            assert not run.stale_bytes()
            buckets = [bucket for group in run.ddp.bucket_groups for bucket in group.buckets]
            places = {param: bucket for bucket in buckets for param in bucket.params_list}
            for weight in tiles:
                data, grads = places[weight].param_data, places[weight].grad_data
                storages = [t.untyped_storage().data_ptr() for t in (weight._rowwise_data, data, grads)]
                assert data.dtype == torch.uint8 and storages[0] == storages[1] != storages[2]
                assert weight._columnwise_data.data_ptr() == weight._rowwise_data.data_ptr()
                assert torch.equal(tensors.dequantized(weight, False), tensors.dequantized(weight, True))
                if number == 1:  # scales elsewhere, and codes as something that copies a weight leaves them
                    for name in ("_rowwise_scale_inv", "_columnwise_scale_inv", "_columnwise_data"):
                        setattr(weight, name, getattr(weight, name).clone())
                    assert verify(attached).ok


def check_recipes() -> None:
    """Weights alone have tiles inside `square_mxfp8()`, where other recipes are as they were: Megatron makes the recipe, and
    TransformerEngine quantizers of an input, a weight and a gradient.
    """
    with host(ALL_LAYERS):
        fp8 = importlib.import_module(megatron_names.FP8)
        recipes = importlib.import_module("transformer_engine.common.recipe")

        def get_fp8_recipe(config: Any) -> Any:
            """Megatron defines it so where it has found TransformerEngine."""
            kind = {"mxfp8": recipes.MXFP8BlockScaling, "blockwise": recipes.Float8BlockScaling}[config.fp8_recipe]
            return kind(fp8_format=recipes.Format.E4M3)

        with mock.patch.object(fp8, "get_fp8_recipe", fp8.get_fp8_recipe if fp8.HAVE_TE else get_fp8_recipe):
            before = _recipe(fp8, "mxfp8")
            with integration.square_mxfp8():
                assert _recipe(fp8, "mxfp8") == ("MXFP8BlockScaling", [False, True, False])
                assert _recipe(fp8, "blockwise") == ("Float8BlockScaling", [False] * 3)
            assert _recipe(fp8, "mxfp8") == before == ("MXFP8BlockScaling", [False] * 3)


def _recipe(fp8: Any, name: str) -> tuple[str, list[bool]]:
    """The recipe, and whether its quantizers make tiles."""
    quantization = importlib.import_module("transformer_engine.pytorch.quantization")
    config = types.SimpleNamespace(fp8="e4m3", fp8_recipe=name, fp8_dot_product_attention=False)
    recipe, made = fp8.get_fp8_recipe(config), []
    for mode, tensors_of in (("forward", ("input", "weight")), ("backward", ("grad_output",))):
        roles = [quantization.QuantizerRole("linear", tensor) for tensor in tensors_of]
        state = quantization.RecipeState.create(
            recipe, mode=mode, num_quantizers=len(roles), device=torch.device("cpu"), roles=roles
        )
        made += [getattr(one, "with_2d_quantization", False) for one in state.make_quantizers()]
    return type(recipe).__name__, made


def grouped(fmt: str) -> Any:
    """A tensor for two experts, as TransformerEngine allocates it for moe_single_grouped_weight."""
    kind: Any = importlib.import_module("transformer_engine.pytorch.tensor.grouped_tensor").GroupedTensor
    return kind.make_grouped_tensor_with_shapes(
        num_tensors=2,
        shapes=[(32, 64)] * 2,
        quantizer=tensors.quantizer(get_format(fmt)),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
    )
