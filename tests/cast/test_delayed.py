"""fp8_delayed over many steps on several ranks, against a simulation without ranks (docs/formats/fp8_delayed.md)."""

import torch

from zerocast import CastPlan, QuantizedWeight, get_format
from zerocast.backends import reference
from zerocast.distributed.group import ONE_PROCESS


def test_a_host_may_keep_the_history(backend: str) -> None:
    """Without a history buffer the amax grows, exactly, until the host takes it; scale and what is beside the amax stay."""
    history = torch.tensor([[0.0, 3.0000002, -1.0]])  # no bf16 number: bf16 weights reduce in bf16 otherwise
    fmt = get_format("fp8_delayed")
    buffers = {
        "rowwise_data": torch.zeros(4, 4, dtype=torch.uint8),
        "rowwise_scale_inv": torch.zeros(1),
        "scale": torch.tensor([16.0]),
        "amax": history[0, 1:2],
    }
    weight = QuantizedWeight.of_buffers((4, 4), fmt, torch.bfloat16, buffers)
    rolls = QuantizedWeight.empty((4, 4), fmt)
    master, other = torch.full((16,), 2.0), torch.full((16,), 7.0)
    plan = CastPlan([weight, rolls], [master, other], [0, 0], ONE_PROCESS, backend=backend)
    plan.cast()
    assert history.tolist() == [[0.0, torch.tensor(3.0000002).item(), -1.0]]
    master.fill_(-5.0)
    plan.cast()
    assert history.tolist() == [[0.0, 5.0, -1.0]]
    assert (buffers["scale"].item(), buffers["rowwise_scale_inv"].item()) == (16.0, 1 / 16)
    expected = reference.quantize(fmt, master.view(4, 4), torch.bfloat16, torch.tensor([16.0]))
    assert torch.equal(buffers["rowwise_data"], expected.rowwise_data)
    assert rolls.scale is not None and rolls.scale.item() == 64.0  # one beside it keeps its own
