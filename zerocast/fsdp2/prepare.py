"""prepare and refresh: the entry points of a training script under FSDP2.

The life of a prepared parameter:

    weight of the model (FP32)
        │ prepare() wraps it                          parameter.py
        │ fully_shard() shards it
        ▼
    DTensor over a MasterParameter: the rows of this rank, FP32
        │ optimizers, clipping and checkpoints see this and nothing else
        │ a step, a load or any other write makes a cast due
        ▼
    cast of all weights, before the next gather       manager.py, cast_group.py
        │ amaxes, one all-reduce, scales
        │ codes of the shards of a group are cast;    param_groups.py
        │ codes, scales, header are sent              gather_layout.py
        ▼
    all-gather of bytes, by FSDP2
        │ headers are compared, scales laid out       param_groups.py, gather_status.py
        ▼
    QuantizedWeight over the bytes of all ranks: forward and backward products
        │ resharded: the gathered bytes are freed
        ▼
    DTensor over a MasterParameter, with a gradient that FSDP2 has reduced

The first gather of a weight runs FSDP2's two hooks (`FSDPWeight.send` and `receive_first`), which
allocate memory and the parameter that modules see. Later gathers run no hook. Before the first
cast, zerocast sets `__class__` of FSDP2's own FSDPParam and FSDPParamGroup objects to
`torch_fsdp.GatheredByGroup` and `GroupOfWeights`. These send and receive all weights of a group at
once (`FSDPWeight.send`, `ParamGroup.finish_gather`), and over several ranks gather them as one
parameter.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from zerocast import torch_names
from zerocast.formats import FormatSpec
from zerocast.formats.recipe import Recipe, RecipeLike
from zerocast.fsdp2 import torch_fsdp
from zerocast.fsdp2.manager import CastManager, validity_of
from zerocast.fsdp2.parameter import MasterParameter
from zerocast.fsdp2.weight import AS_QUANTIZED_WEIGHT, FSDPWeight, Presentation
from zerocast.quantize import (
    blocks_with,
    check_weight,
    compile_blocks,
    read_without_products,
    served_recipe,
    show_formats,
)
from zerocast.weight import QuantizedWeight
from zerocast.weight.validity import Use

# Weak, since parameters keep managers alive and managers know modules.
_Ref = weakref.ReferenceType[CastManager]
_prepared: "weakref.WeakKeyDictionary[nn.Module, _Ref]" = weakref.WeakKeyDictionary()
_optimizer_hooks: list[RemovableHandle] = []
# The parameters that `prepare` has replaced. An optimizer that was built before still holds them.
_replaced = WeakTensorKeyDictionary()
# The managers of the prepared modules in a module, found once. Cleared by each `prepare`.
_within: "weakref.WeakKeyDictionary[nn.Module, list[_Ref]]" = weakref.WeakKeyDictionary()

# A function of (module, name of its parameter, parameter) that returns the Presentation of the
# weight, or None for a QuantizedWeight. It raises ValueError for a parameter that it cannot
# present.
Present = Callable[[nn.Module, str, Tensor], Presentation | None]

# Packages whose modules compute with their own tensor classes, each with the function for
# `present`.
OWN_TENSORS = {"transformer_engine": "zerocast.integrations.transformer_engine.present"}

PICKLED = (
    "this {} was pickled after zerocast.fsdp2.prepare, as torch.multiprocessing does with arguments: its parameters are plain "
    "FP32 ones, and train so. Call prepare again before fully_shard to gather quantized weights"
)


def owner_of_tensors(module: nn.Module) -> str | None:
    """Return the package in `OWN_TENSORS` that the class of a module, or a base class, is from."""
    packages = (kind.__module__.partition(".")[0] for kind in type(module).__mro__)
    return next((package for package in packages if package in OWN_TENSORS), None)


def only_quantized_weights(module: nn.Module, name: str, parameter: Tensor) -> None:
    """Present all weights as QuantizedWeights. Raises ValueError for a module that cannot
    take one.
    """
    package = owner_of_tensors(module)
    if package is not None:
        raise ValueError(
            f"{name} of a {type(module).__name__} is multiplied as one of {package}'s own tensors: pass prepare "
            f"present={OWN_TENSORS[package]}, or leave it out of the recipe"
        )


def prepare(
    model: nn.Module,
    recipe: RecipeLike,
    *,
    weight_mesh: DeviceMesh | None = None,
    verify_every: int | None = None,
    keep_codes: bool | None = None,
    present: Present = only_quantized_weights,
    serve: str | None = None,
) -> nn.Module:
    """Make FSDP2 gather the weights that `recipe` matches as quantized bytes; returns `model`.

    Call it before `fully_shard`. Optimizers and checkpoints still see every matched parameter, of
    two or more dimensions, as an FP32 master. After a step of any torch optimizer the next forward
    pass casts all masters first. Other changes of the masters, such as a load, are noticed too: if
    all ranks made one the weights are cast again, otherwise all ranks raise (see `refresh`).
    Weights compute in the `param_dtype` of their MixedPrecisionPolicy, FP32 without one. Shard
    `model` or modules in it such that they contain all prepared weights. A forward pass raises
    RuntimeError otherwise, and within DistributedDataParallel.

    `Recipe(fast=True)` compiles blocks in place. The caller still calls `fully_shard` and builds
    the optimizer; `FusedAdamW` is the fastest.

    `weight_mesh` is for tensor parallelism: the one-dimensional mesh, flattened, of all ranks that
    hold slices of a weight, over which its amax is reduced. Without it that is FSDP2's shard mesh.
    `verify_every` lets the first forward pass after every n steps compare all gathered bytes with
    an unsharded cast of the masters, as `zerocast.verify` does, and raise VerificationError on
    every rank of the shard group if any differ.

    With `keep_codes=False` each gather casts the codes that it sends from the masters, by the
    scales of the last cast, for which it reads 4 bytes per element of the shard. With
    `keep_codes=True` each cast makes all codes and keeps them until the next cast, in 0.5 byte per
    element of the shard for nvfp4 and 1 for FP8. That is worth its memory if few tokens are
    computed between two gathers (`zerocast/fsdp2/README.md`). By default a rank keeps its codes if
    they take at most 64 MiB. Codes are always kept if the shard group has one rank, under
    CPUOffloadPolicy, and once an optimizer has stepped within a backward pass.

    `present` is for modules that compute with their own tensor classes: `present(module, name,
    parameter)` gives the `Presentation` of a weight, or None for a QuantizedWeight. For
    TransformerEngine's modules, pass `zerocast.integrations.transformer_engine.present`.

    `serve` is the engine that is to read the trained weights: the recipe is then
    `recipe.for_reader(serve, model)`.

    With nothing changed, raises ValueError for a pattern that matches nothing, a shape that the
    format cannot take, an embedding, a convolution, a weight that is sharded or quantized already,
    a fast recipe for a model without blocks, and weights that `serve` could not read. Raises
    TypeError for a weight that is not FP32, or whose module has a parameter that is not. The first
    gather checks the conditions that depend on FSDP2. Raises RuntimeError for a torch without the
    private names that zerocast reads (`zerocast/torch_names.py`), and warns of a release that was
    never tested.
    """
    if verify_every is not None and verify_every < 1:
        raise ValueError(f"verify_every is None or at least 1, got {verify_every}")
    if weight_mesh is not None and weight_mesh.ndim != 1:
        raise ValueError(f"weight_mesh has one dimension, got {weight_mesh.ndim}: flatten it")
    recipe, weights = served_recipe(recipe, serve, model)
    names = {parameter: name for name, parameter in reversed(weights.items())}
    shared = recipe.shared_amaxes(list(names.values())[::-1])
    torch_names.check_fsdp2()
    watch_optimizers()
    torch_fsdp.key_graphs_by_local_tensors()
    torch_fsdp.replicate_as_plain(MasterParameter)
    chosen = _choose(model, weights, recipe, present)
    blocks = blocks_with(model, chosen) if recipe.fast else []
    plain = [name for name, parameter in weights.items() if parameter not in chosen]
    sizes = {weight.name: _local(parameter).numel() for parameter, weight in chosen.items()}
    manager = CastManager(model, weight_mesh, keep_codes, plain, sizes)
    prepared: dict[Tensor, FSDPWeight] = {}
    for parameter, of_parameter in chosen.items():
        name = of_parameter.name
        weight = FSDPWeight(name, of_parameter.format, manager, shared.get(name), of_parameter.presentation)
        weight.fp8_weight_gradients = recipe.fast
        manager.plan.add(weight)
        prepared[parameter] = weight
    manager.plan.names = {name: chosen[p].name for name, p in weights.items() if p in chosen}
    _replace(model, prepared)
    for of_parameter in chosen.values():
        for module, own_name in of_parameter.seen_as:
            of_parameter.presentation.attach(module, own_name)
    compile_blocks(blocks)
    model.register_state_dict_pre_hook(_before_state_dict)
    _prepared[model] = weakref.ref(manager)
    _within.clear()
    model.register_forward_pre_hook(_OutsideOfGraphs(manager, CastManager.exchange_status))
    model.register_forward_hook(_OutsideOfGraphs(manager, CastManager.end_pass))
    manager.plan.verify_every = verify_every
    if verify_every is not None:
        model.register_forward_pre_hook(_OutsideOfGraphs(manager, CastManager.verify_every, verify_every))
    return model


class _ChosenWeight(NamedTuple):
    """A parameter that a recipe matches.

    Attributes:
        name: its first name.
        format: the format that it is gathered in.
        presentation: makes the tensor that modules see, one for all of them.
        seen_as: the modules that have it, with its name there.
    """

    name: str
    format: FormatSpec
    presentation: Presentation
    seen_as: list[tuple[nn.Module, str]]


def _choose(
    model: nn.Module, weights: Mapping[str, Tensor], recipe: Recipe, present: Present
) -> dict[Tensor, _ChosenWeight]:
    """Return the parameters among `weights`, keyed by name, that the recipe quantizes. Raises
    TypeError or ValueError for one that cannot be.
    """
    chosen: dict[Tensor, _ChosenWeight] = {}
    # The parameters that FSDP2 has sharded already.
    sharded = {id(p) for m in model.modules() if isinstance(m, FSDPModule) for p in m.parameters()}
    unfit = read_without_products(model)
    for name, parameter in weights.items():
        fmt = recipe.format_of(name)
        if fmt.element is None:
            continue
        prefix, _, own_name = name.rpartition(".")
        module = model.get_submodule(prefix)
        _check(module, name, parameter, sharded)
        check_weight(unfit, name, parameter, fmt, _local(parameter).shape)
        presentation = _present(module, own_name, name, parameter, fmt, present)
        first = chosen.setdefault(parameter, _ChosenWeight(name, fmt, presentation, []))
        if first.format != fmt:
            raise ValueError(f"{name} is shared and its names match two formats, {first.format} and {fmt}")
        if (presentation is AS_QUANTIZED_WEIGHT) != (first.presentation is AS_QUANTIZED_WEIGHT):
            raise ValueError(
                f"{name} is {first.name} too, and their modules compute with different tensors: untie them"
            )
        first.seen_as.append((module, own_name))
    return chosen


def refresh(model: nn.Module) -> None:
    """Cast the masters of a prepared model as they are now. Every rank calls this.

    This is for loops that change parameters by hand, and counts as the cast of an optimizer step.
    Raises ValueError for a model that was not prepared.
    """
    for manager in managers_of(model):
        manager.make_due()
        manager.before_gather()
        manager.plan.validity.check(Use.READ)


def state_dict(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the state of delayed scaling, keyed by weight. Empty without such weights.

    `{name: {"scale": f32[1], "amax_history": f32[L], "cast_scale": f32[1]}}`, plain tensors, the
    same on every rank, to be saved under the key `zerocast` next to model and optimizer, and to be
    read into. Every rank calls this, since a cast that is due is done first. Raises ValueError for
    a model that was not prepared.
    """
    return {name: state for manager in managers_of(model) for name, state in manager.delayed().items()}


