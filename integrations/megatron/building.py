"""quantized_params(): Megatron-Core puts QuantizedWeights into byte buffers and makes masters.

Megatron calls functions and reads globals of its modules to decide which parameters belong in byte
buffers, and how to move them there. While the context is open, these include QuantizedWeights; then
the originals are restored. Megatron supports TransformerEngine's tensors by itself: for them the
context sets the layout, and raises on the settings that `attach` does not support.

The context also checks the arguments of model wrappers, of optimizer factories and of optimizer
constructors before these run. A mistake is then an error at its cause, with the remedy. Later the
host would fail at an operator that a QuantizedWeight does not have, or not at all.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from zerocast import QuantizedWeight
from zerocast.integrations import Patch, Patches, replaced

from . import host, layout, offload, unattached, validate
from .primary import (
    castable_view,
    initial_value,
    is_primary,
    is_te_tensor,
    move_codes,
    release_initial_values,
    shares_codes,
    two_directions,
)


# Megatron asks `isinstance(param, FP4_TENSOR_CLASS)`. The width is a property of a weight's format
# and not of its class, so a metaclass answers.
class _FourBitMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, QuantizedWeight) and instance.format.bits == 4


class FourBit(metaclass=_FourBitMeta):
    """A class whose instances, by `isinstance`, are the QuantizedWeights of 4 bits."""


@contextmanager
def quantized_params() -> Iterator[None]:
    """Build DistributedDataParallel and the optimizer in this context, over a quantized model.

    The model went through `zerocast.quantize_`, or its weights are tensors of TransformerEngine.
    Masters start from the values before quantization. An optimizer over QuantizedWeights, or over
    MXFP8Tensors in tiles of 32x32 (`square_mxfp8`), raises on a step or a load until `attach`.

    Raises RuntimeError for a megatron-core without a name that is needed, for weights that an
    earlier context laid out and, on exit, for tiles without an optimizer; ValueError for a weight
    whose format does not fit a byte buffer (mxfp8, identity) and for settings that are not
    supported.
    """
    checks = ConstructionChecks()
    try:
        with Patches() as patches:
            with host.known_api():
                patches.apply(_layout_patches(checks.moved))
                patches.apply(checks.patches())
            yield
        checks.check_owned()
    finally:
        for weight in checks.moved:
            if isinstance(weight, QuantizedWeight):
                # The masters have been made: free the values before quantization, and remove the
                # methods through which Megatron read them (see `_move`).
                weight.high_precision_init_val = None
                for name in ("get_high_precision_init_val", "clear_high_precision_init_val"):
                    vars(weight).pop(name, None)
        checks.end()


def _layout_patches(moved: list[Any]) -> Iterator[Patch]:
    """Yield patches of the names by which the host recognizes and moves QuantizedWeights.

    `moved` collects the parameters in byte buffers that the host cannot cast by itself.
    """
    fp8, buffer = host.module(host.FP8), host.module(host.BUFFER)

    def move_with(original: Callable[[Any, Tensor], None]) -> Callable[[Any, Tensor], None]:
        def move(param: Any, storage: Tensor) -> None:
            if isinstance(param, QuantizedWeight):
                _move(param, storage)
                moved.append(param)
            elif is_te_tensor(param):
                castable_view(param)
                if shares_codes(param):
                    move_codes(param, storage)
                    moved.append(param)
                else:
                    original(param, storage)
            else:
                original(param, storage)

        return move

    theirs = fp8.HAVE_TE_FP8_TENSOR_CLASS and fp8.FP8_TENSOR_CLASS
    yield Patch(fp8, "FP8_TENSOR_CLASS", _classes_with(theirs, QuantizedWeight))
    yield Patch(fp8, "HAVE_TE_FP8_TENSOR_CLASS", True)
    yield Patch(fp8, "_modify_underlying_storage_impl", move_with(fp8._modify_underlying_storage_impl))
    # A model with MXFP8Tensors gets a bf16 buffer in place of the byte buffer, since a tensor of
    # 1x32 blocks needs two sets of codes. Tensors in tiles of 32x32 have one set, and stay in a
    # byte buffer.
    if hasattr(buffer, "is_mxfp8tensor"):
        is_mxfp8 = buffer.is_mxfp8tensor
        yield Patch(buffer, "is_mxfp8tensor", lambda param: is_mxfp8(param) and not shares_codes(param))
    if host.has_four_bit_buffers():
        yield from _four_bit_patches(move_with)


def _four_bit_patches(move_with: Callable[[Any], Any]) -> Iterator[Patch]:
    """Yield patches of the names by which the host recognizes, moves and lays out 4-bit weights."""
    fp4, buffer = host.module(host.FP4), host.module(host.BUFFER)
    ddp, optimizer = host.module(host.DDP), host.module(host.OPTIMIZER)
    grouped = buffer.group_params_for_buffers

    def group_by_width(*args: Any, **kwargs: Any) -> Any:
        return layout.sort_by_width(grouped(*args, **kwargs))

    callers, layouts = [buffer, ddp, optimizer], [optimizer.DistributedOptimizer]
    for kind in host.layer_wise():
        callers.append(host.module(kind.__module__))
        layouts.append(kind)
        yield Patch(ddp, "partition_buckets", layout.group_by_owner(ddp.partition_buckets))
    for kind in layouts:
        lay_out = functools.partial(layout.lay_out_by_width, kind._compute_per_buffer_param_layout)
        yield Patch(kind, "_compute_per_buffer_param_layout", staticmethod(lay_out))
    theirs = fp4.HAVE_TE_FP4_TENSOR_CLASS and fp4.FP4_TENSOR_CLASS
    yield Patch(fp4, "FP4_TENSOR_CLASS", _classes_with(theirs, FourBit))
    yield Patch(fp4, "HAVE_TE_FP4_TENSOR_CLASS", True)
    # Newer releases import it into the module of buffers, older ones inside the function that calls
    # it.
    for owner in (fp4, buffer):
        if hasattr(owner, "modify_nvfp4_rowwise_storage"):
            move = move_with(owner.modify_nvfp4_rowwise_storage)
            yield Patch(owner, "modify_nvfp4_rowwise_storage", move)
    yield Patch(buffer._ParamAndGradBuffer, "_compute_nvfp4_packed_layout", layout.pack)
    # Each module has imported this function.
    for caller in callers:
        yield Patch(caller, "group_params_for_buffers", group_by_width)


def _classes_with(theirs: Any, ours: type) -> tuple[type, ...]:
    """Return the host's class of tensors and ours, or only ours without TransformerEngine."""
    return (theirs, ours) if theirs else (ours,)


