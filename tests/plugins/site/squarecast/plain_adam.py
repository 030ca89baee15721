"""A host: torch's AdamW over masters that one process owns."""

from zerocast.cast.host import CastDriver, Gather, Host
from zerocast.distributed.group import ONE_PROCESS


class NothingToGather(Gather):
    def start(self, plan):
        plan.post_all_gather()


def attach(optimizer, weights, masters):
    """Cast after every step; `remove()` of the handle ends it."""
    starts = [0] * len(weights)
    attached = CastDriver(Host("plain_adam", ONE_PROCESS, weights, masters, starts, NothingToGather()))
    attached.refresh()
    return attached, optimizer.register_step_post_hook(lambda *_: attached.after_step())
