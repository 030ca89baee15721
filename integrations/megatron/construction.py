"""Construction: what one `building()` looks at while the host builds, so that a mistake is an error there and names its remedy.

The wrappers of models, the factories of optimizers and the constructor of every optimizer are asked before they begin: later the
host would fail at an operator that a QuantizedWeight does not have, or not at all.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from zerocast import QuantizedWeight

from . import host, refusal, unattached
from .primary import is_primary

Replacement = tuple[Any, str, Any]  # owner, name, value


class Construction:
    """The QuantizedWeights that `moved` into byte buffers, and the optimizers that were made over them."""

    def __init__(self) -> None:
        self.moved: list[QuantizedWeight] = []
        self._optimizers: list[Any] = []

    def replacements(self) -> Iterator[Replacement]:
        """(owner, name, value) of what asks here first."""
        for kind, others in host.wrappers():
            yield kind, "__init__", _before(vars(kind)["__init__"], _check_other_wrapper if others else _check_wrapper)
        for owner, name, emerging in host.factories():
            yield owner, name, _before(getattr(owner, name), self._check_emerging if emerging else self._check_factory)
        for kind in host.layer_wise():
            yield kind, "__init__", _before(vars(kind)["__init__"], _check_layer_wise)
        for kind in host.optimizer_bases():
            yield kind, "__init__", self._remembering(vars(kind)["__init__"])

    def end(self) -> None:
        """Optimizers that own no quantized weight are the host's alone."""
        for one in self._optimizers:
            if not unattached.owns_quantized_weights(one):
                unattached.lift([one])

    def _check_factory(self, config: Any, model_chunks: Any, param_groups: Any, **_: Any) -> None:
        params = [param for group in param_groups for param in group["params"]]
        if any(map(is_primary, params)):
            refusal.refuse_settings([config, *(chunk.ddp_config for chunk in model_chunks)])
            refusal.refuse_whole_masters(config)
        self._check_moved(params)

    def _check_emerging(self, config: Any, model_chunks: Any, **_: Any) -> None:
        if any(map(is_primary, (param for chunk in model_chunks for param in chunk.parameters()))):
            refusal.refuse_whole_layers(f"optimizer={config.optimizer!r}")

    def _check_moved(self, params: Iterable[Any]) -> None:
        moved = set(map(id, self.moved))
        for param in params:
            if isinstance(param, QuantizedWeight) and id(param) not in moved:
                raise RuntimeError(
                    f"{param!r} lies in no byte buffer that was laid out in this building(): call quantize_, then build "
                    "DistributedDataParallel and the optimizer, both inside the same building()"
                )

    def _remembering(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(one: Any, *args: Any, **kwargs: Any) -> None:
            original(one, *args, **kwargs)
            inner = vars(one).get("optimizer")
            params = [param for group in getattr(inner, "param_groups", ()) for param in group["params"]]
            if any(map(is_primary, params)):
                refusal.refuse_kind(one)
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
        check(**given.pop("kwargs", {}), **given)
        return original(*args, **kwargs)

    return call


def _check_wrapper(ddp_config: Any, module: Any, **_: Any) -> None:
    if any(is_primary(param) and param.requires_grad for param in module.parameters()):
        refusal.refuse_settings([ddp_config])
        refusal.refuse_whole_masters(ddp_config)


def _check_other_wrapper(module: Any, **_: Any) -> None:
    if any(map(is_primary, module.parameters())):
        raise refusal.sharded_otherwise()


def _check_layer_wise(optimizers: Iterable[Any], **_: Any) -> None:
    groups = [group for one in optimizers for group in getattr(one, "param_groups", ())]
    if any(is_primary(param) for group in groups for param in group["params"]):
        refusal.refuse_whole_layers("LayerWiseDistributedOptimizer")
