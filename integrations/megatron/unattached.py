"""The methods that an optimizer refuses before `attach` and after `detach`, while nothing casts the
masters of its quantized weights.

Once `quantized_params()` is over, Megatron takes a QuantizedWeight for a plain parameter, and its
own copy of masters to parameters would write their values over the codes. MXFP8Tensors of 32x32
tiles it would cast as if they had none, both directions into one memory. So every method that
writes or loads, or prepares to, raises. It is replaced on the optimizer's instance; the host's
classes stay as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from zerocast import QuantizedWeight
from zerocast.cast.delayed_scaling import DelayedScaling
from zerocast.integrations.host_adapter import Patches
from zerocast.weight.validity import Validity

from . import host, ownership
from .primary import shares_codes

_BEGIN = (
    "_copy_main_params",
    "_copy_model_params",
    "_init_optimizer_states",
    "_set_main_param",
    "load_",
    "prepare_",
    "reload_",
    "step",
)
_FILLS = "sharded_state_dict"  # it makes what a save writes, or what a load fills
_SAVES = ("save_parameter_state", "state_dict")


@dataclass(frozen=True)
class DetachedState:
    """The state that a detached attachment leaves to the next one: delayed scaling by the suffix of
    a share.
    """

    delayed: Mapping[str, DelayedScaling]
    validity: Validity


class RefusedMethod:
    """Stands for a method of one optimizer, and raises if that, or one in its chain, owns weights
    that are not attached.
    """

    def __init__(self, optimizer: Any, name: str, detached: DetachedState | None) -> None:
        self._optimizer, self._name, self.detached = optimizer, name, detached

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """RuntimeError, or the host's method if all quantized weights are attached."""
        one = self._optimizer
        if not self._saves_complete_weights(args, kwargs) and any(
            is_refused(inner) and owns_quantized_weights(inner) for inner in host.distributed_optimizers(one)
        ):
            self._raise(f"{self._name} of {type(one).__name__}")
        method = getattr(one, self._name)
        return getattr(type(one), self._name)(one, *args, **kwargs) if method is self else method(*args, **kwargs)

    def _saves_complete_weights(self, args: Any, kwargs: Any) -> bool:
        partial = self.detached is not None and self.detached.validity.partial is not None
        return self._name == _FILLS and not host.is_loading(args, kwargs) and not partial

    def _raise(self, what: str) -> NoReturn:
        if self.detached is None:
            raise RuntimeError(
                f"{what}, which was built in quantized_params() and is not attached: Megatron's own copy would write over the "
                "codes of its quantized weights. Call attach(optimizer, ddp_chunks) on every rank first"
            )
        partial = self.detached.validity.partial
        after = f" after {partial}" if partial else ""
        raise RuntimeError(
            f"{what}, which was detached{after}: nothing casts its masters, and Megatron's own copy would write over the codes of "
            "its quantized weights. Call attach(optimizer, ddp_chunks) on every rank again"
        )


def refuse(optimizer: Any, detached: DetachedState | None = None) -> None:
    """Let what writes raise; after an attachment that left weights partial, what saves too."""
    accept(optimizer)
    names = [name for name in dir(type(optimizer)) if name.startswith(_BEGIN)]
    saves = _SAVES if detached is not None and detached.validity.partial else ()
    for name in (*names, _FILLS, *saves):
        vars(optimizer)[name] = RefusedMethod(optimizer, name, detached)


def accept(optimizer: Any) -> None:
    """The host's own methods are back."""
    for name in _refused_names(optimizer):
        delattr(optimizer, name)


def lift(patches: Patches, optimizers: Sequence[Any]) -> None:
    """The host's own methods are back until `patches` are undone."""
    for one in optimizers:
        for name in _refused_names(one):
            patches.remove(one, name)


def _refused_names(optimizer: Any) -> list[str]:
    return [name for name, value in vars(optimizer).items() if isinstance(value, RefusedMethod)]


def state_left_in(optimizer: Any) -> DetachedState | None:
    """The state that this optimizer's last attachment left; None without one, or while attached."""
    method = vars(optimizer).get("step")
    return method.detached if isinstance(method, RefusedMethod) else None


def owns_quantized_weights(optimizer: Any) -> bool:
    """True if weights that the host alone cannot cast are in the buffers of an optimizer, or of one
    in its chain. The same on every rank.
    """
    return any(isinstance(param, QuantizedWeight) or shares_codes(param) for param in params_of(optimizer))


def params_of(optimizer: Any) -> Iterator[Any]:
    """The parameters in the buffers of an optimizer, or of those in its chain."""
    inner = [
        one for one in host.distributed_optimizers(optimizer) if host.is_layer_wise(one) or hasattr(one, "buffers")
    ]
    for share in (share for one in inner for share in ownership.shares(one)):
        for buffer in share.buffers:
            yield from buffer.params


def is_refused(optimizer: Any) -> bool:
    """True if it refuses at present."""
    return isinstance(vars(optimizer).get("step"), RefusedMethod)
