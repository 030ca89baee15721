"""The GPT under FSDP2, with an optimizer that the training loop calls like a ZeroAdamW.

Quantized weights, update and checkpoints equal those of the ZeRO run, so each can continue from the
checkpoints of the other.
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerocast
from examples.gpt_pretrain.config import TrainConfig
from examples.gpt_pretrain.model import GPT

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(model: GPT, config: TrainConfig, device: torch.device) -> GPT:
    """Shard an FP32 model by block; the calls of `prepare` and `set_grad_wire` are added to plain
    FSDP2.
    """
    mesh = _mesh(config, device)
    weight_mesh = None
    if "tp" in (mesh.mesh_dim_names or ()):
        # attention stays unsliced: the rows of its qkv are not sorted by head
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
        weight_mesh = mesh["shard", "tp"]._flatten("weight")
        mesh = mesh["shard"]
    if config.quantized != "bf16":
        zerocast.fsdp2.prepare(model, zerocast.Recipe({"blocks.*.weight": config.quantized}), weight_mesh=weight_mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)
    zerocast.fsdp2.set_grad_wire(model, config.grad_wire)
    register_fsdp_forward_method(model, "loss")
    return model


def _mesh(config: TrainConfig, device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks: shards, replicas by shards, or shards by slices.

    Raises ValueError for a number of ranks that does not divide.
    """
    if not dist.is_initialized():
        raise ValueError(f"--parallel {config.parallel} needs torchrun, also for one process")
    ranks = dist.get_world_size()
    if config.parallel == "fsdp2":
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    if ranks % (config.shard_ranks or 2):
        parts = f"replicas of {config.shard_ranks}" if config.shard_ranks else "two halves"
        raise ValueError(f"--parallel {config.parallel} makes {parts} of the ranks, there are {ranks}")
    if config.parallel == "hsdp":
        return _with_timeout(config, device, -1, config.shard_ranks or ranks // 2, ("replicate", "shard"))
    return _with_timeout(config, device, ranks // 2, 2, ("shard", "tp"))


def _with_timeout(
    config: TrainConfig, device: torch.device, rows: int, columns: int, names: tuple[str, str]
) -> DeviceMesh:
    """Return a mesh whose groups time out after `config.timeout`, like the default group. Groups of
    `init_device_mesh` have torch's default timeout: half an hour over gloo.
    """
    mesh = torch.arange(dist.get_world_size()).view(rows, columns)
    timeout = timedelta(seconds=config.timeout)
    groups = [dist.new_subgroups_by_enumeration(lines.tolist(), timeout)[0] for lines in (mesh.T, mesh)]
    return DeviceMesh.from_group(groups, device.type, mesh, mesh_dim_names=names)


class Fsdp2AdamW(zerocast.fsdp2.TrainingState):
    """`zerocast.fsdp2.FusedAdamW` over a sharded model, as the loop calls a ZeroAdamW."""

    def __init__(self, model: GPT, groups: list[dict[str, Any]], config: TrainConfig) -> None:
        groups = [{**group, "params": [parameter for _, parameter in group["params"]]} for group in groups]
        betas = config.beta1, config.beta2
        adamw = zerocast.fsdp2.FusedAdamW(
            groups, lr=config.lr, betas=betas, eps=config.eps, moment_dtype=config.moment_dtype
        )
        super().__init__(model, adamw)
        self._sharded: Any = model
        self._adamw = adamw
        self.step, self.zero_grad = adamw.step, adamw.zero_grad
        self.skipped_steps = 0  # FSDP2 has no check of gradients

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The current groups, which loading a state replaces."""
        groups: list[dict[str, Any]] = self._adamw.param_groups
        return groups

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in the body without reducing them."""
        self._sharded.set_requires_gradient_sync(False)
        yield
        self._sharded.set_requires_gradient_sync(True)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients like torch's function, for parameters on several meshes."""
        by_mesh: dict[DeviceMesh, list[DTensor]] = {}
        for parameter in self._sharded.parameters():
            assert isinstance(parameter, DTensor)
            by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
        norms: list[Any] = [
            nn.utils.get_total_norm([p.grad for p in some if p.grad is not None]) for some in by_mesh.values()
        ]
        norm: Tensor = torch.stack([norm.full_tensor() for norm in norms]).norm()
        for parameters in by_mesh.values():
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm
