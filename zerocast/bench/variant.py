"""Variant: one way to train the model, by its name; VARIANTS is the table of all of them.

A variant is a host (the implementation that shards, gathers and steps), the format of the weights
inside blocks, and the way in which weight gradients are computed. `StepRow.train` makes a
`Training` of a fresh model. Initial FP32 values, AdamW and clip are the same for every variant.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from zerocast import fsdp2, gemm
from zerocast.bench.llama import Llama
from zerocast.formats.recipe import Recipe
from zerocast.optim import ZeroAdamW, ZeroConfig, load_masters
from zerocast.quantize import quantize_

BF16 = "bf16"
# The seven matrices of a block.
WEIGHTS = "blocks.*.w?.weight"
MAX_NORM = 1.0
Compile = Callable[[nn.Module], None]


@dataclass
class Training:
    """A model in training: the calls of a step.

    Attributes:
        clip: clips the norm of the gradients.
        no_sync: makes the context of a micro-batch that is not the last of its step. Its gradients
            stay on this rank.
        after_step: called after the optimizer's step.
        forward_context: makes the context in which the forward pass runs.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[], object]
    no_sync: Callable[[], AbstractContextManager[object]]
    after_step: Callable[[], object] = lambda: None
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext

    def step(self, batches: Sequence[Tensor], after_forward: Callable[[], object] = lambda: None) -> Tensor:
        """Step once over micro-batches of tokens (batch, sequence + 1). Return their mean loss,
        detached. `after_forward` is called after the first forward pass.
        """
        losses: list[Tensor] = []
        for number, tokens in enumerate(batches, 1):
            with contextlib.nullcontext() if number == len(batches) else self.no_sync():
                with self.forward_context():
                    loss: Tensor = self.model(tokens[:, :-1], tokens[:, 1:])
                if not losses:
                    after_forward()
                losses.append(loss.detach())
                loss.backward(torch.full_like(loss, 1 / len(batches)))
        self.clip()
        self.optimizer.step()
        self.after_step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()

    def keep_gathered(self) -> None:
        """Let FSDP2 free the weights of blocks in the last backward pass of a step only."""
        if isinstance(self.model, FSDPModule):
            self.model.set_reshard_after_forward(False)
            self.no_sync = functools.partial(_no_sync, self.model, keep_gathered=True)


@dataclass(frozen=True)
class Host:
    """An implementation that shards a model and steps it.

    Attributes:
        name: the first half of a variant's name.
        build: makes a Training of a model, given a row, a learning rate, and a function that
            compiles a block if the row is compiled.
        package: the package that must be installed for it.
        compiles: True if each of its blocks compiles to one graph.
    """

    name: str
    build: "Callable[[Llama, StepRow, float, Compile], Training]"
    package: str = "torch"
    compiles: bool = True


@dataclass(frozen=True)
class Variant:
    """A row of the table, called `host:format`. The name has `+fp8_wgrad` if weight gradients are
    computed in FP8 instead of the dtype of the gradients, `+fp8_wire` if gradients are sent as FP8,
    and `+8bit` if the moments of AdamW are kept in 8 bits.
    """

    host: Host
    format: str
    fp8_weight_gradients: bool = False
    grad_wire: str | None = None
    has_8bit_moments: bool = False

    @property
    def name(self) -> str:
        """The name in options, tables and stored reports."""
        wgrad = "+fp8_wgrad" if self.fp8_weight_gradients else ""
        wire = "+fp8_wire" if self.grad_wire else ""
        moments = "+8bit" if self.has_8bit_moments else ""
        return f"{self.host.name}:{self.format}{wgrad}{wire}{moments}"

    @property
    def moment_dtype(self) -> torch.dtype | Literal["8bit"]:
        """The dtype of AdamW's moments, as zerocast's optimizers take it."""
        return "8bit" if self.has_8bit_moments else torch.float32

    @property
    def is_installed(self) -> bool:
        """True if the package of the host can be imported here."""
        return importlib.util.find_spec(self.host.package) is not None


@dataclass(frozen=True)
class StepRow:
    """A row of the report: a variant, compiled or eager."""

    variant: Variant
    mode: str

    @property
    def name(self) -> str:
        """The name in tables and stored reports."""
        return f"{self.variant.name} {self.mode}"

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the weights inside blocks; None for bf16. It is fast if the row is compiled
        and has FP8 weight gradients.
        """
        if self.variant.format == BF16:
            return None
        is_fast = self.variant.fp8_weight_gradients and self.mode == "compiled"
        return Recipe({WEIGHTS: self.variant.format}, fast=is_fast)

    @property
    def code(self) -> str | None:
        """The line of code that gives this row, besides the optimizer: the fast recipe, or the
        plain default. None for other rows.
        """
        call = {"fsdp2": "zerocast.fsdp2.prepare", "zero_adamw": "zerocast.quantize_"}.get(self.variant.host.name)
        # Formats of other libraries are not recipes.
        recipe = self.recipe if call else None
        if recipe is None or self.variant.grad_wire or self.variant.has_8bit_moments:
            return None
        if not recipe.fast and (self.mode == "compiled" or self.variant.fp8_weight_gradients):
            return None
        fast = ", fast=True" if recipe.fast else ""
        return f'{call}(model, zerocast.Recipe({{"{WEIGHTS}": "{self.variant.format}"}}{fast}))'

    def products(self) -> ExitStack:
        """Compute weight gradients as this row does, until the returned context ends. The fast
        recipe needs no setting.
        """
        is_set = self.variant.fp8_weight_gradients and self.mode == "eager"
        return gemm.use("auto", weight_gradients="fp8" if is_set else "nominal")

    def train(self, model: Llama, lr: float, compile_block: Compile) -> Training:
        """Make a Training of `model`, whose parameters are FP32 on the device."""
        return self.variant.host.build(model, self, lr, compile_block)


def _zero_adamw(model: Llama, row: StepRow, lr: float, compile_block: Compile) -> Training:
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.bfloat16()
    if row.recipe:
        quantize_(model, row.recipe)
    for block in model.blocks:
        compile_block(block)
    config = ZeroConfig(overlap_all_gather=True, grad_wire=row.variant.grad_wire, moment_dtype=row.variant.moment_dtype)
    optimizer = ZeroAdamW(model.named_parameters(), lr=lr, config=config)
    # The optimizer has made its masters from bf16 weights. The other variants start from FP32.
    load_masters(optimizer, initial)
    return Training(model, optimizer, lambda: optimizer.clip_grad_norm_(MAX_NORM), optimizer.no_sync)


def _fsdp2(model: Llama, row: StepRow, lr: float, compile_block: Compile) -> Training:
    if row.recipe:
        fsdp2.prepare(model, row.recipe)
    fused_adamw = functools.partial(fsdp2.FusedAdamW, moment_dtype=row.variant.moment_dtype)
    training = _sharded(model, lr, compile_block, optimizer=fused_adamw if row.recipe else None)
    if row.variant.grad_wire:
        fsdp2.set_grad_wire(model, row.variant.grad_wire)
    return training


def _fsdp2_fused_adamw(model: Llama, row: StepRow, lr: float, compile_block: Compile) -> Training:
    assert row.recipe is None, row
    return _sharded(model, lr, compile_block, optimizer=fsdp2.FusedAdamW)


def _torchao(model: Llama, row: StepRow, lr: float, compile_block: Compile) -> Training:
    float8 = importlib.import_module("torchao.float8")
    fmt = row.variant.format
    if fmt == "tensorwise":
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    else:
        config = float8.Float8LinearConfig.from_recipe_name(fmt)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "blocks." in name)
    training = _sharded(model, lr, compile_block)
    if fmt == "tensorwise":
        training.after_step = lambda: float8.precompute_float8_dynamic_scale_for_fsdp(model)
    return training


def _transformer_engine(model: Llama, row: StepRow, lr: float, compile_block: Compile) -> Training:
    _replace_linears(model)
    return _in_autocast(_sharded(model, lr, compile_block), row.variant.format)


def _fsdp2_transformer_engine(model: Llama, row: StepRow, lr: float, compile_block: Compile) -> Training:
    _replace_linears(model)
    integration = importlib.import_module("zerocast.integrations.transformer_engine")
    assert row.recipe
    fsdp2.prepare(model, row.recipe, present=integration.present)
    recipe = row.variant.format.removeprefix("fp8_")
    return _in_autocast(_sharded(model, lr, compile_block, optimizer=fsdp2.FusedAdamW), recipe)


def _replace_linears(model: Llama) -> None:
    te = importlib.import_module("transformer_engine.pytorch")
    for name, linear in list(model.blocks.named_modules()):
        if isinstance(linear, nn.Linear):
            model.blocks.set_submodule(name, _te_linear(te, linear))


def _in_autocast(training: Training, recipe: str) -> Training:
    te = importlib.import_module("transformer_engine.pytorch")
    chosen = getattr(importlib.import_module("transformer_engine.common.recipe"), TRANSFORMER_ENGINE_RECIPES[recipe])()
    training.forward_context = lambda: te.fp8_autocast(enabled=True, fp8_recipe=chosen)
    return training


def _te_linear(te: Any, linear: nn.Linear) -> nn.Module:
    layer: Any = te.Linear(linear.in_features, linear.out_features, bias=False, params_dtype=torch.float32)
    with torch.no_grad():
        layer.weight.copy_(linear.weight)
    module: nn.Module = layer
    return module


def _sharded(
    model: Llama, lr: float, compile_block: Compile, optimizer: Callable[..., torch.optim.Optimizer] | None = None
) -> Training:
    """Return `fully_shard` by block, bf16 weights and FP32 reductions; by default torch's fused
    AdamW.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        compile_block(block)
        fully_shard(block, mp_policy=policy)
    fully_shard([model.norm, model.head], mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy)
    parameters = list(model.parameters())
    no_sync = functools.partial(_no_sync, model)
    stepper = optimizer or functools.partial(torch.optim.AdamW, fused=True)
    adamw = stepper(model.named_parameters(), lr=lr)
    return Training(model, adamw, lambda: nn.utils.clip_grad_norm_(parameters, MAX_NORM), no_sync)


