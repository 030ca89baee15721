"""What `attach` does on the ranks of a pool beyond bytes: with TransformerEngine's tensors, and with optimizer CPU offload."""

import contextlib
import gc
import importlib
import types
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import casts
from tests.megatron import host_on_cpu, ranks_host, training
from tests.megatron.ranks_host import device, host
from tests.megatron.training import ALL_LAYERS, MIXED, Attached, Case, Run, build, build_attached
from tests.transformer_engine import tensors
from tests.workers import error_of
from zerocast import get_format, verify
from zerocast.distributed.group import Group
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import host as megatron_names
from zerocast.integrations.megatron import offload
from zerocast.integrations.megatron.offload import CpuMaster
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
            assert ranks_host.move_te_scales(run.te_tensors) == scales
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
        tiles = [weight for weight in run.te_tensors.values() if str(ranks_host.te_format_of(weight)) == TILES]
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


def offloaded(
    formats: str = MIXED,
    fraction: float = 1.0,
    streams: bool = False,
    precise: bool = False,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Case:
    """A run that updates a fraction of its masters on the host; with `precise` what is left by TransformerEngine's FusedAdam."""
    settings = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": fraction,
        "overlap_cpu_optimizer_d2h_h2d": streams,
        "use_precision_aware_optimizer": precise,
        **(options or {}),
    }
    return Case(formats, fused_adam=precise, options=settings, **more)


def _copies(run: Run) -> list[Tensor]:
    """The copies of masters in host memory, as the host has them."""
    own = run.optimizer.chained_optimizers
    return [copy for one in own for copy in offload.cpu_copies(one.optimizer).values()]


def count_offloaded(run: Run, attached: Any) -> int:
    """Count the masters that the host says that it has offloaded. As many tensors stand for one in host memory, and a plan or a
    rounded parameter reads as many there.
    """
    copies = _copies(run)
    shards = [shard for plan in attached.plans for shard in plan._partition.shards]
    plain = [shard.master for share in attached._shares for shard in share.driver.host.plain]
    read = [shard.master for shard in shards if shard.on_cpu]
    read += [master for master in plain if master is not None and any(master is copy for copy in copies)]
    standing = sum(isinstance(master, CpuMaster) for _, master in _parameters_with_masters(run))
    cast_there = sum(any(master is copy for copy in copies) for master in read)
    assert len(copies) == standing == cast_there
    return len(copies)


def on_host(tensor: Tensor) -> bool:
    return host_on_cpu.on_host(tensor) if device().type == "cpu" else not tensor.is_cuda


def _parameters_with_masters(run: Run) -> Iterator[tuple[Any, Tensor]]:
    """Parameters with the masters of this rank."""
    for one in run.optimizer.chained_optimizers:
        for params, masters in (
            (one.model_float16_groups, one.shard_fp32_from_float16_groups),
            (one.model_fp32_groups, one.shard_fp32_groups),
        ):
            for group, mains in zip(params, masters, strict=True):
                yield from zip(group, mains, strict=True)


def train_offloaded(case: Case) -> int:
    """Train an attached model, and check its bytes. Returns the number of masters in host memory."""
    with case.host():
        run, attached = build_attached(case)
        run.train()
        assert verify(attached).ok
        return count_offloaded(run, attached)


@contextlib.contextmanager
def on_the_device() -> Iterator[None]:
    """Inside, masters come back from the host after each update, as Megatron does it, and are cast on the device."""
    with made_on_the_device(), mock.patch.object(offload, "keep_on_cpu", return_value=None):
        yield


def made_on_the_device() -> AbstractContextManager[Any]:
    """Inside, `attach` brings masters to the host, as those of TransformerEngine's tensors."""
    return mock.patch.object(offload, "one_by_one", lambda build: build)


def compare_with_the_device(case: Case) -> None:
    """After some steps all is as in a run whose masters are copied to the device and cast there, to the bit."""
    with case.host():
        ours = Attached(case)
        with on_the_device():
            theirs = Attached(case)
            their_losses = [theirs.run.step(number) for number in range(3)]
            expected = theirs.everything()
        assert [ours.run.step(number) for number in range(3)] == their_losses
        found = ours.everything()
        assert found.keys() == expected.keys()
        casts.assert_same_bytes(found, expected)
        assert count_offloaded(ours.run, ours.attachment) > 0


class Memory(NamedTuple):
    """Bytes of a GPU between steps: in use, and predicted from the tensors that a run needs there; how many more a step of the
    optimizer takes; and those of the masters that the host updates.
    """

    live: int
    predicted: int
    step: int
    masters: int


def measure_memory(case: Case) -> tuple[Memory, Memory]:
    """Measure a run of 16.8 million elements with masters in host memory, and one where they are on the device as well."""
    found = []
    with case.host(), mock.patch.object(training, "WIDTHS", (2048,) * 5):
        for way in (on_the_device(), contextlib.nullcontext(), on_the_device()):  # once for the workspaces of products
            gc.collect()
            before = torch.cuda.memory_allocated()
            with way:
                run, _ = build_attached(case)
                for number in range(2):
                    run.step(number)
                run.force_sync()
                torch.cuda.synchronize()
                live, predicted = torch.cuda.memory_allocated() - before, _needed_on_the_device(run)
                run.forward_and_backward(2)
                start = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                run.optimizer.step()
                step = torch.cuda.max_memory_allocated() - start
            found.append(Memory(live, predicted, step, sum(copy.nbytes for copy in _copies(run))))
            del run, _
    return found[1], found[2]


