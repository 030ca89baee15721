"""What an optimizer over quantized weights refuses while nothing of zerocast's casts its masters: before `attach`, after `detach`.

Once `building()` is over Megatron takes a QuantizedWeight for a plain parameter, and its own copy of masters to parameters would
write their values over the codes. So every method that writes, loads or prepares to raises, on the optimizer's instance, and the
host's classes stay as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from zerocast import QuantizedWeight
from zerocast.cast.delayed_scaling import DelayedScaling
from zerocast.weight.write_guard import WriteGuard

from . import host
from .guard import is_loading

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
class Left:
    """What an attachment that was detached leaves to the next one."""

    delayed: DelayedScaling | None
    writes: WriteGuard


class Refused:
    """Stands for a method of one optimizer. It raises if the optimizer, or one in its chain, owns weights that are not attached."""

    def __init__(self, optimizer: Any, name: str, left: Left | None) -> None:
        self._optimizer, self._name, self.left = optimizer, name, left

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """RuntimeError, or what the host's method gives where all quantized weights of a chain have been attached."""
        one = self._optimizer
        saves = (
            self._name == _FILLS
            and not is_loading(args, kwargs)
            and (self.left is None or not self.left.writes.is_partial)
        )
        if not saves and any(
            is_refused(inner) and owns_quantized_weights(inner) for inner in host.distributed_optimizers(one)
        ):
            self._raise(f"{self._name} of {type(one).__name__}")
        method = getattr(one, self._name)
        return getattr(type(one), self._name)(one, *args, **kwargs) if method is self else method(*args, **kwargs)

    def _raise(self, what: str) -> NoReturn:
        if self.left is None:
            raise RuntimeError(
                f"{what}, which was built in building() and is not attached: Megatron's own copy would write over the codes of "
                "its quantized weights. Call attach(optimizer, ddp_chunks) on every rank first"
            )
        partial = f" after {self.left.writes.partial}" if self.left.writes.is_partial else ""
        raise RuntimeError(
            f"{what}, which was detached{partial}: nothing casts its masters, and Megatron's own copy would write over the codes "
            "of its quantized weights. Call attach(optimizer, ddp_chunks) on every rank again"
        )


def refuse(optimizer: Any, left: Left | None = None) -> None:
    """From now on what would write raises; after an attachment that a write broke off what would save too."""
    names = [name for name in dir(type(optimizer)) if name.startswith(_BEGIN)]
    for name in (*names, _FILLS, *(_SAVES if left is not None and left.writes.is_partial else ())):
        vars(optimizer)[name] = Refused(optimizer, name, left)


def lift(optimizers: Sequence[Any]) -> Callable[[], None]:
    """The host's own methods are back; returns what refuses again."""
    once = {id(one): one for one in optimizers}.values()
    kept = [(vars(one), name, value) for one in once for name, value in vars(one).items() if isinstance(value, Refused)]
    for held, name, _ in kept:
        del held[name]

    def restore() -> None:
        for held, name, value in kept:
            held[name] = value

    return restore


def left_by(optimizer: Any) -> Left | None:
    """What the last attachment of this optimizer has left; None where there was none, or where it is attached."""
    method = vars(optimizer).get("step")
    return method.left if isinstance(method, Refused) else None


def owns_quantized_weights(optimizer: Any) -> bool:
    """Whether QuantizedWeights are in the buffers of an optimizer, or of one in its chain. The same on every rank."""
    buffers = [buffer for one in host.distributed_optimizers(optimizer) for buffer in getattr(one, "buffers", ())]
    return any(isinstance(param, QuantizedWeight) for buffer in buffers for param in buffer.params)


def is_refused(optimizer: Any) -> bool:
    """Whether it refuses at present."""
    return isinstance(vars(optimizer).get("step"), Refused)
