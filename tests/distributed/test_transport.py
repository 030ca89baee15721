"""Errors of the transport say which collective of ours they belong to, and no collective of the package goes past the one place."""

import ast
import inspect
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zerocast
from zerocast.distributed.group import Caller, Flight, Group

ROOT = Path(zerocast.__file__).parents[1]
OWNER = ROOT / "zerocast" / "distributed" / "group.py"
# Names of torch.distributed that are used elsewhere: they send nothing to other ranks, and make no group. Add a new one here or to
# `Group`.
SILENT = {
    "ProcessGroup",
    "ReduceOp",
    "destroy_process_group",
    "get_backend",
    "get_backend_config",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "HashStore",  # a store of one process
    "group",
    "init_process_group",  # the command line's, not a library's
    "is_available",
    "is_initialized",
}
THEIRS = {
    ("zerocast/fsdp2/torch_fsdp.py", "Work"),  # FSDP2's own gathers
    ("zerocast/fsdp2/torch_fsdp.py", "redistribute"),  # DTensor's, which a prepared model has wrapped
    ("zerocast/serve/weight_source.py", "full_tensor"),  # DTensor's, of plain parameters and slices under FSDP2
    ("zerocast/cli/bench.py", "barrier"),
    ("integrations/megatron/installation.py", "allreduce"),  # Megatron's mark on parameters, no call
}
SUBMODULES = {"checkpoint", "device_mesh", "fsdp", "tensor", "distributed_c10d", "algorithms", "nn"}
BELOW = {
    "full_tensor",
    "redistribute",
    "allreduce",
    "allgather",
    "_allgather_base",
    "_reduce_scatter_base",
    "alltoall_base",
}
A = torch.ones(2)
CALLS: dict[str, Callable[[Group], Any]] = {
    "all_reduce_max": lambda group: group.all_reduce_max(A, "these"),
    "all_reduce_sum": lambda group: group.all_reduce_sum(A, "these"),
    "all_gather_object": lambda group: group.all_gather_object(1, "these"),
    "broadcast_object": lambda group: group.broadcast_object(1, "these"),
    "all_gather_into": lambda group: group.all_gather_into(A, A, what="these"),
    "reduce_scatter_mean": lambda group: group.reduce_scatter_mean(A, A, what="these"),
    "all_to_all": lambda group: group.all_to_all(A, A, what="these"),
    "broadcast": lambda group: group.broadcast(A, "these"),
}
NO_COLLECTIVE = {"device", "of", "called_by", "duplicate", "cpu_twin", "failing"}


def used(path: Path) -> Iterator[str]:
    """Yield the names of torch.distributed that a module uses, and methods of any object that communicate."""
    tree = ast.parse(path.read_text())
    names = {"torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {item.asname for item in node.names if item.asname and item.name.startswith("torch.distributed")}
        if isinstance(node, ast.ImportFrom) and node.module in (
            "torch.distributed",
            "torch.distributed.distributed_c10d",
        ):
            yield from (item.name for item in node.names)
        if isinstance(node, ast.ImportFrom) and "functional_collectives" in (node.module or ""):
            yield "functional_collectives"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in names:
            yield node.attr
        if isinstance(node, ast.Attribute) and (node.attr in BELOW or ast.unparse(node).startswith("torch.ops.c10d")):
            yield node.attr


def test_every_collective_goes_through_group() -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for folder in ("zerocast", "integrations")
        for path in (ROOT / folder).rglob("*.py")
        if path != OWNER and "bench" not in path.parts
        for name in used(path)
    }
    assert len(found) > 10
    assert {pair for pair in found if pair[1] not in SILENT | SUBMODULES} <= THEIRS


def methods() -> set[str]:
    public = {name for name, value in inspect.getmembers(Group, callable) if not name.startswith("_")}
    return public - NO_COLLECTIVE


def test_every_method_of_a_group_is_called_here() -> None:
    assert methods() == set(CALLS), "a new collective is added to CALLS"


class Lost(dist.Work):
    """A collective that fails on its way."""

    def wait(self, timeout: Any = None) -> bool:
        raise dist.DistBackendError("lost on the way")


def _patched(result: Any) -> Any:
    communicating = [name for name in dist.distributed_c10d.__all__ if name not in SILENT and name.islower()]
    return mock.patch.multiple(dist, **{name: result for name in communicating if hasattr(dist, name)})


def _fails(*_: Any, **__: Any) -> Any:
    raise dist.DistBackendError("Connection reset")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.notices(
    "a rank dies or hangs in a collective",
    where="ZeroAdamW",
    answer="the error names collective, bucket, step and rank",
)
def test_an_error_says_what_failed(name: str) -> None:
    caller = Caller("ZeroAdamW")
    group = Group(None, 1, 2).called_by(caller)
    for number, where in ((0, "while ZeroAdamW is built"), (3, "in step 3 of ZeroAdamW")):
        caller.number = number
        with _patched(_fails), pytest.raises(dist.DistBackendError) as caught:
            CALLS[name](group)
        assert f"of these {where} failed on rank 1 of 2: Connection reset. Another rank" in str(caught.value)
        assert isinstance(caught.value.__cause__, dist.DistBackendError)


@pytest.mark.parametrize("name", ["all_gather_into", "reduce_scatter_mean", "all_to_all"])
def test_an_error_on_the_way_says_what_failed(name: str) -> None:
    group = Group(None, 0, 2).called_by(Caller("ZeroAdamW", number=1))
    with _patched(lambda *_, **__: Lost()):
        flight: Flight = getattr(group, name)(A, A, async_op=True, what="gradient bucket 2 of 3")
    with pytest.raises(dist.DistBackendError) as caught:
        flight.wait()
    assert "of gradient bucket 2 of 3 in step 1 of ZeroAdamW failed on rank 0 of 2: lost on the way" in str(
        caught.value
    )


class Odd(RuntimeError):
    """An error that cannot be made from one argument."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (dist.DistNetworkError("x"), dist.DistNetworkError),
        (dist.DistStoreError("x"), dist.DistStoreError),
        (RuntimeError("x"), RuntimeError),
        (Odd("x", "y"), RuntimeError),
        (pickle.UnpicklingError("x"), RuntimeError),
        (EOFError("x"), RuntimeError),
    ],
)
def test_the_class_of_an_error_stays(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="failed on rank 0 of 2") as caught, Group(None, 0, 2).failing("all-reduce", "x"):
        raise error
    assert type(caught.value) is kind
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), ValueError("x"), KeyboardInterrupt()])
def test_other_errors_stay_as_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, Group(None, 0, 2).failing("all-reduce", "x"):
        raise error
    assert caught.value is error