def _needed_on_the_device(run: Run) -> int:
    """Bytes of parameters, copies by columns, scales and gradients, and of the masters that are on the device."""
    buffers = [buffer for one in run.optimizer.chained_optimizers for buffer in one.buffers]
    tensors = [t for buffer in buffers for bucket in buffer.buckets for t in (bucket.param_data, bucket.grad_data)]
    tensors += [t for weight in run.weights.values() for t in weight.state.buffers.values()]
    tensors += [param.data for name, param in run.ddp.module.named_parameters() if name not in run.weights]
    tensors += [master for _, master in _parameters_with_masters(run) if not isinstance(master, CpuMaster)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def build_one_by_one(case: Case) -> None:
    """Check that building an optimizer makes the masters in CPU memory, which Megatron chooses, on the device one by one."""
    with case.host():
        kind, alive, most = importlib.import_module(megatron_names.OPTIMIZER).DistributedOptimizer, [], 0
        original = kind._build_model_and_main_param_groups

        def build_and_look(*args: Any) -> Any:
            nonlocal most
            result = original(*args)
            alive.extend(weakref.ref(master) for group in result[-1] for master in group)
            most = max(most, sum(ref() is not None for ref in alive))
            return result

        looking = mock.patch.object(kind, "_build_model_and_main_param_groups", build_and_look)
        with looking, integration.quantized_params():
            ours = build(case)
        with made_on_the_device(), integration.quantized_params():
            theirs = build(case)
        copies = [master for one in theirs.optimizer.chained_optimizers for master in offload.cpu_copies(one.optimizer)]
        chosen = [any(master is copied for copied in copies) for _, master in _parameters_with_masters(theirs)]
        hosted = [isinstance(master, CpuMaster) for _, master in _parameters_with_masters(ours)]
        assert hosted == chosen and any(hosted)
        assert most <= 2 + chosen.count(False)


def reattach(case: Case) -> None:
    """Steps with a detached moment between them, in which all is as Megatron made it, are those of an uninterrupted run. An
    attachment that fails half-way leaves nothing changed.
    """
    with case.host():
        straight, broken = Attached(case), Attached(case)
        for number in range(2):
            straight.run.step(number)
            broken.run.step(number)
        before, offloads = broken.run.masters(), count_offloaded(broken.run, broken.attachment)
        broken.attachment.detach()
        masters = list(_parameters_with_masters(broken.run))
        copies = [offload.cpu_copies(one.optimizer) for one in broken.own]
        inner = [p for one in broken.own for group in one.optimizer.param_groups for p in group["params"]]
        assert not any(isinstance(m, CpuMaster) or on_host(m) for m in [m for _, m in masters] + inner)
        assert {id(m) for _, m in masters} == {id(p) for p in inner}
        for param, master in masters:
            if param.dtype == torch.float32:
                assert master.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()
            else:
                assert param.main_param is master
        after = broken.run.masters()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        for master, copy in (pair for pairs in copies for pair in pairs.items()):
            assert on_host(copy) and torch.equal(master.detach().cpu(), copy)
        assert sum(map(len, copies)) == offloads > 0
        assert {id(p) for one in broken.own for p in one.optimizer.state} == {id(p) for p in inner}
        with mock.patch.object(integration.attachment, "build_share", side_effect=MemoryError("no memory")):
            assert "no memory" in error_of(lambda: integration.attach(broken.run.optimizer, broken.run.ddp))
        assert not any(isinstance(master, CpuMaster) for _, master in _parameters_with_masters(broken.run))
        broken.attachment = integration.attach(broken.run.optimizer, broken.run.ddp)
        for number in range(2, 4):
            straight.run.step(number)
            broken.run.step(number)
        casts.assert_same_bytes(broken.everything(), straight.everything())


def restore_offloaded(case: Case) -> None:
    """The host's offload_to_cpu and restore_from_cpu between steps move to the device the state of the masters there, and nothing
    of an offloaded master's.
    """
    with case.host():
        run, _ = build_attached(case)
        run.step(0)
        run.optimizer.offload_to_cpu()
        moved: list[Tensor] = []
        with mock.patch.object(Tensor, "cuda", lambda tensor: moved.append(tensor) or tensor):
            run.optimizer.restore_from_cpu()
        others = 0
        for one in run.optimizer.chained_optimizers:
            for master, state in one.optimizer.state.items():
                names = [name for name, value in state.items() if any(value is tensor for tensor in moved)]
                if master in offload.cpu_copies(one.optimizer):
                    assert not names
                others += len(names)
        assert others > 0
        run.step(1)
        assert not run.stale_bytes()
