"""What `attach` does with TransformerEngine's tensors beyond their bytes, on the ranks of a pool."""

import gc
import importlib
import weakref
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.megatron import te
from tests.megatron.here import host
from tests.megatron.training import ALL_LAYERS, Case, Model, build, build_attached, configuration, trained, wrap
from tests.transformer_engine import hybrids, tensors
from tests.workers import error_of
from zerocast import get_format, verify
from zerocast.distributed.group import Group
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import host as seams
from zerocast.integrations.megatron.primary import weight_of


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


def built_outside(formats: str) -> tuple[str, dict[str, int]]:
    """A model that Megatron laid out by itself: what `attach` says, and if nothing, stale bytes after some steps."""
    with host(ALL_LAYERS):
        run = build(Case(formats, te=ALL_LAYERS))
        said = error_of(lambda: integration.attach(run.optimizer, run.ddp))
        return said, {} if said else trained(run)[1]


def every_buffer() -> tuple[bool, list[Any], list[Any]]:
    """Whether all is well after two steps; the one difference that each flipped byte makes, and should make."""
    with host(ALL_LAYERS):
        run, attached = build_attached(Case("te", te=ALL_LAYERS))
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


def copies_dropped() -> dict[str, int]:
    """Where TransformerEngine drops columnwise copies between steps, as modules do in evaluation: stale bytes."""
    with host(ALL_LAYERS):
        run, _ = build_attached(Case("te", te=ALL_LAYERS))
        for number in range(3):
            run.step(number)
            for weight in run.te_tensors.values() if number == 1 else ():
                weight.update_usage(rowwise_usage=True, columnwise_usage=False)
                assert "columnwise_data" not in tensors.buffers(weight)
            run.force_sync()
        return run.stale_bytes()


def finetuned() -> tuple[bool, dict[str, int]]:
    """Masters from values that are loaded into the model: whether they are those values as cast, and stale bytes."""
    with host(ALL_LAYERS):
        run, _ = build_attached(Case("te", te=ALL_LAYERS))
        values = {name: torch.randn(p.shape).bfloat16().to(p.device) for name, p in run.ddp.module.named_parameters()}
        for value in values.values():
            dist.broadcast(value, 0)
        run.ddp.module.load_state_dict({**run.ddp.module.state_dict(), **values})
        expected = {**values, **{name: te.values(weight, columnwise=False) for name, weight in run.te_tensors.items()}}
        assert not any(torch.equal(expected[name], values[name]) for name in run.te_tensors)
        assert all(torch.equal(te.values(w, columnwise=True), expected[name]) for name, w in run.te_tensors.items())
        run.optimizer.reload_model_params()
        masters = run.masters()
        return all(torch.equal(masters[name], expected[name].cpu().float()) for name in masters), run.stale_bytes()