@contextlib.contextmanager
def _no_sync(model: Any, keep_gathered: bool = False) -> Iterator[None]:
    """Let FSDP2 reduce no gradients, and free no weights after the backward pass if
    `keep_gathered`, while the context is open.
    """
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(not keep_gathered)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)


FSDP2 = Host("fsdp2", _fsdp2)
ZERO_ADAMW = Host("zero_adamw", _zero_adamw)
# BF16 with the optimizer pass that quantized rows of FSDP2 have.
FSDP2_FUSED_ADAMW = Host("fsdp2_fused_adamw", _fsdp2_fused_adamw)
TORCHAO = Host("torchao", _torchao, "torchao")
TRANSFORMER_ENGINE = Host("transformer_engine", _transformer_engine, "transformer_engine", compiles=False)
FSDP2_TRANSFORMER_ENGINE = Host(
    "fsdp2_transformer_engine", _fsdp2_transformer_engine, "transformer_engine", compiles=False
)
TRANSFORMER_ENGINE_RECIPES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
}
# The formats whose products run in FP8 on Hopper.
FP8_FORMATS = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp4", "nvfp4:exact_in_fp8")
OTHER_FORMATS = ("mxfp8", "mxfp8:block=32x32", "nvfp4", "int4")


def _all_variants() -> Iterator[Variant]:
    for host in (FSDP2, ZERO_ADAMW):
        yield Variant(host, BF16)
        for fmt in FP8_FORMATS:
            yield Variant(host, fmt)
            yield Variant(host, fmt, fp8_weight_gradients=True)
        for fmt in OTHER_FORMATS:
            yield Variant(host, fmt)
    yield Variant(FSDP2_FUSED_ADAMW, BF16)
    for host in (FSDP2, ZERO_ADAMW):
        for fmt in (BF16, "fp8_current", "nvfp4"):
            yield Variant(host, fmt, fmt in FP8_FORMATS, "fp8_1x128")
        yield Variant(host, "fp8_current", fp8_weight_gradients=True, has_8bit_moments=True)
    for recipe in ("tensorwise", "rowwise"):
        yield Variant(TORCHAO, recipe)
    for recipe in TRANSFORMER_ENGINE_RECIPES:
        yield Variant(TRANSFORMER_ENGINE, recipe)
    for recipe in TRANSFORMER_ENGINE_RECIPES:
        yield Variant(FSDP2_TRANSFORMER_ENGINE, f"fp8_{recipe}")


VARIANTS = tuple(_all_variants())


def code_of(name: str) -> str | None:
    """Return the `StepRow.code` of the row with this name."""
    variant, _, mode = name.partition(" ")
    return next((StepRow(known, mode).code for known in VARIANTS if known.name == variant), None)


def select(patterns: tuple[str, ...], modes: tuple[str, ...]) -> list[StepRow]:
    """Return the rows in `modes` whose names, with or without the mode, match one of `patterns`
    (shell wildcards); without patterns all. Variants that are not installed are left out.

    Raises ValueError for a pattern that matches no row, RuntimeError for a variant that is not
    installed and that a pattern without wildcards names.
    """
    rows = [
        StepRow(variant, mode) for mode in modes for variant in VARIANTS if mode == "eager" or variant.host.compiles
    ]
    for pattern in patterns:
        matched = [row.variant for row in rows if _matches(row, pattern)]
        if not matched:
            raise ValueError(f"no variant is called {pattern!r}; there are: {', '.join(v.name for v in VARIANTS)}")
        missing = [v for v in matched if v.name == pattern.partition(" ")[0] and not v.is_installed]
        if missing:
            raise RuntimeError(f"{pattern} needs {missing[0].host.package}, which is not installed")
    chosen = [row for row in rows if not patterns or any(_matches(row, pattern) for pattern in patterns)]
    return [row for row in chosen if row.variant.is_installed]


def _matches(row: StepRow, pattern: str) -> bool:
    return fnmatchcase(row.name, pattern) or fnmatchcase(row.variant.name, pattern)
