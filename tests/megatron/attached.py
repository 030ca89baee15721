"""A run with its attachment, and all that it holds."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tests import casts
from tests.megatron.training import Case, build
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron.offload import memory_of
from zerocast.integrations.megatron.primary import weight_of

METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}


class Attached:
    """A run with its attachment, and its optimizers' state in memory, which goes back by the host's own `load_state_dict`."""

    def __init__(self, case: Case) -> None:
        with integration.quantized_params():
            self.run = build(case)
        self.attachment = integration.attach(self.run.optimizer, self.run.ddp)
        self.own = self.run.optimizer.chained_optimizers

    def saved(self) -> Any:
        """Return the state that `dp_reshardable` checkpoints hold."""
        self.run.force_sync()
        states = {index: self._saved(one) for index, one in enumerate(self.own)}
        return tree_map_only(torch.Tensor, lambda t: t.detach().clone(), states if len(states) > 1 else states[0])

    def _saved(self, one: Any) -> dict[str, Any]:
        state = one.get_parameter_state_dp_reshardable()
        for tensors in (t for buckets in _dicts(state) for bucket in _first(buckets) for t in bucket):
            tensors["padding"] = False
        return {**one.state_dict(), "param_state": state, "param_state_sharding_type": "dp_reshardable"}

    def load(self, state: Any) -> None:
        """Load as a resumed run does: first what is to be filled, then the state."""
        model = self.run.ddp.module.sharded_state_dict(metadata=METADATA)
        self.run.optimizer.sharded_state_dict(model, is_loading=True, metadata=METADATA)
        integration.dequantize_(model, is_loading=True)
        self.run.optimizer.load_state_dict(tree_map_only(torch.Tensor, torch.clone, state))

    def everything(self) -> casts.Bytes:
        """Masters, moments and the bytes of all parameters, as this rank holds them."""
        self.run.force_sync()
        found = {f"own.{name}.{key}": casts.raw(memory_of(value)).copy() for name, key, value in self._owned()}
        for name, param in self.run.ddp.module.named_parameters():
            weight = weight_of(param) if name in self.run.weights else None
            held = {"": casts.raw(param).copy()} if weight is None else casts.bytes_of(weight)
            found |= {f"{name}.{key}": value for key, value in held.items()}
        return found

    def _owned(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for i, one in enumerate(self.own):
            for j, param in enumerate(p for group in one.optimizer.param_groups for p in group["params"]):
                yield f"{i}.{j}", "master", param
                yield from ((f"{i}.{j}", key, value) for key, value in one.optimizer.state[param].items())


def _dicts(state: dict[Any, Any]) -> list[Any]:
    return [value for key, value in state.items() if isinstance(key, int)]


def _first(buckets: dict[Any, Any]) -> Any:
    return next(iter(buckets.values()))
