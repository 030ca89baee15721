"""ScalingState: what delayed scaling keeps of the past, around the casts of one optimizer and in Megatron's checkpoints."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from zerocast.cast.delayed_scaling import DelayedScaling
from zerocast.distributed.group import Group

from . import host

KEY = "zerocast_scaling"
logger = logging.getLogger(__name__)


class ScalingState:
    """That of the weights of one optimizer's plan, by name; nothing to do where none of them scales by the past.

    Nor where TransformerEngine keeps scales and histories, in the state of its modules: there a cast raises the amax.
    """

    def __init__(self, optimizer: Any, delayed: DelayedScaling, group: Group) -> None:
        self._optimizer, self._delayed, self._rank = optimizer, delayed, group.rank

    def saving(self, sharded_state_dict: Callable[..., Any]) -> Callable[..., Any]:
        """The host's method, with this state in an entry of its own: one object of the ranks that share the masters."""

        def call(*args: Any, **kwargs: Any) -> Any:
            entries = sharded_state_dict(*args, **kwargs)
            if entries is not None and self._delayed.state_dict():
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
        values = {
            name: {key: t.cpu().clone() for key, t in tensors.items()}
            for name, tensors in self._delayed.state_dict().items()
        }
        first = next(iter(values))
        replica = (one.distributed_optimizer_instance_id, 0, self._rank)
        key = f"optimizer.distributed.dp_group_idx_{one.data_parallel_group_idx}.{KEY}.{first}"
        return host.module(host.CHECKPOINT_MAPPING).ShardedObject(key, values, (1,), (0,), replica_id=replica)

    def _take(self, values: Mapping[str, Mapping[str, Tensor]]) -> None:
        for name in self._delayed.load_state_dict(values):
            if self._rank == 0:
                logger.warning("no scale and history of %s in the checkpoint: seeded from its master", name)
