"""quantized_params(): in it Megatron-Core lays QuantizedWeights out and makes their masters.

Megatron asks functions and globals of its modules which parameters live in byte buffers and how
they move there. They answer for QuantizedWeights inside the context only; afterwards every one is
the object that it was. TransformerEngine's tensors it knows by
itself: the context gives them the layout, and refuses what `attach` would.

Wrappers of models, factories of optimizers and the constructor of every optimizer are checked
before they begin, so that a mistake is an error there and names its remedy. Later the host would
fail at an operator that a QuantizedWeight does not have, or not at all.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from zerocast import QuantizedWeight
from zerocast.integrations.host_adapter import Patch, Patches

from . import host, layout, offload, unattached, validate
from .primary import (
    check_primary,
    initial_value,
    is_primary,
    is_te_tensor,
    move_codes,
    release_initial_values,
    shares_codes,
    two_directions,
)


class _FourBitMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, QuantizedWeight) and instance.format.bits == 4


class FourBit(metaclass=_FourBitMeta):
    """The class that `isinstance` takes a QuantizedWeight of 4 bits for."""


@contextmanager
def quantized_params() -> Iterator[None]:
    """Build DistributedDataParallel and the optimizer in here, over a model with quantized weights.

    The model went through `zerocast.quantize_`, or its weights are tensors of TransformerEngine.
    Masters start from the values before quantization. An optimizer over QuantizedWeights refuses to
    step and to load until `attach`. So does one over MXFP8Tensors in tiles of 32x32
    (`square_mxfp8`).

    RuntimeError for a megatron-core without a name that is needed, for weights that another such
    context laid out and, in the end, for tiles without an optimizer; ValueError for a weight whose
    format has no place in a byte buffer (mxfp8, identity) and for settings that are not supported.
    """
    checks = ConstructionChecks()
    try:
        with Patches() as patches:
            patches.apply([*_layout_patches(checks.moved), *checks.patches()])
            yield
        checks.check_owned()
    finally:
        for weight in checks.moved:
            if isinstance(weight, QuantizedWeight):
                weight.high_precision_init_val = None
                for name in ("get_high_precision_init_val", "clear_high_precision_init_val"):
                    vars(weight).pop(name, None)
        checks.end()


def _layout_patches(moved: list[Any]) -> list[Patch]:
    """The names that answer for QuantizedWeights; `moved` collects what is in byte buffers and the
    host alone cannot cast.
    """
    fp8, fp4 = host.module(host.FP8), host.module(host.FP4)
    host.require(fp8, ("FP8_TENSOR_CLASS", "HAVE_TE_FP8_TENSOR_CLASS", "_modify_underlying_storage_impl"), host.FP8)
    host.require(fp4, ("FP4_TENSOR_CLASS", "HAVE_TE_FP4_TENSOR_CLASS"), host.FP4)

    def move_with(original: Callable[[Any, Tensor], None]) -> Callable[[Any, Tensor], None]:
        def move(param: Any, storage: Tensor) -> None:
            if isinstance(param, QuantizedWeight):
                _move(param, storage)
                moved.append(param)
            elif is_te_tensor(param):
                check_primary(param)
                if shares_codes(param):
                    move_codes(param, storage)
                    moved.append(param)
                else:
                    original(param, storage)
            else:
                original(param, storage)

        return move

    return [
        Patch(fp8, "FP8_TENSOR_CLASS", _also(fp8.HAVE_TE_FP8_TENSOR_CLASS and fp8.FP8_TENSOR_CLASS, QuantizedWeight)),
        Patch(fp8, "HAVE_TE_FP8_TENSOR_CLASS", True),
        Patch(fp8, "_modify_underlying_storage_impl", move_with(fp8._modify_underlying_storage_impl)),
        *_byte_buffer_patches(),
        *(_four_bit_patches(move_with) if host.has_four_bit_buffers() else ()),
    ]


def _byte_buffer_patches() -> Iterator[Patch]:
    """The name by which the host gives a model with MXFP8Tensors a bf16 buffer over its gradients,
    in place of one of bytes: not for those of which it gathers one set of codes.
    """
    buffer, name = host.module(host.BUFFER), "is_mxfp8tensor"
    if hasattr(buffer, name):
        original = getattr(buffer, name)
        yield Patch(buffer, name, lambda param: original(param) and not shares_codes(param))


def _four_bit_patches(move_with: Callable[[Any], Any]) -> Iterator[Patch]:
    """The same where the host's buffers can hold 4-bit weights, and how these are laid out."""
    fp4, buffer = host.module(host.FP4), host.module(host.BUFFER)
    ddp, optimizer = host.module(host.DDP), host.module(host.OPTIMIZER)
    grouped = buffer.group_params_for_buffers

    def group_by_width(*args: Any, **kwargs: Any) -> Any:
        return layout.by_width(grouped(*args, **kwargs))

    def by_width(lay_out: Callable[..., Any]) -> Any:
        return staticmethod(functools.partial(layout.of_one_width, lay_out))

    lays_out, places = "_compute_per_buffer_param_layout", [buffer, ddp, optimizer]
    for kind in host.layer_wise():
        places.append(host.module(kind.__module__))
        yield Patch(kind, lays_out, by_width(getattr(kind, lays_out)))
        yield Patch(ddp, "partition_buckets", layout.of_one_owner(ddp.partition_buckets))

    yield from [
        Patch(fp4, "FP4_TENSOR_CLASS", _also(fp4.HAVE_TE_FP4_TENSOR_CLASS and fp4.FP4_TENSOR_CLASS, FourBit)),
        Patch(fp4, "HAVE_TE_FP4_TENSOR_CLASS", True),
        *(
            Patch(owner, "modify_nvfp4_rowwise_storage", move_with(owner.modify_nvfp4_rowwise_storage))
            for owner in host.four_bit_moves()
        ),
        Patch(buffer._ParamAndGradBuffer, "_compute_nvfp4_packed_layout", layout.pack),
        *(Patch(place, "group_params_for_buffers", group_by_width) for place in places),
        Patch(optimizer.DistributedOptimizer, lays_out, by_width(getattr(optimizer.DistributedOptimizer, lays_out))),
    ]