def load_state_dict(model: nn.Module, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Load a result of `state_dict` after the masters were loaded. Every rank calls this.

    The scale of a weight without an entry is computed again, with a warning. Raises ValueError for
    a model that was not prepared.
    """
    for manager in managers_of(model):
        manager.load_delayed(state)


def formats(model: nn.Module) -> dict[str, tuple[FormatSpec, torch.dtype]]:
    """Return the format and the nominal dtype of each quantized weight, keyed by name. The dtype is
    known once the model was cast.
    """
    prepared = [weight for manager in managers_of(model) for weight in manager.weights]
    weights = [weight for weight in prepared if weight.format.element is not None]
    return {weight.name: (weight.format, weight.geometry.nominal) for weight in weights}


def is_prepared(model: nn.Module) -> bool:
    """Return True if `prepare` was given this module, or one in it."""
    if model not in _within:
        _within[model] = [_prepared[module] for module in model.modules() if module in _prepared]
    return bool(_within[model])


def managers_of(model: nn.Module) -> list[CastManager]:
    """Return the cast managers of the models in `model` that were prepared. Raises ValueError if
    there are none.
    """
    if not is_prepared(model):
        raise ValueError(f"this {type(model).__name__} was not given to zerocast.fsdp2.prepare, nor is anything in it")
    return [manager for manager in (reference() for reference in _within[model]) if manager is not None]


def managers_behind(parameters: Iterable[Any]) -> list[CastManager]:
    """Return the cast managers of the prepared ones among parameters, each once."""
    tensors = [getattr(parameter, "_local_tensor", parameter) for parameter in parameters]
    managers: dict[int, Any] = {
        id(t.weight.manager): t.weight.manager for t in tensors if isinstance(t, MasterParameter)
    }
    return list(managers.values())


def _check(module: nn.Module, name: str, parameter: Tensor, sharded: set[int]) -> None:
    """Raise ValueError or TypeError unless a parameter of `module` can become a master."""
    if isinstance(parameter, MasterParameter):
        raise ValueError(f"{name} is prepared already")
    if isinstance(parameter, QuantizedWeight):
        raise ValueError(f"{name} is a QuantizedWeight, and FSDP2 shards masters: call prepare and not quantize_")
    if id(parameter) in sharded:
        raise ValueError(f"{name} is sharded already: call zerocast.fsdp2.prepare before fully_shard")
    if parameter.dtype != torch.float32:
        raise TypeError(
            f"{name} is {parameter.dtype}: a master is float32; prepare the FP32 model and pass fully_shard a "
            "MixedPrecisionPolicy with the dtype to compute in"
        )
    for other, p in module.named_parameters(recurse=False):
        if p.requires_grad and parameter.requires_grad and p.dtype != parameter.dtype:
            raise TypeError(
                f"{name} is {parameter.dtype} and {other} of the same module is {p.dtype}, but FSDP2 needs one dtype per group: "
                "make both float32 and leave precision to its MixedPrecisionPolicy"
            )


def _present(
    module: nn.Module, own_name: str, name: str, parameter: Tensor, fmt: FormatSpec, present: Present
) -> Presentation:
    """Return how `module` sees its parameter `own_name`. Raises ValueError if it cannot."""
    try:
        presentation = present(module, own_name, parameter)
        if presentation is None:
            return AS_QUANTIZED_WEIGHT
        presentation.check(fmt)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"{name} is a DTensor, whose slices only a QuantizedWeight presents: leave it out of the recipe"
        )
    return presentation


def _replace(model: nn.Module, prepared: Mapping[Tensor, FSDPWeight]) -> None:
    """Replace parameters by wrapped ones in all modules, and again after a load replaced them."""
    new = {parameter: _wrap(parameter, weight) for parameter, weight in prepared.items()}
    _replaced.update(prepared)
    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        weights = {name: prepared[parameter] for name, parameter in parameters if parameter in prepared}
        for name in weights:
            module._parameters[name] = new[module._parameters[name]]  # type: ignore[index]
        if weights:
            show_formats(module)
            module.register_load_state_dict_post_hook(_Loaded(weights))
            module.register_state_dict_post_hook(_unwrap_whole)


def _local(parameter: Tensor) -> Tensor:
    """Return this rank's slice of a parameter if tensor parallelism slices it, else all of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _wrap(parameter: Tensor, weight: FSDPWeight) -> nn.Parameter:
    """Return a parameter over the same memory, whose tensor is a MasterParameter. Under tensor
    parallelism its local tensor is one.
    """
    value = parameter.detach()
    if isinstance(value, DTensor):
        local = MasterParameter(value.to_local(), weight)
        value = DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    else:
        value = MasterParameter(value, weight)
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    # Hosts keep attributes on parameters, such as how tensor parallelism slices them.
    for name, value_of_host in vars(parameter).items():
        if not hasattr(new, name):
            setattr(new, name, value_of_host)
    return new


class PickledHook:
    """The hook of a module that was pickled. It warns once that the parameters are plain now."""

    def __init__(self, warns: bool) -> None:
        self._warns = warns

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """Warn before a forward pass with gradients, unless the module was prepared again."""
        if self._warns and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._warns = False
            if not is_prepared(module):
                warnings.warn(PICKLED.format(type(module).__name__), stacklevel=2)


class _OutsideOfGraphs:
    """A forward hook that calls `method` of a cast manager while the manager exists."""

    def __init__(self, manager: CastManager, method: Callable[..., None], *args: Any) -> None:
        self._manager, self._method, self._args = weakref.ref(manager), method, args
        # Not at the module's import, since this imports the compiler.
        self._run_outside = torch.compiler.disable(self._run)

    def __reduce__(self) -> Any:
        # Only one of a module's hooks warns.
        return PickledHook, (self._method is CastManager.exchange_status,)

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self._run_outside()

    def _run(self) -> None:
        manager = self._manager()
        if manager is not None:
            self._method(manager, *self._args)


class _Loaded:
    """A hook that wraps tensors which replaced masters when a state dict was loaded.

    Nothing is cast here, since one rank alone may load. The next gather detects the changes.
    """

    def __init__(self, weights: Mapping[str, FSDPWeight]) -> None:
        self._weights = weights

    def __reduce__(self) -> Any:
        # Parameters pickle as plain ones.
        return _Loaded, ({},)

    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        for name, weight in self._weights.items():
            parameter: Any = module._parameters[name]
            local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            if isinstance(local, MasterParameter) or parameter is None:
                continue
            # load_state_dict(assign=True) replaces the tensors.
            wrapped = MasterParameter(local.detach().to(torch.float32), weight)
            if isinstance(parameter, DTensor):
                parameter._local_tensor = wrapped
            else:
                module._parameters[name] = nn.Parameter(wrapped, parameter.requires_grad)


def _before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise RuntimeError for masters that are partly written, or that ranks disagree about, since
    they would be saved.
    """
    # A module that was pickled is not prepared any more.
    for manager in managers_of(module) if is_prepared(module) else ():
        manager.check(Use.SAVE)


def _unwrap_whole(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Save masters that are not sharded yet as plain tensors: nothing was cast from them that a
    load could leave behind.
    """
    for name, value in state.items():
        if isinstance(value, MasterParameter) and not isinstance(value, nn.Parameter):
            state[name] = value.plain


def watch_optimizers() -> None:
    """Make every step of a torch optimizer notify the managers of its masters, and raise after a
    load that failed partway. The hooks are global, and stay from the first prepared model or
    TrainingState of the process on.
    """
    if not _optimizer_hooks:
        _optimizer_hooks.append(register_optimizer_step_pre_hook(_before_step))
        _optimizer_hooks.append(register_optimizer_step_post_hook(_after_compiled_step))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Raise RuntimeError if the optimizer must not step.

    This is so in three cases:

    * a load that failed has left its state partly written,
    * it lists a prepared weight twice,
    * its parameters are not the model's current ones, so it never sees the gradients: it was built
      before `prepare` or `fully_shard`, or a load replaced them.
    """
    if torch.compiler.is_compiling():
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    managers = managers_behind(parameters)
    if torch_fsdp.backward_pass() is not None:
        for manager in managers:
            manager.plan.hold_codes()
    if validity_of(optimizer).partial:
        _propagate_partial_state(optimizer, managers)
    validity_of(optimizer).check(Use.STEP)
    different = len({id(parameter) for parameter in parameters})
    if managers and different < len(parameters):
        raise RuntimeError(
            f"this {type(optimizer).__name__} lists {len(parameters)} parameters, of which {different} are different: a prepared "
            "weight that is listed twice is stepped twice"
        )
    for manager in managers:
        _add_first_hook(optimizer)
        manager.check_trained(optimizer)
    for parameter in parameters:
        if parameter.grad is not None:
            continue
        local = getattr(parameter, "_local_tensor", parameter)
        weight = local.weight if isinstance(local, MasterParameter) else _replaced.get(parameter)
        if weight is not None and weight.was_replaced_with_grad(parameter):
            raise RuntimeError(
                f"{weight.name} has a gradient, but this {type(optimizer).__name__} holds an outdated parameter for it: "
                "build the optimizer after fully_shard(), and build it again after load_state_dict(assign=True)"
            )


def _propagate_partial_state(optimizer: Optimizer, managers: Iterable[CastManager]) -> None:
    """Let all ranks raise at the next gather, because the state of an optimizer is partly written
    on this one. Others may step, so this rank takes part in their reductions, and casts as they do.
    """
    for manager in managers:
        if not manager.plan.validity.partial:
            manager.plan.validity.failed_partway("an optimizer step")
    join_collectives: Callable[[], None] = getattr(optimizer, "join_collectives", lambda: None)
    join_collectives()
    _after_step(optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for manager in managers_behind(parameter for group in optimizer.param_groups for parameter in group["params"]):
        manager.make_due(optimizer)


def _add_first_hook(optimizer: Optimizer) -> None:
    """Call `_after_step` before hooks of the user, of which one may raise after masters were
    written.
    """
    hooks: Any = optimizer._optimizer_step_post_hooks
    if _after_step not in hooks.values():
        hooks.move_to_end(optimizer.register_step_post_hook(_after_step).id, last=False)


def _after_compiled_step(optimizer: Optimizer, *_: Any) -> None:
    # A compiled step has run no `_before_step`, which adds the other hook.
    if _after_step not in optimizer._optimizer_step_post_hooks.values():
        _after_step(optimizer)
