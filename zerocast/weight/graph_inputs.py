"""The plain tensors that a compiled graph gets in place of its quantized weights.

AOTAutograd of torch 2.11 takes each input of a graph apart by a walk in Python, and looks at
everything that a backward pass was saved, which costs the CPU 70 calls per weight. Later releases
generate code for this.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from zerocast import torch_names

# The last release of torch that walks.
LAST_THAT_WALKS = (2, 11)
_MODULE = "torch._functorch._aot_autograd.runtime_wrappers"
_NAME = "runtime_unwrap_tensor_subclasses"
# The types that a graph gets unchanged.
_PLAIN = {Tensor, nn.Parameter, int}


def take_apart_at_once(kind: type[Any]) -> None:
    """Let compiled graphs ask weights of class `kind` for all their plain tensors in one call.
    Called while a weight is traced, before the first graph runs.

    This replaces a function of torch 2.11 for the process, which is still called for other
    subclasses of Tensor. A test counts the calls (`tests/fsdp2/test_host_work.py`).
    """
    module = sys.modules.get(_MODULE)
    if module is None or torch_names.installed_release() > LAST_THAT_WALKS:
        return
    walk = getattr(module, _NAME)
    if not hasattr(walk, "takes_weights"):
        setattr(module, _NAME, _by_weight(kind, walk))


def _by_weight(kind: type[Any], walk: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def unwrapped(
        arguments: Sequence[Any], *, append_symints: bool, subclass_metas: Sequence[Any] | None = None
    ) -> list[Any]:
        plain: list[Any] = []
        for place, argument in enumerate(arguments):
            # Each call costs time here, also calls into C. A weight's sizes are constants of a
            # graph.
            if type(argument) in _PLAIN:
                plain += (argument,)
            elif type(argument) is kind:
                plain += argument.read_by_graphs()
            else:
                metas = None if subclass_metas is None else [subclass_metas[place]]
                plain += walk([argument], append_symints=append_symints, subclass_metas=metas)
        return plain

    unwrapped.takes_weights = True  # type: ignore[attr-defined]
    return unwrapped
