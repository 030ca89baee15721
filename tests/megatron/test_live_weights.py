"""Live weights of an attachment: whole, of the last cast, under given names."""

import pytest
import torch

from tests.megatron.attached import Attached
from tests.megatron.host_on_cpu import needs_four_bits, needs_megatron
from tests.megatron.ranks_host import host
from tests.megatron.training import NARROW, Case
from tests.serve.test_live import collected
from tests.workers import on_ranks
from zerocast.serve import dequantized

pytestmark = needs_megatron


@on_ranks(2)
@needs_four_bits  # of blocks of 16 rows, which `q` and `k` cut
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_under_given_names(overlap: bool) -> None:
    """From the attachment and from the model, with gathers that the next forward pass would begin."""
    with host():
        attached = Attached(Case(NARROW, overlap=overlap))
        run, rows = attached.run, {"q.weight": [range(64)], "k.weight": [range(64, 192)]}
        for number in range(2):
            run.step(number)
        naming = "modelopt"
        names = {"module.layers.0.weight": rows, "module.layers.1.weight": "down.weight"}
        found = collected(attached.attachment, naming, names=names)
        assert run.stale_bytes() == {}
        whole = collected(run.ddp.module, naming)
        assert torch.equal(torch.cat([found["q.weight"], found["k.weight"]]), whole["layers.0.weight"])
        assert torch.equal(
            torch.cat([found["q.weight_scale"], found["k.weight_scale"]]), whole["layers.0.weight_scale"]
        )
        assert torch.equal(found["down.weight"], whole["layers.1.weight"])
        assert torch.equal(found["module.layers.2.weight"], whole["layers.2.weight"])
        assert torch.equal(found["module.layers.0.bias"], whole["layers.0.bias"])
        weight = run.weights["layers.0.weight"]
        assert torch.equal(dict(dequantized(whole))["layers.0.weight"], weight.dequantize())
