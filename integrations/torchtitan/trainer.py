"""quantized: turn a configuration of torchtitan's Trainer into one whose weights are gathered as
quantized bytes.

torchtitan 0.3 makes a configuration in Python, lets the command line change it, and builds the
Trainer to which the class of the configuration belongs. So `quantized` changes that class: a
subclass of torchtitan's configuration adds zerocast's section and optimizers, and belongs to a
subclass of torchtitan's Trainer that prepares the weights. Unsupported settings raise when the
Trainer is built, after the command line has been read.

A weight has to be prepared after it was sliced and before it is sharded. A model's parallelize_fn
does both in one call: tensor and context parallelism, then activation checkpointing, compilation
and FSDP2. It gets a policy of activation checkpointing, and calls its `build` between the two, so
`prepare_between` passes it a policy that prepares the weights there.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zerocast
from zerocast.formats.recipe import RecipeLike
from zerocast.fsdp2 import FusedAdamW
from zerocast.integrations import overrides

from . import host
from .optimizer import DelayedStates
from .section import Zerocast, prepare_model, recipe_of
from .validate import validate_trainer

Implementation = Literal["for-loop", "foreach", "fused", "fused_opt_states_bf16", "zerocast"]


@dataclass
class Section(Zerocast):
    """The section `zerocast` of a Trainer.Config."""

    share_amax: Annotated[Any, tyro.conf.Suppress] = ()
    """Like the argument of `zerocast.Recipe`, from Python only"""


@overrides()
class Optimizers(DelayedStates):
    """torchtitan's container, which also takes `implementation="zerocast"`: FusedAdamW for AdamW,
    in every parameter group that has it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(host.OptimizersContainer.Config):  # type: ignore[misc]
        """torchtitan's, with one more implementation."""

        implementation: Implementation = "fused"
        """
        As torchtitan's, and 'zerocast': AdamW of zerocast.fsdp2.FusedAdamW, whose update measures
        the amaxes of the next cast.
        """

    def __init__(self, config: Any, *, model_parts: list[nn.Module]) -> None:
        self._is_fused = config.implementation == "zerocast"
        super().__init__(config, model_parts=model_parts)
        if self._is_fused:
            self.leave_amaxes()

    def _build_impl_kwargs(self, config: Any) -> dict[str, Any]:
        return {} if self._is_fused else dict(super()._build_impl_kwargs(config))

    def _resolve_optimizer_factory(self, name: str) -> Any:
        return FusedAdamW if self._is_fused and name == "AdamW" else super()._resolve_optimizer_factory(name)


_Host: Any = host.Trainer


@overrides()
class Quantizing(_Host):  # type: ignore[misc]
    """The part of a Trainer that `config_class` adds to torchtitan's: it prepares the weights."""

    def __init__(self, config: Any) -> None:
        recipe_of(config.zerocast)
        spec = config.model_spec
        parallelize_fn = prepare_between(spec.parallelize_fn, config.zerocast)
        super().__init__(
            dataclasses.replace(config, model_spec=dataclasses.replace(spec, parallelize_fn=parallelize_fn))
        )

    def init_distributed(self) -> Any:
        """Initialize torch.distributed, then raise on unsupported settings.

        A job that writes a seed checkpoint is not checked: it runs on one rank and shards nothing.
        """
        parallel_dims = super().init_distributed()
        config = self.config
        if not config.checkpoint.create_seed_checkpoint:
            validate_trainer(config, parallel_dims)
        return parallel_dims


@functools.cache
def config_class(base: Any) -> Any:
    """Return a class of configurations like `base` with zerocast's section, and so of command
    lines.
    """

    class QuantizedTrainer(Quantizing, base._owner):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(base):  # type: ignore[misc]
            zerocast: Section = field(default_factory=Section)

    return QuantizedTrainer.Config