def _move(weight: QuantizedWeight, storage: Tensor) -> None:
    """Move a weight's bytes into a view of the buffer, and give it the methods by which Megatron's
    optimizers read the value of a parameter before quantization.
    """
    fmt = weight.format
    if fmt.casts_columnwise:
        raise two_directions(f"{weight!r}: {fmt}")
    if storage.numel() != weight.rowwise_data.numel():
        raise RuntimeError(
            f"{weight!r} has {weight.rowwise_data.numel()} bytes, and this megatron-core sets {storage.numel()} aside for it: "
            "its buffers cannot hold two elements per byte; those of 0.19 can"
        )
    weight.rebind(rowwise_data=storage.view(weight.rowwise_data.shape))
    host_weight: Any = weight
    host_weight.get_high_precision_init_val = lambda: initial_value(weight)
    host_weight.clear_high_precision_init_val = lambda: setattr(weight, "high_precision_init_val", None)


def _keeping_fp32_masters(config: Any) -> Any:
    """Return a configuration whose optimizers keep FP32 masters as tensors, not in a fused Adam's
    state.

    Returns `config` where that is so already, as for most of the host's own FP8 formats, else a
    copy: an optimizer reads its configuration in every step, and other optimizers may share it.
    """
    if validate.masters_are_states(config):
        config = copy.copy(config)
        setattr(config, validate.MASTERS_ARE_STATES, False)
    return config


