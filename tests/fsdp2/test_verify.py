"""zerocast.verify over gathered weights: a wrong byte is found on the ranks that compute with
it, and nothing else is.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerocast
from tests.fsdp2 import models
from tests.fsdp2.models import FORMATS, Net
from tests.workers import Ranks
from zerocast import VerificationError, VerifyReport, verify
from zerocast.fsdp2 import torch_fsdp


def trained(
    reshard: bool = True,
    width: int = 64,
    hidden: int = 96,
    formats: tuple[str, ...] = FORMATS,
    keep_codes: bool = False,
) -> Any:
    """A model after two steps, and its optimizer."""
    model = models.sharded(Net(formats, width, hidden), keep_codes=keep_codes, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    models.train(model, optimizer, range(2), width)
    return model, optimizer


def said(report: VerifyReport) -> list[tuple[str, int, str, int, int]]:
    """The differences, without what they are."""
    return [(d.name, d.rank, d.buffer, d.wrong, d.offset) for d in report.differences]


def quiet(width: int, hidden: int, formats: tuple[str, ...], replicas: int) -> tuple[list[str], int, int]:
    """Complaints with the model sharded, left gathered and before a cast that is due; weights
    and bytes that were compared.
    """
    found = []
    for reshard in (True, False):
        model = Net(formats, width, hidden)
        mesh = (
            models.mesh((replicas, dist.get_world_size() // replicas), ("replicate", "shard")) if replicas > 1 else None
        )
        models.sharded(model, reshard_after_forward=reshard, **({"mesh": mesh} if mesh else {}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            reports = [verify(model)]
            models.train(model, optimizer, range(step, step + 1), width)
            reports.append(verify(optimizer))
            with torch.no_grad():
                model(models.batch(0, width))
            left = [group.is_unsharded for group in torch_fsdp.groups(model)]
            reports.append(verify(model))
            assert left == [group.is_unsharded for group in torch_fsdp.groups(model)]
            found += [str(report) for report in reports if not report.ok]
        found += models.complaints(model, "verified")
    return found, reports[-1].weights, reports[-1].nbytes


@pytest.mark.parametrize(
    ("world", "width", "hidden", "formats", "replicas"),
    [
        (1, 64, 96, ("nvfp4",), 1),
        (3, 64, 96, ("nvfp4", "mxfp8"), 1),  # boundaries cut blocks
        (4, 7, 5, ("fp8_current", models.DELAYED), 2),
        pytest.param(2, 64, 96, FORMATS, 1, marks=pytest.mark.slow),
        pytest.param(3, 64, 96, FORMATS, 1, marks=pytest.mark.slow),
        pytest.param(4, 7, 5, models.SMALL, 1, marks=pytest.mark.slow),  # empty shards
    ],
)
def test_what_is_right_is_not_complained_of(
    ranks: Ranks, world: int, width: int, hidden: int, formats: tuple[str, ...], replicas: int
) -> None:
    for found, weights, nbytes in ranks(world)(quiet, width, hidden, formats, replicas):
        assert found == []
        assert weights == 2 * len(formats)
        assert nbytes > 2 * len(formats) * width * hidden // 2


def kept_codes(model: Any, weight: Any) -> torch.Tensor:
    """The codes that this rank keeps of a weight and sends."""
    (group,) = models.manager(model).plan.cast_groups
    return group.kept_codes(weight.name).view(-1)


def sent() -> list[tuple[str, int, str, int, int]]:
    """What is said of a byte that changed in what rank 1 sends."""
    model, _ = trained(reshard=False, formats=("nvfp4",), keep_codes=True)
    with torch.no_grad():
        model(models.batch(0, 64))  # leaves weights gathered
    assert verify(model).ok
    if dist.get_rank() == 1:
        _, weight = models.masters(model)["blocks.0.1.weight"]
        kept_codes(model, weight)[3] ^= 1
    assert verify(model).ok, "nobody has gathered it yet"
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    with pytest.raises(VerificationError, match="on rank 1"):
        verify(model).raise_for_differences()
    return said(verify(model))


def test_a_byte_that_is_sent(ranks: Ranks) -> None:
    """Rank 1 has the rows from 48 on, 32 bytes each; whoever gathers its bytes computes with the wrong one."""
    wanted = [("blocks.0.1.weight", rank, "rowwise_data", 1, 48 * 32 + 3) for rank in (0, 1)]
    assert ranks(2)(sent) == [wanted, wanted]


def unseen_write() -> tuple[int, str]:
    """Differences after a write that nothing sees, and what debug mode says of a counted one in
    a module called alone.
    """
    zerocast.set_debug(True)
    try:
        model, _ = trained(reshard=False, formats=("nvfp4",))
        x = models.batch(0, 64)
        with torch.no_grad():
            model(x)
            plains = [parameter._local_tensor.plain for parameter, _ in models.masters(model).values()]  # type: ignore[attr-defined]
            for plain in plains:
                plain.data.add_(1.0)
            report = verify(model)
            for plain in plains:
                plain.add_(1.0)
            with pytest.raises(RuntimeError) as caught:
                model.blocks[0](x)
        zerocast.fsdp2.refresh(model)
        assert verify(model).ok
        # nothing to complain of
        models.train(model, torch.optim.AdamW(model.parameters()), range(2), 64)
    finally:
        zerocast.set_debug(False)
    return len(report.differences), str(caught.value)


def test_a_master_that_was_written_behind_our_back(ranks: Ranks) -> None:
    for differences, text in ranks(2)(unseen_write):
        assert differences
        assert "is stale, its masters have been written since its last cast: call zerocast.fsdp2.refresh(model)" in text


def every_other_step(every: int) -> list[bool]:
    """Whether each forward pass raised; from the third on rank 1 sends a wrong byte after each cast."""
    model = Net(("nvfp4", models.DELAYED), 64, 96)
    zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe), verify_every=every, keep_codes=True)
    models.sharded(model, prepare=False)
    optimizer, raised = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(6):
        if step == 3 and dist.get_rank() == 1:
            _break_the_cast(model)
        try:
            models.train(model, optimizer, range(step, step + 1), 64)
        except VerificationError as error:
            raised.append("blocks.1.3.weight" in str(error))
            models.train(model, optimizer, range(step, step + 1), 64)  # says it once a cast
        else:
            raised.append(False)
    return raised


def _break_the_cast(model: Any) -> None:
    _, weight = models.masters(model)["blocks.1.3.weight"]
    plan = models.manager(model).plan
    launch = plan.launch

    def broken(**options: Any) -> None:
        launch(**options)
        kept_codes(model, weight)[0] ^= 1

    plan.launch = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(("every", "wanted"), [(1, [0, 0, 0, 1, 1, 1]), (2, [0, 0, 0, 1, 0, 1])])
def test_verify_every(ranks: Ranks, every: int, wanted: list[int]) -> None:
    assert ranks(2)(every_other_step, every) == [[bool(value) for value in wanted]] * 2


def sliced() -> tuple[bool, list[Any]]:
    """Tensor parallelism over two of four ranks, FSDP2 over the others: each slice is its part
    of the unsharded cast.
    """
    both = models.mesh((2, 2), ("fsdp", "tp"))
    model = Net(("nvfp4", "fp8_current"), 64, 96)
    for block in model.blocks:
        parallelize_module(block, both["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    flat = both["fsdp", "tp"]._flatten("weights")
    zerocast.fsdp2.prepare(model, zerocast.Recipe(model.recipe), weight_mesh=flat, keep_codes=True)
    models.sharded(model, prepare=False, mesh=both["fsdp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    models.train(model, optimizer, range(1), 64, both["fsdp"].get_local_rank())
    before = verify(model, dist.group.WORLD)
    weight = models.masters(model)["blocks.1.1.weight"][1]
    if dist.get_rank() == 3:
        kept_codes(model, weight)[0] ^= 1
    return before.ok, said(verify(model, dist.group.WORLD))


def test_tensor_parallel_slices(ranks: Ranks) -> None:
    for before, after in ranks(4)(sliced):
        assert before
        assert [(name, rank) for name, rank, *_ in after] == [("blocks.1.1.weight", rank) for rank in (1, 3)]


def test_every_is_checked() -> None:
    with pytest.raises(ValueError, match="verify_every is None or at least 1, got 0"):
        zerocast.fsdp2.prepare(nn.Linear(32, 32), zerocast.Recipe({"weight": "nvfp4"}), verify_every=0)
