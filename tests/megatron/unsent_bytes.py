"""Training where byte buffers are laid out as Megatron does by itself, in which bytes that a rank casts are not sent."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from tests.megatron.host_on_cpu import KNOWS_FOUR_BITS
from tests.megatron.training import Case, build, trained
from tests.workers import error_of
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import attachment

if KNOWS_FOUR_BITS:
    from megatron.core.distributed import distributed_data_parallel
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.optimizer import distrib_optimizer

    HOSTS_LAYOUT = [
        (owner, name, vars(owner)[name])
        for owner, name in (
            (buffers._ParamAndGradBuffer, "_compute_nvfp4_packed_layout"),
            (distrib_optimizer.DistributedOptimizer, "_compute_per_buffer_param_layout"),
            (distrib_optimizer, "group_params_for_buffers"),
            (distributed_data_parallel, "group_params_for_buffers"),
        )
    ]


@contextlib.contextmanager
def hosts_own_layout() -> Iterator[None]:
    """Inside `quantized_params()`: byte buffers as Megatron lays them out by itself."""
    kept = {}
    for owner, name, original in HOSTS_LAYOUT:
        kept[owner, name] = vars(owner)[name]
        setattr(owner, name, original)
    try:
        yield
    finally:
        for (owner, name), value in kept.items():
            setattr(owner, name, value)


def train_in_the_hole(case: Case) -> tuple[str, dict[str, int]]:
    """With Megatron's own layout: what `attach` says, and the stale bytes where its check is left out."""
    with case.host():
        with integration.quantized_params(), hosts_own_layout():
            run = build(case)
        said = error_of(lambda: integration.attach(run.optimizer, run.ddp))
        with mock.patch.object(attachment, "bytes_not_sent", return_value=None):
            integration.attach(run.optimizer, run.ddp)
        return said, trained(run)[1]