class ConstructionChecks:
    """The checks of one `quantized_params()`, over the models and optimizers that are built in it.

    Attributes:
        moved: the weights that were moved into byte buffers and that the host cannot cast by
            itself.
    """

    def __init__(self) -> None:
        self.moved: list[Any] = []
        # All optimizers built in this context. They raise on a step until `attach`.
        self._optimizers: list[Any] = []
        # True while an optimizer of whole matrices constructs the optimizers inside it.
        self._is_layer_wise = False
        # True once a model with primary weights has been wrapped.
        self._has_primary = False
        # (config given by the caller, config for its optimizers), keyed by id of the first. The
        # given one is stored too, so that its id stays in use.
        self._configs: dict[int, tuple[Any, Any]] = {}

    def patches(self) -> Iterator[Patch]:
        """Yield patches of the functions that build wrappers and optimizers: each runs its check
        first.
        """
        wrappers, factories = host.module(host.WRAPPERS), host.module(host.FACTORIES)
        ddp = wrappers.DistributedDataParallel
        yield Patch(ddp, "__init__", _with_check_before(vars(ddp)["__init__"], self._check_wrapper))
        for name in ("FullyShardedDataParallel", "TorchFullyShardedDataParallel"):
            if hasattr(wrappers, name):
                kind = getattr(wrappers, name)
                yield Patch(kind, "__init__", _with_check_before(vars(kind)["__init__"], _check_other_wrapper))
        name = "_get_megatron_optimizer_based_on_param_groups"
        factory = _with_check_before(getattr(factories, name), self._check_factory)
        yield Patch(factories, name, self._prepared(factory))
        # It builds optimizers other than Adam and SGD.
        name = "_get_megatron_emerging_optimizer"
        if hasattr(factories, name):
            factory = _with_check_before(getattr(factories, name), self._check_emerging)
            yield Patch(factories, name, self._prepared(factory))
        hybrid, sort = offload.hybrid(), "_get_sub_optimizer_param_groups"
        yield Patch(hybrid, sort, offload.copying_once(getattr(hybrid, sort)))
        distributed, build = host.module(host.OPTIMIZER).DistributedOptimizer, "_build_model_and_main_param_groups"
        yield Patch(distributed, build, staticmethod(offload.one_by_one(getattr(distributed, build))))
        for kind in host.layer_wise():
            yield Patch(kind, "__init__", self._checking_whole_matrices(vars(kind)["__init__"]))
        # This class keeps an unsharded FP32 master of each parameter. Every optimizer of the host
        # runs the constructor of one of the other two.
        bases = host.module(host.OPTIMIZER_BASES)
        unsharded = bases.Float16OptimizerWithFloat16Params
        yield Patch(unsharded, "__init__", _starting_from_initial_values(vars(unsharded)["__init__"]))
        for kind in (bases.MegatronOptimizer, bases.ChainedOptimizer):
            yield Patch(kind, "__init__", self._remembering(vars(kind)["__init__"]))

    def check_owned(self) -> None:
        """Raise RuntimeError for tiles of MXFP8 in byte buffers without an optimizer of this
        context.

        An optimizer built outside it would write 1x32 blocks over the tiles.
        """
        owned = {id(param) for optimizer in self._optimizers for param in unattached.params_of(optimizer)}
        if any(id(param) not in owned for param in self.moved if not isinstance(param, QuantizedWeight)):
            raise RuntimeError(
                "MXFP8Tensors in tiles of 32x32 are in byte buffers, and no optimizer over them was built: build "
                "DistributedDataParallel and the optimizer inside the same quantized_params()"
            )

    def end(self) -> None:
        """Let optimizers without quantized weights step without `attach`."""
        for optimizer in self._optimizers:
            if not unattached.owns_quantized_weights(optimizer):
                unattached.restore(optimizer)

    def _check_wrapper(self, ddp_config: Any, module: Any, **_: Any) -> None:
        validate.check_grouped(module)
        trained = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        if any(is_primary(param) for _, param in trained):
            validate.check_settings([ddp_config])
            validate.check_distributed(ddp_config)
            validate.check_te_tensors(trained)
            self._has_primary = True

    def _prepared(self, factory: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a factory of optimizers, for a model with primary weights.

        Masters are not kept in the state of the fused Adam, since a cast reads them as tensors. The
        optimizers of a chain share one configuration, so this holds for plain parameters too.

        No flat views are taken of QuantizedWeights, which have none. Megatron takes such views, to
        copy attributes to the shards, with `fp8_recipe="delayed"`, which megatron.training sets for
        any model.
        """
        signature = inspect.signature(factory)

        @functools.wraps(factory)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            given = bound.arguments
            params = [param for chunk in given["model_chunks"] for param in chunk.parameters()]
            if self._has_primary or any(map(is_primary, params)):
                given["config"] = self._config_of(given["config"])
            if not any(isinstance(param, QuantizedWeight) for param in params):
                return factory(*bound.args, **bound.kwargs)
            with replaced(given["config"], "fp8_recipe", None):
                return factory(*bound.args, **bound.kwargs)

        return call

    def _config_of(self, config: Any) -> Any:
        """Return the configuration that the optimizers of a chain get in place of `config`."""
        _, ours = self._configs.setdefault(id(config), (config, _keeping_fp32_masters(config)))
        return ours

    def _check_factory(self, config: Any, model_chunks: Any, param_groups: Any, **_: Any) -> None:
        params = [param for group in param_groups for param in group["params"]]
        if any(map(is_primary, params)):
            validate.check_settings([config, *(chunk.ddp_config for chunk in model_chunks)])
            validate.check_distributed(config)
            validate.check_adam(config)

    def _check_emerging(self, config: Any, model_chunks: Any, **_: Any) -> None:
        if any(map(is_primary, (param for chunk in model_chunks for param in chunk.parameters()))):
            validate.check_settings([config, *(chunk.ddp_config for chunk in model_chunks)])
            validate.check_layer_wise(config)
            validate.check_whole_matrices(model_chunks)

    def _checking_whole_matrices(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap the constructor of an optimizer whose ranks own whole matrices.

        That constructor builds further optimizers, from those that it is given.
        """

        def check(optimizers: Iterable[Any], model_chunks: Any = None, **_: Any) -> None:
            groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
            if any(is_primary(param) for group in groups for param in group["params"]):
                validate.check_whole_matrices(model_chunks or [])

        checked = _with_check_before(original, check)

        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> None:
            with replaced(self, "_is_layer_wise", True):
                checked(*args, **kwargs)
            for chunk in args[0].model_chunks:
                release_initial_values(filter(host.is_managed_by_layer, chunk.parameters()))

        return init

    def _check_moved(self, params: Iterable[Any]) -> None:
        moved = set(map(id, self.moved))
        for param in params:
            if (isinstance(param, QuantizedWeight) or shares_codes(param)) and id(param) not in moved:
                weight = (
                    repr(param) if isinstance(param, QuantizedWeight) else f"a {type(param).__name__} in tiles of 32x32"
                )
                raise RuntimeError(
                    f"{weight} is in no byte buffer that was laid out in this quantized_params(): call quantize_, then build "
                    "DistributedDataParallel and the optimizer, both inside the same quantized_params()"
                )

    def _remembering(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap a constructor of optimizers: it checks them, and they raise on a step until
        `attach`.
        """

        def init(built: Any, *args: Any, **kwargs: Any) -> None:
            original(built, *args, **kwargs)
            # From `vars`: a chain has a property of that name, which raises for several optimizers.
            inner = vars(built).get("optimizer")
            params = [param for group in getattr(inner, "param_groups", ()) for param in group["params"]]
            if any(map(is_primary, params)) and not self._is_layer_wise:
                validate.check_kind(built)
            self._check_moved(params)
            self._optimizers.append(built)
            unattached.refuse(built)

        return init


def _with_check_before(original: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Wrap `original`: `check` is called first, with its arguments as keywords."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Bound to the signature, so that a check need not know which arguments were positional.
        given = dict(signature.bind(*args, **kwargs).arguments)
        given.pop("self", None)
        check(**given.pop("kwargs", {}), **given)
        return original(*args, **kwargs)

    return call


def _check_other_wrapper(module: Any, **_: Any) -> None:
    if any(map(is_primary, module.parameters())):
        raise ValueError(f"use_megatron_fsdp is not supported: {validate.SHARDED_OTHERWISE}")


def _starting_from_initial_values(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of an optimizer that copies its parameters to FP32 masters: the masters
    of primary weights start from the values before quantization.
    """

    @functools.wraps(original)
    def init(built: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        groups = optimizer.param_groups if optimizer else ()
        weights = [p for group in groups for p in group["params"] if is_primary(p)]
        with Patches() as patches:
            # The host computes `param.detach().clone().float()`.
            patches.apply(Patch(weight, "detach", functools.partial(initial_value, weight)) for weight in weights)
            original(built, optimizer, *args, **kwargs)

    return init
