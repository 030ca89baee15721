"""What `attach` does with TransformerEngine's tensors beyond their bytes, on the ranks of a pool."""

import contextlib
import gc
import importlib
import types
import weakref
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.megatron import te
from tests.megatron.ranks_host import host
from tests.megatron.training import (
    ALL_LAYERS,
    Case,
    Model,
    build,
    build_attached,
    build_chunk,
    build_optimizer,
    configuration,
    wrap,
)
from tests.transformer_engine import hybrids, tensors
from tests.workers import error_of
from zerocast import get_format, verify
from zerocast.distributed.group import Group
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import host as megatron_names
from zerocast.integrations.megatron.primary import weight_of
from zerocast.integrations.megatron.unattached import RefusedMethod


def steps(formats: str, layers: str) -> list[tuple[int, dict[str, int], bool, list[str]]]:
    """By step: all-reduces of the cast, stale bytes, whether verify is content, weights whose amax is not that of the master."""
    found, reduce = [], Group.all_reduce_max
    with host(layers):
        run, attached = build_attached(Case(formats, te=layers))
        for number in range(5):
            scales = {
                name: float(w._quantizer.scale) for name, w in run.te_tensors.items() if hasattr(w._quantizer, "scale")
            }
            with mock.patch.object(Group, "all_reduce_max", autospec=True, side_effect=reduce) as reduced:
                run.step(number)
            masters = run.masters()
            amaxes = {
                name: masters[name].to(w.dtype).abs().max() for name, w in run.te_tensors.items() if name in scales
            }
            wrong = [name for name, amax in amaxes.items() if float(run.weights[name]._quantizer.amax) != float(amax)]
            assert te.move_scales(run.te_tensors) == scales
            found.append((reduced.call_count, run.stale_bytes(scales), verify(attached).ok, wrong))
            for weight in run.te_tensors.values() if number == 2 else ():
                one = weight._quantizer.copy()
                if hasattr(one, "scale"):  # scaling is delayed: with buffers of its own
                    one.scale, one.amax = one.scale / 2, torch.zeros_like(one.amax)
                weight.update_quantizer(one)
    return found


def every_buffer(formats: str) -> tuple[bool, list[Any], list[Any]]:
    """Whether all is well after two steps; the one difference that each flipped byte makes, and should make."""
    with host(ALL_LAYERS):
        run, attached = build_attached(Case(formats, te=ALL_LAYERS))
        for number in range(2):
            run.step(number)
        quiet, found, wanted = verify(attached), [], []
        for name, weight in run.ddp.named_parameters():
            if name.removeprefix("module.") not in run.te_tensors:
                continue
            for buffer, tensor in tensors.buffers(weight).items():
                if buffer == "columnwise_scale_inv" and tensor.shape == (1,):
                    continue  # one scale serves both directions
                if buffer == "columnwise_data":  # as where TransformerEngine has made it anew
                    tensor = tensor.detach().clone()
                    setattr(weight, "_transpose" if hasattr(weight, "_transpose") else "_columnwise_data", tensor)
                at = tensor.numel() * tensor.element_size() - 1
                flat = tensor.detach().view(-1).view(torch.uint8)
                flat[at] ^= dist.get_rank() == 1
                found += [(d.name, d.rank, d.buffer, d.wrong, d.offset) for d in verify(attached).differences[:1]]
                wanted.append((name, 1, buffer, 1, at))
                flat[at] ^= dist.get_rank() == 1
        return quiet.ok and verify(attached).ok, found, wanted


def partial() -> list[str]:
    """After a gather that raised: what a forward pass says, one of a single layer, a save; stale bytes after a refresh."""
    with host(ALL_LAYERS):
        run, attached = build_attached(Case("te", te=ALL_LAYERS))
        run.step(0)
        with mock.patch.object(
            importlib.import_module(megatron_names.BUFFER), "dist_all_gather_func", side_effect=RuntimeError("no")
        ):
            said = [error_of(run.force_sync)]
        layer = run.ddp.module.layers[0]
        x = torch.zeros(1, layer.weight.shape[1], dtype=torch.bfloat16, device=layer.weight.device)
        said.append(error_of(lambda: run.forward_and_backward(1)))
        said.append(error_of(lambda: layer(x)))
        said.append(error_of(lambda: integration.dequantize_(run.ddp.module.sharded_state_dict())))
        attached.refresh()
        run.step(1)
        return [*said, *map(str, run.stale_bytes())]


