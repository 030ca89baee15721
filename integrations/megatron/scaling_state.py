"""ScalingState: what delayed scaling keeps of the past, around the casts of one optimizer and in Megatron's checkpoints."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zerocast import CastPlan, QuantizedWeight
from zerocast.distributed.group import Group
from zerocast.optim.delayed import DelayedScaling

from . import host

KEY = "zerocast_scaling"
logger = logging.getLogger(__name__)


class ScalingState:
    """Of the quantized weights of one optimizer, by name; nothing to do where none of them scales by the past.

    Nor where TransformerEngine keeps scales and histories, in the state of its modules: there a cast raises the amax.
    """

    def __init__(self, optimizer: Any, weights: Mapping[str, QuantizedWeight], group: Group) -> None:
        self._optimizer, self._rank = optimizer, group.rank
        ours = {name: weight for name, weight in weights.items() if not weight.state.keeps_amax}
        self._delayed = DelayedScaling(ours, group)
        self._never = [torch.zeros(1, dtype=torch.bool, device=weight.device) for weight in weights.values()][:1]

    def cast(self, plan: CastPlan) -> None:
        """A cast after a step."""
        for never in self._never:
            self._delayed.advance(never)
        plan.cast()

    def cast_again(self, plan: CastPlan) -> None:
        """The last cast once more, from the masters as they are; histories do not move on."""
        with self._delayed.replay():
            plan.cast()
        if self._delayed.found():  # the first cast found the amax that scales the second
            with self._delayed.replay():
                plan.cast()

    def saving(self, sharded_state_dict: Callable[..., Any]) -> Callable[..., Any]:
        """The host's method, with this state in an entry of its own: one object of the ranks that share the masters."""

        def call(*args: Any, **kwargs: Any) -> Any:
            entries = sharded_state_dict(*args, **kwargs)
            if self._delayed.views and entries is not None:
                entries[KEY] = self._entry()
            return entries

        return call

    def loading(self, load_state_dict: Callable[..., Any], is_real: Callable[[], bool]) -> Callable[..., Any]:
        """The host's method, and then this state from what it loaded; without it, seeded from the masters by the next cast."""

        def call(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            result = load_state_dict(state_dict, *args, **kwargs)
            if is_real():
                self._take(state_dict.get(KEY, {}))
            return result

        return call

    def _entry(self) -> Any:
        one = self._optimizer
        first = next(iter(self._delayed.views))
        values = {
            name: {key: t.cpu().clone() for key, t in views.items()} for name, views in self._delayed.views.items()
        }
        replica = (one.distributed_optimizer_instance_id, 0, self._rank)
        key = f"optimizer.distributed.dp_group_idx_{one.data_parallel_group_idx}.{KEY}.{first}"
        return host.module(host.CHECKPOINT_MAPPING).ShardedObject(key, values, (1,), (0,), replica_id=replica)

    def _take(self, values: Mapping[str, Mapping[str, Tensor]]) -> None:
        for name, views in self._delayed.views.items():
            if name in values and all(values[name][key].shape == view.shape for key, view in views.items()):
                for key, view in views.items():
                    view.copy_(values[name][key])
            else:
                self._delayed.lose(name)
                if self._rank == 0:
                    logger.warning("no scale and history of %s in the checkpoint: seeded from its master", name)
