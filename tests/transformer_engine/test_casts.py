"""TransformerEngine's tensors cast by zerocast hold the bytes of the unsharded cast, however masters are cut."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests import casts
from tests.casts import Weight
from tests.selection import worlds
from tests.transformer_engine import tensors
from tests.transformer_engine.host_on_cpu import needs_te
from tests.transformer_engine.tensors import HELD
from tests.workers import Ranks

pytestmark = needs_te


def largest(case: Weight, steps: int) -> NDArray[np.uint8]:
    """Bytes of the amax of all masters so far, of the elements that have an owner."""
    owned = torch.from_numpy(case.owned())
    parts = [case.master(step).to(case.nominal).float().view(-1)[owned] for step in range(steps)]
    seen = torch.cat([*parts, torch.zeros(1)]).abs().nan_to_num(nan=0.0, posinf=torch.inf)
    return casts.raw(seen.max().view(1))


@pytest.mark.shows(host="TransformerEngine", parallel="data", formats=HELD)
@pytest.mark.parametrize("world", worlds(2, slow=(1, 3, 4)))
def test_every_format_in_one_call(ranks: Ranks, world: int, seed: int) -> None:
    """Every rank holds the bytes of the unsharded cast after two casts."""
    cases = casts.every_format(world, seed, HELD)
    for rank, outcome in enumerate(ranks(world)(tensors.cast_and_gather, cases, 2, "cpu", True)):
        assert not outcome.complaints
        for case, found in zip(cases, outcome.steps[-1], strict=True):
            expected = tensors.expected(case, step=1)
            if case.fmt.startswith("fp8_delayed"):
                expected["amax"] = largest(case, steps=2)
            elif "amax" not in found:
                expected.pop("amax", None)
            casts.assert_same_bytes(found, expected, f"rank {rank}, {case}")