def detached(case: Case) -> list[str]:
    """What differs in the host afterwards from what was there before, what an attachment again says, and whose copies a gather
    makes meanwhile.
    """
    with case.host():
        with integration.quantized_params():
            run = build(case)
        owners = [*run.optimizer.chained_optimizers, *run.ddp.bucket_groups]
        tensors = run.te_tensors.values()

        def held() -> list[Any]:
            """Replaced methods (what refuses is a new object after each attachment), hooks and fields."""
            methods = [
                {
                    (name, RefusedMethod if isinstance(value, RefusedMethod) else id(value))
                    for name, value in vars(owner).items()
                    if callable(value)
                }
                for owner in owners
            ]
            hooks = [(len(m._forward_pre_hooks), len(m._load_state_dict_pre_hooks)) for m in run.ddp.modules()]
            return [*methods, *hooks, *(sorted(vars(tensor)) for tensor in tensors)]

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
        changed = [str(was) for was, now in zip(before, held(), strict=True) if was != now]
        # Megatron itself steps over TransformerEngine's tensors meanwhile, so those are not attached again.
        again = "" if tensors else error_of(lambda: integration.attach(run.optimizer, run.ddp))
        return [*changed, *([again] if again else [])]


TILES = "mxfp8:block=32x32"


def one_byte_an_element(overlap: bool) -> list[str]:
    """What is wrong with the memory of tiles after some steps, between which the host moves it: codes outside of a buffer of bytes,
    a second set of them, scales of another shape than TransformerEngine's, directions of other values, stale bytes.
    """
    with host(ALL_LAYERS):
        run, attached = build_attached(Case("tiles", overlap, te=ALL_LAYERS))
        found = []
        for number in range(4):
            run.step(number)
            run.force_sync()
            found += map(str, run.stale_bytes())
            places = {
                param: bucket
                for group in run.ddp.bucket_groups
                for bucket in group.buckets
                for param in bucket.params_list
            }
            tiles = {name: weight for name, weight in run.te_tensors.items() if str(te.format_of(weight)) == TILES}
            assert len(tiles) == 2
            for name, weight in tiles.items():
                data, grads = places[weight].param_data, places[weight].grad_data
                inside = weight._rowwise_data.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
                if (
                    data.dtype != torch.uint8
                    or not inside
                    or data.untyped_storage().data_ptr() == grads.untyped_storage().data_ptr()
                ):
                    found.append(f"{name} lies in {data.dtype}")
                if weight._columnwise_data.data_ptr() != weight._rowwise_data.data_ptr():
                    found.append(f"{name} has two sets of codes")
                if not torch.equal(tensors.dequantized(weight, False), tensors.dequantized(weight, True)):
                    found.append(f"{name} has directions of other values")
                if number == 1:  # scales elsewhere, and as something that copies a weight leaves it
                    weight._rowwise_scale_inv, weight._columnwise_scale_inv = (
                        scales.clone() for scales in (weight._rowwise_scale_inv, weight._columnwise_scale_inv)
                    )
                    weight._columnwise_data = weight._columnwise_data.clone()
                    assert verify(attached).ok
        return found


def tiles_without_an_attachment() -> list[str]:
    """What a step says before `attach` and after `detach`; what building says without an optimizer, or with one of another context;
    bytes that have changed meanwhile.
    """
    case = Case("tiles", te=ALL_LAYERS)
    with host(ALL_LAYERS):
        with integration.quantized_params():
            run = build(case)
        run.forward_and_backward(0)
        before = te.bytes_of(run.weights["layers.0.weight"])[1]
        said = [error_of(run.optimizer.step)]
        integration.attach(run.optimizer, run.ddp).detach()
        said.append(error_of(run.optimizer.step))
        after = te.bytes_of(run.weights["layers.0.weight"])[1]

        def half_built() -> Any:
            with integration.quantized_params():
                return build_chunk(case)

        def in_two_contexts() -> None:
            chunks = []
            with contextlib.suppress(RuntimeError), integration.quantized_params():
                chunks.append(build_chunk(case))
            with integration.quantized_params():
                build_optimizer(case, chunks)

        said += [error_of(half_built), error_of(in_two_contexts)]
        return [*said, *(name for name in before if (before[name] != after[name]).any())]


def recipes_by_megatron() -> list[tuple[str, list[bool]]]:
    """(recipe, whether its quantizers of an input, a weight and a gradient make tiles), as Megatron makes the recipe and
    TransformerEngine the quantizers: outside of `square_mxfp8()`, inside, of another recipe inside, and afterwards.
    """
    with host(ALL_LAYERS):
        fp8 = importlib.import_module(megatron_names.FP8)
        recipes = importlib.import_module("transformer_engine.common.recipe")

        def get_fp8_recipe(config: Any) -> Any:
            """As Megatron defines it where it has found TransformerEngine."""
            kind = {"mxfp8": recipes.MXFP8BlockScaling, "blockwise": recipes.Float8BlockScaling}[config.fp8_recipe]
            return kind(fp8_format=recipes.Format.E4M3)

        with mock.patch.object(fp8, "get_fp8_recipe", fp8.get_fp8_recipe if fp8.HAVE_TE else get_fp8_recipe):
            found = [_recipe(fp8, "mxfp8")]
            with integration.square_mxfp8():
                found += [_recipe(fp8, "mxfp8"), _recipe(fp8, "blockwise")]
            return [*found, _recipe(fp8, "mxfp8")]


def _recipe(fp8: Any, name: str) -> tuple[str, list[bool]]:
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


def of_a_kind(kind: str) -> str:
    """What is said of tensors that have no place in a byte buffer: where they are built, or where they are attached."""
    with host(ALL_LAYERS):

        def made(fmt: str, value: torch.Tensor, device: torch.device) -> Any:
            case = tensors.Weight(fmt.partition(":")[0], tuple(value.shape), ((0, value.numel()),), value.dtype)
            if kind == "hybrid":
                return torch.nn.Parameter(hybrids.hybrid(case, case))
            one = tensors.tensor(case, str(device))
            return torch.nn.Parameter(one)

        with mock.patch.object(te, "parameter", made):
            return error_of(lambda: build_attached(Case("fp8_current" if kind == "hybrid" else "mxfp8", te="0")))


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


def grouped_in_a_model(fmt: str) -> str:
    """What is said where a layer of TransformerEngine's with one weight for two experts is wrapped."""
    with host(ALL_LAYERS), integration.quantized_params():
        model = Model(configuration(), ALL_LAYERS)
        model.experts = torch.nn.Module()
        model.experts.weight = torch.nn.Parameter(grouped(fmt))
        return error_of(lambda: wrap(Case(te=ALL_LAYERS), configuration(), model))


def changed_afterwards(formats: str, change: str) -> str:
    """What a step says where TransformerEngine has changed a tensor since it was attached."""
    with host(ALL_LAYERS):
        run, _ = build_attached(Case(formats, te=ALL_LAYERS))
        run.step(0)
        weight = next(iter(run.te_tensors.values()))
        if change == "option":
            weight._quantizer.stochastic_rounding = True
        elif change == "codes":
            weight._rowwise_data = None
        elif change == "tiles":
            weight._quantizer.with_2d_quantization = False
        else:
            weight.update_quantizer(tensors.quantizer(get_format(change), str(weight.device)))
        run.ddp.start_grad_sync()
        run.ddp.finish_grad_sync()
        return error_of(run.optimizer.step)


def without_a_seam() -> str:
    """A megatron-core whose work after a gather has no name."""
    with host(ALL_LAYERS):
        with integration.quantized_params():
            run = build(Case("nvfp4", te=ALL_LAYERS))
        kind = type(run.ddp.bucket_groups[0])
        with mock.patch.object(kind, "_post_param_sync"):
            del kind._post_param_sync
            return error_of(lambda: integration.attach(run.optimizer, run.ddp))
