"""What ranks do on GPUs: the same cast by TransformerEngine and by zerocast, and a training loop with either."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zerocast
from tests import casts
from tests.sharded import Weight
from tests.transformer_engine.casting import Casting
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration
from tests.transformer_engine.tensors import bytes_of

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
