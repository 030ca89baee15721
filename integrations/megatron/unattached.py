"""Methods of an optimizer that raise before `attach` and after `detach`, while nothing casts the
masters of its quantized weights.

Outside `quantized_params()` Megatron treats a QuantizedWeight as a plain parameter: its own copy of
masters to parameters would write values over the codes. It would cast MXFP8Tensors in tiles of
32x32 as if they had 1x32 blocks, both directions into one memory. So every method that writes or
loads, or prepares to, raises. Methods are replaced on the optimizer's instance; the host's classes
stay as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from zerocast import QuantizedWeight
from zerocast.cast.delayed_scaling import DelayedScaling
from zerocast.integrations import Patches
from zerocast.weight.validity import Validity

from . import host
from .primary import shares_codes
from .shards import shares

# Prefixes of the names of methods that write masters or weights, or prepare to.
_WRITING_PREFIXES = (
    "_copy_main_params",
    "_copy_model_params",
    "_init_optimizer_states",
    "_set_main_param",
    "load_",
    "prepare_",
    "reload_",
    "step",
)
# This method makes the state dict that a save writes, or the template that a load fills.
_SAVES_OR_PREPARES_LOAD = "sharded_state_dict"
# These methods raise only after an attachment that left its weights partial.
_SAVES = ("save_parameter_state", "state_dict")


@dataclass(frozen=True)
class DetachedState:
    """The state that a detached attachment leaves to the next one.

    Attributes:
        delayed: delayed scaling, keyed by the suffix of a share.
        validity: the validity of the weights, which may be partial.
    """

    delayed: Mapping[str, DelayedScaling]
    validity: Validity


class RefusedMethod:
    """Replaces a method of an optimizer. It raises if the optimizer, or one in its chain, owns
    quantized weights that are not attached.
    """

    def __init__(self, optimizer: Any, name: str, detached: DetachedState | None) -> None:
        self._optimizer = optimizer
        self._name = name
        self.detached = detached

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise RuntimeError, or call the host's method if all quantized weights are attached."""
        optimizer = self._optimizer
        if not self._saves_complete_weights(args, kwargs) and any(
            is_refused(inner) and owns_quantized_weights(inner) for inner in host.distributed_optimizers(optimizer)
        ):
            self._raise(f"{self._name} of {type(optimizer).__name__}")
        # The caller may have stored this method before `attach` replaced it on the instance.
        method = getattr(optimizer, self._name)
        if method is self:
            return getattr(type(optimizer), self._name)(optimizer, *args, **kwargs)
        return method(*args, **kwargs)

    def _saves_complete_weights(self, args: Any, kwargs: Any) -> bool:
        partial = self.detached is not None and self.detached.validity.partial is not None
        return self._name == _SAVES_OR_PREPARES_LOAD and not host.is_loading(args, kwargs) and not partial

    def _raise(self, method: str) -> NoReturn:
        if self.detached is None:
            raise RuntimeError(
                f"{method}, which was built in quantized_params() and is not attached: Megatron's own copy would write over the "
                "codes of its quantized weights. Call attach(optimizer, ddp_chunks) on every rank first"
            )
        partial = self.detached.validity.partial
        after = f" after {partial}" if partial else ""
        raise RuntimeError(
            f"{method}, which was detached{after}: nothing casts its masters, and Megatron's own copy would write over the "
            "codes of its quantized weights. Call attach(optimizer, ddp_chunks) on every rank again"
        )


def refuse(optimizer: Any, detached: DetachedState | None = None) -> None:
    """Replace the methods that write, so that they raise. Methods that save raise too after an
    attachment that left its weights partial.
    """
    restore(optimizer)
    names = [name for name in dir(type(optimizer)) if name.startswith(_WRITING_PREFIXES)]
    saves = _SAVES if detached is not None and detached.validity.partial else ()
    for name in (*names, _SAVES_OR_PREPARES_LOAD, *saves):
        vars(optimizer)[name] = RefusedMethod(optimizer, name, detached)


def restore(optimizer: Any) -> None:
    """Give an optimizer the host's own methods back."""
    for name in _refused_names(optimizer):
        delattr(optimizer, name)


def restore_until_undone(patches: Patches, optimizers: Sequence[Any]) -> None:
    """Give optimizers the host's own methods back until `patches` are undone."""
    for optimizer in optimizers:
        for name in _refused_names(optimizer):
            patches.remove(optimizer, name)


def _refused_names(optimizer: Any) -> list[str]:
    return [name for name, value in vars(optimizer).items() if isinstance(value, RefusedMethod)]


def state_left_in(optimizer: Any) -> DetachedState | None:
    """Return the state that this optimizer's last attachment left. None if there was no attachment,
    or while attached.
    """
    method = vars(optimizer).get("step")
    return method.detached if isinstance(method, RefusedMethod) else None


def owns_quantized_weights(optimizer: Any) -> bool:
    """Return True if the buffers of an optimizer, or of one in its chain, hold weights that the
    host cannot cast by itself. The result is the same on every rank.
    """
    return any(isinstance(param, QuantizedWeight) or shares_codes(param) for param in params_of(optimizer))


def params_of(optimizer: Any) -> Iterator[Any]:
    """Yield the parameters in the buffers of an optimizer, or of those in its chain."""
    for inner in host.distributed_optimizers(optimizer):
        if host.is_layer_wise(inner) or hasattr(inner, "buffers"):
            for share in shares(inner):
                for buffer in share.buffers:
                    yield from buffer.params


def is_refused(optimizer: Any) -> bool:
    """Return True if an optimizer's methods currently raise."""
    return isinstance(vars(optimizer).get("step"), RefusedMethod)
