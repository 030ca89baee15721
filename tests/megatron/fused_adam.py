"""TransformerEngine's FusedAdam as Megatron's Adam, on the CPU: its own Python, whose one kernel is written out here.

With TransformerEngine installed on a GPU, Megatron takes it by itself.
"""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from torch import Tensor

from tests.megatron.host_on_cpu import WHY_NOT

if not WHY_NOT:
    import megatron.core.optimizer as factories
    from megatron.core.optimizer import distrib_optimizer, optimizer_config


def _adam(
    chunk: int,
    noop: Tensor,
    tensors: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    correction: int,
    weight_decay: float,
) -> None:
    """Adam with decoupled weight decay, in FP32, of lists of gradients, parameters and both moments."""
    assert decoupled and correction
    for grad, param, first, second in zip(*tensors, strict=True):
        g, m, v = grad.float(), first.float(), second.float()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps) + weight_decay * param
        param.sub_(lr * update)
        first.copy_(m)
        second.copy_(v)


@contextlib.contextmanager
def fused_adam_in_the_host() -> Iterator[None]:
    """Within `te_in_the_host()`, megatron-core has found TransformerEngine's FusedAdam."""
    compiled = importlib.import_module("transformer_engine_torch")
    found = importlib.import_module("transformer_engine.pytorch.optimizers").FusedAdam
    names: list[tuple[Any, dict[str, Any]]] = [
        (compiled, {"multi_tensor_adam": _adam}),
        (factories, {"Adam": found, "USING_PYTORCH_OPTIMIZER": False, "is_te_min_version": lambda *_: True}),
        (distrib_optimizer, {"Adam": found, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True}),
        (optimizer_config, {"is_te_min_version": lambda *_: True}),
    ]
    with contextlib.ExitStack() as stack:
        for module, values in names:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(module, name, value))
        yield