def _also(theirs: Any, ours: type) -> tuple[type, ...]:
    return (theirs, ours) if theirs else (ours,)


def _move(weight: QuantizedWeight, storage: Tensor) -> None:
    """Move a weight's bytes to a view of the buffer, and show the optimizer its initial value."""
    fmt = weight.format
    if fmt.casts_columnwise:
        raise two_directions(f"{weight!r}: {fmt}")
    if storage.numel() != weight.rowwise_data.numel():
        raise RuntimeError(
            f"{weight!r} has {weight.rowwise_data.numel()} bytes, and this megatron-core sets {storage.numel()} aside for it: "
            "it knows no buffers of two elements a byte; 0.19 does"
        )
    weight.rebind(rowwise_data=storage.view(weight.rowwise_data.shape))
    host_weight: Any = weight
    host_weight.get_high_precision_init_val = lambda: initial_value(weight)
    host_weight.clear_high_precision_init_val = lambda: setattr(weight, "high_precision_init_val", None)


class ConstructionChecks:
    """The checks of one `quantized_params()`, of weights that `moved` into byte buffers and of the
    optimizers over them.
    """

    def __init__(self) -> None:
        self.moved: list[Any] = []
        self._optimizers: list[Any] = []
        self._is_layer_wise = False  # while an optimizer of whole matrices makes those inside it
        self._has_primary = False  # if any model that was wrapped here has
        self._configs: dict[int, tuple[Any, Any]] = {}  # what was given, and what optimizers get

    def patches(self) -> Iterator[Patch]:
        """The functions that build wrappers and optimizers, each after its check."""
        for kind, others in host.wrappers():
            wraps = _check_other_wrapper if others else self._check_wrapper
            yield Patch(kind, "__init__", _before(vars(kind)["__init__"], wraps))
        for owner, name, emerging in host.factories():
            builds = self._check_emerging if emerging else self._check_factory
            factory = _without_flat_views(_before(getattr(owner, name), builds))
            yield Patch(owner, name, self._keeping_fp32_masters(factory))
        hybrid, sort = host.hybrid(), "_get_sub_optimizer_param_groups"
        yield Patch(hybrid, sort, offload.copying_once(getattr(hybrid, sort)))
        distributed, build = host.module(host.OPTIMIZER).DistributedOptimizer, "_build_model_and_main_param_groups"
        host.require(distributed, (build,), f"{host.OPTIMIZER}.DistributedOptimizer")
        yield Patch(distributed, build, staticmethod(offload.one_by_one(getattr(distributed, build))))
        for kind in host.layer_wise():
            yield Patch(kind, "__init__", self._of_whole_matrices(vars(kind)["__init__"]))
        starting = _starting_from_initial_values(vars(host.float16_optimizer())["__init__"])
        yield Patch(host.float16_optimizer(), "__init__", starting)
        for kind in host.optimizer_bases():
            yield Patch(kind, "__init__", self._remembering(vars(kind)["__init__"]))

    def check_owned(self) -> None:
        """RuntimeError for tiles of MXFP8 that lie in byte buffers without an optimizer of this
        context: one that the host makes by itself would write 1x32 blocks over them.
        """
        owned = {id(param) for one in self._optimizers for param in unattached.params_of(one)}
        if any(id(param) not in owned for param in self.moved if not isinstance(param, QuantizedWeight)):
            raise RuntimeError(
                "MXFP8Tensors in tiles of 32x32 lie in byte buffers, and no optimizer over them was built: build "
                "DistributedDataParallel and the optimizer inside the same quantized_params()"
            )

    def end(self) -> None:
        """Optimizers that own no quantized weight are the host's alone."""
        for one in self._optimizers:
            if not unattached.owns_quantized_weights(one):
                unattached.accept(one)

    def _check_wrapper(self, ddp_config: Any, module: Any, **_: Any) -> None:
        validate.check_grouped(module)
        trained = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        if any(is_primary(param) for _, param in trained):
            validate.check_settings([ddp_config])
            validate.check_distributed(ddp_config)
            validate.check_te_tensors(trained)
            self._has_primary = True

    def _keeping_fp32_masters(self, factory: Callable[..., Any]) -> Callable[..., Any]:
        """A factory of optimizers that does not leave masters to the fused Adam, where a model has
        primary weights.

        All optimizers of a chain share their configuration, so those of plain ones do neither.
        """
        signature = inspect.signature(factory)

        @functools.wraps(factory)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            given = bound.arguments
            params = (param for chunk in given["model_chunks"] for param in chunk.parameters())
            if self._has_primary or any(map(is_primary, params)):
                given["config"] = self._config_of(given["config"])
            return factory(*bound.args, **bound.kwargs)

        return call

    def _config_of(self, config: Any) -> Any:
        """The one that the optimizers of a chain get for `config`."""
        _, ours = self._configs.setdefault(id(config), (config, host.keeping_fp32_masters(config)))
        return ours

    def _check_factory(self, config: Any, model_chunks: Any, param_groups: Any, **_: Any) -> None:
        params = [param for group in param_groups for param in group["params"]]
        if any(map(is_primary, params)):
            validate.check_settings([config, *(chunk.ddp_config for chunk in model_chunks)])
            validate.check_distributed(config)
            validate.check_adam(config)
        self._check_moved(params)

    def _check_emerging(self, config: Any, model_chunks: Any, **_: Any) -> None:
        if any(map(is_primary, (param for chunk in model_chunks for param in chunk.parameters()))):
            validate.check_settings([config, *(chunk.ddp_config for chunk in model_chunks)])
            validate.check_layer_wise(config)
            validate.check_whole_matrices(model_chunks)

    def _of_whole_matrices(self, original: Callable[..., None]) -> Callable[..., None]:
        """The constructor of an optimizer whose ranks own whole matrices, which makes others of
        those that it is given.
        """

        def check(optimizers: Iterable[Any], model_chunks: Any = None, **_: Any) -> None:
            groups = [group for one in optimizers for group in getattr(one, "param_groups", ())]
            if any(is_primary(param) for group in groups for param in group["params"]):
                validate.check_whole_matrices(model_chunks or [])

        checked = _before(original, check)

        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> None:
            before, self._is_layer_wise = self._is_layer_wise, True
            try:
                checked(*args, **kwargs)
            finally:
                self._is_layer_wise = before
            for chunk in args[0].model_chunks:
                release_initial_values(filter(host.is_managed_by_layer, chunk.parameters()))

        return init

    def _check_moved(self, params: Iterable[Any]) -> None:
        moved = set(map(id, self.moved))
        for param in params:
            if (isinstance(param, QuantizedWeight) or shares_codes(param)) and id(param) not in moved:
                what = (
                    repr(param) if isinstance(param, QuantizedWeight) else f"a {type(param).__name__} in tiles of 32x32"
                )
                raise RuntimeError(
                    f"{what} lies in no byte buffer that was laid out in this quantized_params(): call quantize_, then build "
                    "DistributedDataParallel and the optimizer, both inside the same quantized_params()"
                )

    def _remembering(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(one: Any, *args: Any, **kwargs: Any) -> None:
            original(one, *args, **kwargs)
            inner = vars(one).get("optimizer")
            params = [param for group in getattr(inner, "param_groups", ()) for param in group["params"]]
            if any(map(is_primary, params)) and not self._is_layer_wise:
                validate.check_kind(one)
            self._check_moved(params)
            self._optimizers.append(one)
            unattached.refuse(one)

        return init


def _before(original: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """`original`, after `check` has seen its arguments by name."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        given.pop("self", None)
        check(**given.pop("kwargs", {}), **given)
        return original(*args, **kwargs)

    return call


def _without_flat_views(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A factory of optimizers that takes no flat views of parameters.

    With `fp8_recipe="delayed"`, which megatron.training sets for any model, Megatron makes them for
    the attributes of shards, and a QuantizedWeight has none.
    """
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        config, chunks = given["config"], given["model_chunks"]
        params = (param for chunk in chunks for param in chunk.parameters())
        if not any(isinstance(param, QuantizedWeight) for param in params):
            return factory(*args, **kwargs)
        before, config.fp8_recipe = config.fp8_recipe, None
        try:
            return factory(*args, **kwargs)
        finally:
            config.fp8_recipe = before

    return call


def _check_other_wrapper(module: Any, **_: Any) -> None:
    if any(map(is_primary, module.parameters())):
        raise validate.sharded_otherwise()


def _starting_from_initial_values(original: Callable[..., None]) -> Callable[..., None]:
    """The constructor of an optimizer that copies its parameters to FP32, primary weights from
    their values before quantization.
    """

    @functools.wraps(original)
    def init(one: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        groups = optimizer.param_groups if optimizer else ()
        weights = [p for group in groups for p in group["params"] if is_primary(p)]
        for weight in weights:
            vars(weight)["detach"] = functools.partial(initial_value, weight)
        try:
            original(one, optimizer, *args, **kwargs)
        finally:
            for weight in weights:
                del vars(weight)["detach"]

    return init
