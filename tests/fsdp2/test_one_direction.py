"""mxfp8 with one direction a gather: half the bytes, the same gradients, and an error where a
pass reads the other direction.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import zerocast
from tests import casts
from tests.fsdp2 import models, traffic
from tests.fsdp2.models import Net
from tests.fsdp2.test_bits import Checkpointed
from tests.workers import Ranks

WIDTH = 64


def build(one_direction: bool, hidden: int, make: type[Net] = Net, root_reshards: bool = True) -> Any:
    model = make(("mxfp8",) * 2, WIDTH, hidden)
    with pytest.warns(FutureWarning, match="take the format mxfp8:block=32x32") if one_direction else nullcontext():
        zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe), one_direction=one_direction)
    for block in model.blocks if root_reshards else ():
        fully_shard(block, mesh=models.mesh(), mp_policy=models.BF16)
    return fully_shard(model, mesh=models.mesh(), mp_policy=models.BF16)


def trained(one_direction: bool, hidden: int, world: int) -> tuple[list[str], list[int], list[str]]:
    """Digests of masters after three steps, bytes of each gather of the last, and complaints about rowwise codes."""
    model = build(one_direction, hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    models.train(model, optimizer, range(2), WIDTH)
    with traffic.Traffic() as seen:
        models.train(model, optimizer, range(2, 3), WIDTH)
    found = []
    for name, weight in models.unsharded(model):
        parameter, owner = models.masters(model)[name]
        expected = models.expected(parameter.full_tensor(), owner)
        casts.assert_same_bytes(
            {"rowwise_data": casts.raw(weight.rowwise_data.clone())}, {"rowwise_data": expected["rowwise_data"]}
        )
        found.append(name)
    digests = [casts.sha(p.full_tensor()) for p, _ in models.masters(model).values()]
    return digests, seen.sent["all-gather"], found


@pytest.mark.parametrize(("world", "hidden"), [models.slow(2, 128), (3, 160), (1, 128)])
def test_half_the_bytes_and_the_same_masters(ranks: Ranks, world: int, hidden: int) -> None:
    """Also where boundaries cut blocks, and on one rank, which sends nothing."""
    both = ranks(world)(trained, False, hidden, world)
    one = ranks(world)(trained, True, hidden, world)
    for (digests, sent, _), (expected, most, _) in zip(one, both, strict=True):
        assert digests == expected
        assert sum(sent) < 0.56 * sum(most) or world == 1


def bytes_an_element() -> list[float]:
    """Of a large weight, in the forward and in the backward pass."""
    layer = torch.nn.Linear(1024, 1024, bias=False, device=models.place())
    zerocast.fsdp2.prepare(layer, zerocast.Recipe({"weight": "mxfp8"}), one_direction=True)
    fully_shard(layer, mesh=models.mesh(), mp_policy=models.BF16, reshard_after_forward=True)
    with traffic.Traffic() as seen:
        layer(torch.zeros(8, 1024, device=models.place(), requires_grad=True)).sum().backward()
    return [size * models.mesh().size() / 1024**2 for size in seen.sent["all-gather"]]


def test_bytes_an_element(ranks: Ranks) -> None:
    found = ranks(2)(bytes_an_element)
    print(f"mxfp8, one direction: {found[0]} bytes an element on the wire")
    for sizes in found:
        assert sizes == pytest.approx([1.0313, 1.0313], abs=5e-4)


def said(case: str) -> str:
    """What is raised where one direction is not enough."""
    try:
        if case == "recomputed":
            build(True, 128, Checkpointed)(models.batch(0, WIDTH).requires_grad_()).float().sum().backward()
        elif case == "compiled":
            model = build(True, 128)
            torch.compile(model, backend="eager")(models.batch(0, WIDTH)).float().sum().backward()
        else:
            build(True, 128, root_reshards=False)(models.batch(0, WIDTH))
    except Exception as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("recomputed", "so prepare without it where a forward pass is recomputed"),
        ("compiled", "one_direction does not work with torch.compile"),
        ("outermost", "give fully_shard reshard_after_forward=True"),
    ],
)
def test_refused(ranks: Ranks, case: str, text: str) -> None:
    assert all(text in message for message in ranks(2)(said, case))