def quantized(
    config: Any,
    recipe: RecipeLike | None = None,
    *,
    verify_every: int = 0,
    implementation: Implementation | None = None,
) -> Any:
    """Return the configuration `config` of torchtitan's Trainer, with weights that FSDP2 gathers as
    quantized bytes; `config` stays as it is.

    For a function of a config registry: the command line then has `--zerocast.recipe` and
    `--zerocast.verify_every` too, and `--optimizer.implementation` takes `zerocast`. The recipe
    maps patterns of parameter names to formats; without one the command line must set it. All
    gathered bytes are compared with an unsharded cast after every `verify_every` optimizer steps,
    and VerificationError is raised if any differ. `implementation` is `optimizer.implementation`:
    with `zerocast` AdamW measures the amaxes of the next cast in its own pass. CUDA graphs are
    disabled, since a gather reads the headers of all ranks on the CPU.

    Raises TypeError if `config` is not a Trainer.Config, ValueError if it is quantized already, for
    a fast recipe, and for `implementation="zerocast"` where the optimizers are not torchtitan's
    container. Settings that depend on the command line or on the model are checked when the Trainer
    is built.
    """
    if not isinstance(config, host.Trainer.Config):
        raise TypeError(
            f"a configuration of torchtitan is a Trainer.Config, as its config registries make them, got {config!r}"
        )
    if hasattr(config, "zerocast"):
        raise ValueError(f"this configuration is quantized already, with {config.zerocast}: weights are prepared once")
    section = Section(verify_every=verify_every)
    if recipe is not None:
        recipe = zerocast.Recipe.of(recipe)
        if recipe.fast:
            raise ValueError(
                "torchtitan's configuration selects compilation (compile.enable): leave out fast=True, and call "
                "zerocast.gemm.use(weight_gradients='fp8')"
            )
        section.recipe = [f"{pattern}={fmt}" for pattern, fmt in recipe.patterns]
        section.share_amax = recipe.share_amax
        if recipe.default.element is not None:
            section.recipe.append(f"*={recipe.default}")
    optimizer = config.optimizer
    if type(optimizer) is host.OptimizersContainer.Config:
        optimizer = host.derive(optimizer, Optimizers.Config)
    if implementation is not None:
        if implementation == "zerocast" and not isinstance(optimizer, Optimizers.Config):
            raise ValueError(
                f"implementation='zerocast' is for torchtitan's OptimizersContainer, these are {type(optimizer)}"
            )
        optimizer = dataclasses.replace(optimizer, implementation=implementation)
    kind: Any = type(config)
    training = dataclasses.replace(config.training, disable_cuda_graphs=True)
    return host.derive(config, config_class(kind), training=training, optimizer=optimizer, zerocast=section)


def prepare_between(parallelize_fn: Any, section: Zerocast) -> Any:
    """Wrap `parallelize_fn` of a ModelSpec: it prepares the weights that the section's recipe
    matches.

    The wrapped function raises as `prepare_model` does, and RuntimeError if `parallelize_fn` builds
    no policy of activation checkpointing, as flux's. Slices that divide a block raise at the first
    gather.
    """

    def parallelize(model: nn.Module, *, parallel_dims: Any, ac_config: Any, **given: Any) -> nn.Module:
        policy = _PreparingPolicy(ac_config, lambda: prepare_model(model, section, _mesh_of_slices(parallel_dims)))
        sharded: nn.Module = parallelize_fn(model, parallel_dims=parallel_dims, ac_config=policy, **given)
        if not policy.has_prepared:
            raise RuntimeError(
                f"{parallelize_fn.__module__}.{parallelize_fn.__qualname__} builds no activation checkpointing from its "
                "configuration between slices and shards, which is when zerocast prepares weights: call "
                "zerocast.fsdp2.prepare in your own parallelize_fn"
            )
        return sharded

    return parallelize


class _PreparingPolicy:
    """Replaces the configuration of activation checkpointing, which may be None.

    Attributes:
        has_prepared: True once `build` was called and the weights are prepared.
    """

    def __init__(self, ac_config: Any, prepare: Callable[[], None]) -> None:
        self._ac_config = ac_config
        self._prepare = prepare
        self.has_prepared = False

    def build(self, **given: Any) -> Any:
        self._prepare()
        self.has_prepared = True
        return self if self._ac_config is None else self._ac_config.build(**given)

    def apply(self, model: nn.Module) -> None:
        """Do nothing: without a configuration no activation is recomputed."""


def _mesh_of_slices(parallel_dims: Any) -> DeviceMesh | None:
    """Return the mesh of all ranks with parts of one weight; None without tensor parallelism."""
    if parallel_dims.tp == 1:
        return None
    axes = ["fsdp", "tp"] if parallel_dims.spmd_backend == "partial_dtensor" else ["dp_shard", "cp", "tp"]
    mesh: DeviceMesh = parallel_dims.get_activated_mesh(axes)._flatten("zerocast_slices")
    return mesh