def partial() -> list[str]:
    """After a gather that raised: what a forward pass says, one of a single layer, a save; stale bytes after a refresh."""
    with host(ALL_LAYERS):
        run, attached = build_attached(Case("te", te=ALL_LAYERS))
        run.step(0)
        with mock.patch.object(
            importlib.import_module(seams.BUFFER), "dist_all_gather_func", side_effect=RuntimeError("no")
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


def detached() -> list[str]:
    """What differs in the host afterwards from what was there before, and whose copies a gather makes then."""
    with host(ALL_LAYERS):
        with integration.quantized_params():
            run = build(Case("te", te=ALL_LAYERS))
        owners = [*run.optimizer.chained_optimizers, *run.ddp.bucket_groups]
        before = [{name: id(value) for name, value in vars(one).items() if callable(value)} for one in owners]
        hooks = [
            len(module._forward_pre_hooks) + len(module._load_state_dict_pre_hooks) for module in run.ddp.modules()
        ]
        fields = [sorted(vars(weight)) for weight in run.te_tensors.values()]
        attached = integration.attach(run.optimizer, run.ddp)
        run.step(0)
        twins = [weakref.ref(weight_of(weight)) for weight in run.te_tensors.values()]
        fp8 = importlib.import_module(seams.FP8)
        with mock.patch.object(fp8, "te_post_all_gather_processing") as theirs:
            run.force_sync()
            assert not theirs.called
            attached.detach()
            gc.collect()
            assert not any(twin() for twin in twins)
            run.force_sync()
            asked = {id(param) for call in theirs.call_args_list for param in call.args[0]}
        assert asked == {id(weight) for weight in run.te_tensors.values()}
        after = [{name: id(value) for name, value in vars(one).items() if callable(value)} for one in owners]
        changed = [str(a.items() ^ b.items()) for a, b in zip(before, after, strict=True) if a != b]
        now = [len(module._forward_pre_hooks) + len(module._load_state_dict_pre_hooks) for module in run.ddp.modules()]
        same = [sorted(vars(weight)) for weight in run.te_tensors.values()]
        return [*changed, *(["hooks"] if now != hooks else []), *(["fields"] if same != fields else [])]


def of_a_kind(kind: str) -> str:
    """What is said of tensors that have no place in a byte buffer: where they are built, or where they are attached."""
    with host(ALL_LAYERS):

        def made(fmt: str, value: torch.Tensor, device: torch.device) -> Any:
            case = tensors.Weight(fmt.partition(":")[0], tuple(value.shape), ((0, value.numel()),), value.dtype)
            if kind == "hybrid":
                return torch.nn.Parameter(hybrids.hybrid(case, case))
            one = tensors.tensor(case, str(device))
            one._quantizer.with_2d_quantization = kind == "square mxfp8"
            return torch.nn.Parameter(one)

        with mock.patch.object(te, "_te_parameter", made):
            return error_of(lambda: build_attached(Case("fp8_current" if kind == "hybrid" else "mxfp8", te="0")))


def grouped_experts() -> str:
    """What is said of a tensor that holds several experts, as with moe_single_grouped_weight."""
    with host(ALL_LAYERS):
        with integration.quantized_params():
            run = build(Case("nvfp4", te=ALL_LAYERS))
        kind: Any = importlib.import_module("transformer_engine.pytorch.tensor.grouped_tensor").GroupedTensor
        data = torch.zeros(2 * 32 * 64, dtype=torch.uint8)
        tensor = kind((2, 32, 64), torch.bfloat16, num_tensors=2, shapes=[(32, 64)] * 2, data=data)
        assert importlib.import_module(seams.FP8).is_grouped_tensor_with_quantized_storage(tensor)
        for buffer in run.optimizer.chained_optimizers[0].buffers:
            if buffer.param_dtype == torch.uint8:
                buffer.params.append(tensor)
        return error_of(lambda: integration.attach(run.optimizer, run.ddp))


def grouped_in_a_model() -> str:
    """The same where the host would wrap it: a layer of TransformerEngine's with one weight for two experts."""
    kind_of = "transformer_engine.pytorch.tensor.grouped_tensor"
    with host(ALL_LAYERS):
        kind: Any = importlib.import_module(kind_of).GroupedTensor
        data = torch.zeros(2 * 32 * 64, dtype=torch.uint8)
        tensor = kind((2, 32, 64), torch.bfloat16, num_tensors=2, shapes=[(32, 64)] * 2, data=data)
        config = configuration()
        model = Model(config, ALL_LAYERS)
        model.experts = torch.nn.Module()
        model.experts.weight = torch.nn.Parameter(tensor)
        with integration.quantized_params():
            return error_of(lambda: wrap(Case(te=ALL_LAYERS), config, model))


def changed_afterwards(what: str) -> str:
    """What a step says where TransformerEngine has changed a tensor since it was attached."""
    with host(ALL_LAYERS):
        run, _ = build_attached(Case("fp8_current" if what == "format" else "nvfp4", te=ALL_LAYERS))
        run.step(0)
        weight = next(iter(run.te_tensors.values()))
        if what == "format":
            weight.update_quantizer(tensors.quantizer(get_format("fp8_delayed"), str(weight.device)))
        elif what == "option":
            weight._quantizer.stochastic_rounding = True
        else:
            weight._rowwise_data = None
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
