"""What a folder of checkpoints knows of runs: the branch that was saved last, whose optimizer saves, and extra values."""

import logging
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.workers import Ranks, error_of, in_a_process, on_ranks
from zerocast import ZeroAdamW, optim, quantize_
from zerocast.checkpoint import checkpoint
from zerocast.fsdp2 import TrainingState
from zerocast.optim import Checkpoints


def optimizer() -> ZeroAdamW:
    return ZeroAdamW(torch.nn.Linear(8, 8).named_parameters())


@pytest.mark.notices(
    "a run goes back to an older step and saves, and later steps of the old branch exist",
    where="Checkpoints",
    answer="a resume loads what was saved last, and logs that",
)
@pytest.mark.parametrize("built", ["one", "each"])
def test_a_resume_takes_the_branch_that_was_saved_last(tmp_path: Path, caplog: Any, built: str) -> None:
    """Whether one object saves and loads or each call has its own; damaged, the ones that it descends from follow."""
    ours, only = optimizer(), Checkpoints(tmp_path, keep=4)

    def checkpoints() -> Checkpoints:
        return only if built == "one" else Checkpoints(tmp_path, keep=4)

    for step in (100, 200, 300):
        checkpoints().save(ours, step)
    checkpoints().load(ours, 100)
    caplog.clear()
    checkpoints().save(ours, 150)
    assert "the checkpoint of step 150" in caplog.text
    assert "does not descend from the checkpoints of steps [200, 300]" in caplog.text
    assert Checkpoints(tmp_path).load(optimizer()) == 150
    (tmp_path / "step_00000150" / ".metadata").write_bytes(b"")
    caplog.clear()
    assert Checkpoints(tmp_path).load(optimizer()) == 100
    (tmp_path / "step_00000100" / ".metadata").write_bytes(b"")
    caplog.clear()
    assert Checkpoints(tmp_path).load(optimizer()) == 300
    assert "the checkpoint of step 300 belongs to an abandoned branch" in caplog.text


def test_branches_that_were_given_up_are_deleted_first(tmp_path: Path, caplog: Any) -> None:
    ours, checkpoints = optimizer(), Checkpoints(tmp_path, keep=3)
    for step in (100, 200, 300):
        checkpoints.save(ours, step)
    checkpoints.load(ours, 100)
    left = []
    caplog.clear()
    for step in (150, 160, 170):
        checkpoints.save(ours, step)
        left.append(checkpoints.steps())
    assert left == [[100, 150, 300], [100, 150, 160], [150, 160, 170]]
    assert caplog.text.count("does not descend from") == 1


def test_two_optimizers_in_one_folder(tmp_path: Path) -> None:
    generator, discriminator = optimizer(), optimizer()
    Checkpoints(tmp_path).save(generator, 5)
    with pytest.raises(
        RuntimeError, match=r"two optimizers save into .*, a ZeroAdamW of 2 parameters .* and a ZeroAdamW of 2"
    ):
        Checkpoints(tmp_path).save(discriminator, 5)
    Checkpoints(tmp_path).load(discriminator)  # it continues the run
    Checkpoints(tmp_path).save(discriminator, 6)
    again = ZeroAdamW([("weight", discriminator.param_groups[0]["params"][0])])  # of the same run
    Checkpoints(tmp_path).save(again, 7)
    del generator, discriminator, again
    Checkpoints(tmp_path).save(optimizer(), 8)  # no other one is left


def test_two_optimizers_of_one_model(tmp_path: Path) -> None:
    """Each saves and loads the model without what the other one trains."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 32))
    quantize_(model, {"0.weight": "nvfp4", "2.weight": "nvfp4"}, dtype=torch.float32)
    first = ZeroAdamW([(name, p) for name, p in model.named_parameters() if name.startswith("0")])
    second = ZeroAdamW([(name, p) for name, p in model.named_parameters() if not name.startswith("0")])
    folders = {Checkpoints(tmp_path / "first"): first, Checkpoints(tmp_path / "second"): second}
    for call in ("save", "load", "step"):
        model(torch.randn(8, 32)).square().mean().backward()
        for trained in folders.values():
            trained.step()
        for checkpoints, trained in folders.items():
            if call == "save":
                checkpoints.save(trained, 0, model=model)
                statistics = model[1].running_mean.clone()
            if call == "load":
                checkpoints.load(trained, model=model)
                assert torch.equal(model[1].running_mean, statistics)


STEPS: list[tuple[Any, type[Exception], str]] = [
    (10.0, TypeError, "a step is an integer, got 10.0, a float"),
    (True, TypeError, "a step is an integer, got True, a bool"),
    ("3", TypeError, "a step is an integer, got '3', a str"),
    (None, TypeError, "a step is an integer, got None"),
    (-1, ValueError, "a step is 0 or more, got -1"),
]


@pytest.mark.parametrize(("step", "kind", "said"), STEPS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_that_is_no_number(
    tmp_path: Path, step: Any, kind: type[Exception], said: str, asynchronous: bool
) -> None:
    with pytest.raises(kind, match=said):
        Checkpoints(tmp_path / "c", asynchronous=asynchronous).save(optimizer(), step)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_numbers_that_no_load_would_take(tmp_path: Path, asynchronous: bool) -> None:
    ours = optimizer()
    ours.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr is out of range: nan"):
        Checkpoints(tmp_path, asynchronous=asynchronous).save(ours, 1)
    assert Checkpoints(tmp_path).steps() == []


def test_a_step_of_numpy(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(optimizer(), numpy.int64(3))  # type: ignore[arg-type]
    assert Checkpoints(tmp_path).steps() == [3]


VALUES: dict[str, Any] = {
    "epoch": 3,
    "rate": 0.1,
    "name": "run",
    "none": None,
    "flag": True,
    "nested": {"list": [1, [2.5, "x"], {"a": None}]},
    "big": 2**80,
    "count": torch.tensor([2**40 + 3]),
    "state": torch.arange(5, dtype=torch.uint8),
    "empty": torch.zeros(0),
}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_extra_values_come_back_as_they_were(tmp_path: Path, asynchronous: bool) -> None:
    checkpoints, ours = Checkpoints(tmp_path, asynchronous=asynchronous), optimizer()
    checkpoints.save(ours, 1, extra=VALUES)
    loaded = {name: torch.zeros_like(one) if isinstance(one, Tensor) else 0 for name, one in VALUES.items()}
    checkpoints.load(ours, extra=loaded)
    for name, value in VALUES.items():
        assert torch.equal(loaded[name], value) if isinstance(value, Tensor) else loaded[name] == value, name
        assert type(loaded[name]) is type(value)
    optim.save(ours, tmp_path / "one", extra=VALUES)
    optim.load(ours, tmp_path / "one", extra=loaded)


@pytest.mark.parametrize(
    "value", [(1, 2), {1: 2}, {3}, numpy.zeros(2), object(), numpy.float64(1.0)], ids=lambda value: type(value).__name__
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_extra_values_that_would_change(tmp_path: Path, value: Any, asynchronous: bool) -> None:
    with pytest.raises(TypeError, match=r"extra\['x'\] is of type .*: a checkpoint holds tensors, and None, bool, int"):
        Checkpoints(tmp_path, asynchronous=asynchronous).save(optimizer(), 1, extra={"x": value})


# What is saved, or MISSING, and what it is loaded into.
MISSING = object()
FITS_NOT = {
    "int64 into FP32": (torch.tensor([1]), torch.zeros(1), "is torch.int64 in the checkpoint, expected torch.float32"),
    "FP32 into bf16": (
        torch.ones(1),
        torch.ones(1).bfloat16(),
        "is torch.float32 in the checkpoint, expected torch.bf",
    ),
    "another shape": (torch.ones(2), torch.zeros(1), r"has shape \(2,\) in the checkpoint, expected \(1,\)"),
    "a value into a tensor": (1, torch.zeros(1), "is not a tensor in the checkpoint, expected a tensor"),
    "a tensor into a value": (torch.ones(1), 1, "is a tensor in the checkpoint, expected a plain value"),
    "a tensor that is missing": (MISSING, torch.ones(1), "is missing"),
    "a value that is missing": (MISSING, 1, "is missing"),
}


@pytest.mark.parametrize("case", FITS_NOT)
def test_extra_values_that_do_not_fit(tmp_path: Path, case: str) -> None:
    saved, loaded, said = FITS_NOT[case]
    checkpoints, ours = Checkpoints(tmp_path), optimizer()
    checkpoints.save(ours, 1, extra={} if saved is MISSING else {"n": saved})
    with pytest.raises(ValueError, match=f"extra.n {said}"):
        checkpoints.load(ours, extra={"n": loaded})


def extra_of_ranks(folder: str, asynchronous: bool) -> None:
    rank, checkpoints, ours = dist.get_rank(), Checkpoints(folder, asynchronous=asynchronous), optimizer()
    extra = {"own": torch.arange(rank + 1), "same": torch.ones(1), "epoch": 3, "place": [rank], "first": 1}
    if rank:
        del extra["first"]
    checkpoints.save(ours, 1, extra=extra)
    own = torch.zeros(rank + 1, dtype=torch.int64)
    loaded: dict[str, Any] = {"own": own, "same": torch.zeros(1), "epoch": 0, "place": []}
    checkpoints.load(ours, extra=loaded)
    assert torch.equal(loaded["own"], torch.arange(rank + 1))
    assert (float(loaded["same"]), loaded["epoch"], loaded["place"]) == (1.0, 3, [rank])
    checkpoints.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_extra_values_of_ranks(ranks: Ranks, tmp_path: Path, asynchronous: bool) -> None:
    ranks(2)(extra_of_ranks, str(tmp_path), asynchronous)
    checkpoints, ours = Checkpoints(tmp_path), optimizer()
    for name, empty in (("own", torch.zeros(1, dtype=torch.int64)), ("place", [])):
        with pytest.raises(
            ValueError, match=f"extra.{name} has a value for each of 2 ranks in the checkpoint, but 1 ranks load it"
        ):
            checkpoints.load(ours, extra={name: empty})
    loaded = {"same": torch.zeros(1), "epoch": 0}
    checkpoints.load(ours, extra=loaded)
    assert loaded["epoch"] == 3


def buffers_of_ranks(folder: str, is_saving: bool) -> float:
    rank, model = dist.get_rank(), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    ours = ZeroAdamW(model.named_parameters())
    if is_saving:
        model[1].running_mean.fill_(rank)
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(ours, 1, model=model)
    else:
        Checkpoints(folder).load(ours, model=model)
    return float(model[1].running_mean[0])


def test_buffers_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank's own; on another number of ranks, those of the rank modulo the number."""
    ranks(2)(buffers_of_ranks, str(tmp_path), True)
    assert ranks(2)(buffers_of_ranks, str(tmp_path), False) == [0.0, 1.0]
    assert ranks(3)(buffers_of_ranks, str(tmp_path), False) == [0.0, 1.0, 0.0]


def _failed(folder: Path) -> tuple[Checkpoints, ZeroAdamW]:
    """Checkpoints whose last asynchronous save has failed."""
    checkpoints, ours = Checkpoints(folder, asynchronous=True), optimizer()
    with mock.patch.object(checkpoint, "write", side_effect=RuntimeError("no room")):
        checkpoints.save(ours, 2)
        assert checkpoints._saving is not None
        checkpoints._saving._thread.join()
    return checkpoints, ours


def _left_by_context(checkpoints: Checkpoints, _: ZeroAdamW) -> None:
    with checkpoints:
        pass


NEXT = {
    "save": lambda checkpoints, ours: checkpoints.save(ours, 3),
    "load": lambda checkpoints, ours: checkpoints.load(ours),
    "wait": lambda checkpoints, _: checkpoints.wait(),
    "steps": lambda checkpoints, _: checkpoints.steps(),
    "close": lambda checkpoints, _: checkpoints.close(),
    "the context": _left_by_context,
}


@pytest.mark.notices(
    "an asynchronous save fails",
    where="Checkpoints",
    answer="RuntimeError at the next call, at close and at the end of the block; logged at exit",
)
@pytest.mark.parametrize("call", NEXT)
def test_a_failed_save_is_raised_by_the_next_call(tmp_path: Path, call: str) -> None:
    checkpoints, ours = _failed(tmp_path)
    with pytest.raises(RuntimeError, match="the checkpoint of step 2 was not written: no room"):
        NEXT[call](checkpoints, ours)
    if call == "steps":  # which one rank may have called alone
        with pytest.raises(RuntimeError, match="the checkpoint of step 2 was not written"):
            checkpoints.wait()
    checkpoints.save(ours, 3)
    checkpoints.wait()
    assert checkpoints.steps() == [3]


def test_a_failed_save_does_not_hide_the_error_of_the_block(tmp_path: Path, caplog: Any) -> None:
    checkpoints, _ = _failed(tmp_path)
    with caplog.at_level(logging.ERROR), pytest.raises(KeyError, match="of the block"), checkpoints:
        raise KeyError("of the block")
    assert "the checkpoint of step 2 was not written: no room" in caplog.text


def fails_and_ends(folder: Path) -> None:
    mock.patch.object(checkpoint, "write", side_effect=RuntimeError("no room")).start()
    Checkpoints(folder, asynchronous=True).save(optimizer(), 2)


def test_a_failed_save_is_logged_at_exit(tmp_path: Path) -> None:
    status, printed = in_a_process(fails_and_ends, tmp_path)
    assert status == 0 and "the checkpoint of step 2 was not written: no room" in printed


def test_what_is_left_out_is_said(tmp_path: Path, caplog: Any) -> None:
    """Once a run, and in the manifest; with the model there is nothing to say."""
    model = torch.nn.BatchNorm1d(8)
    ours, checkpoints = ZeroAdamW(model.named_parameters()), Checkpoints(tmp_path)
    checkpoints.save(ours, 1)
    checkpoints.save(ours, 2)
    assert caplog.text.count("checkpoints of this run do not include buffers of the model") == 1
    assert "buffers of the model" in (tmp_path / "step_00000002" / "manifest.json").read_text()
    caplog.clear()
    checkpoints.save(ours, 3, model=model)
    assert not [record for record in caplog.records if record.name.startswith("zerocast")]
    Checkpoints(tmp_path).load(ours)
    assert "also holds 3 frozen parameters and buffers that are not loaded" in caplog.text


@pytest.mark.notices(
    "a list or dict in `extra` changes during an asynchronous save",
    where="Checkpoints",
    answer="the checkpoint has what it was when `save` was called",
)
def test_extra_values_that_change_during_a_save(tmp_path: Path) -> None:
    ours, losses, nested = optimizer(), [1.0], {"epochs": [1]}
    with Checkpoints(tmp_path, asynchronous=True) as checkpoints:
        with mock.patch.object(checkpoint, "write", side_effect=_late(checkpoint.write)):
            checkpoints.save(ours, 1, extra={"losses": losses, "nested": nested})
            losses.append(2.0)
            nested["epochs"].append(2)
            checkpoints.wait()
        extra: dict[str, Any] = {"losses": None, "nested": None}
        checkpoints.load(ours, extra=extra)
    assert extra == {"losses": [1.0], "nested": {"epochs": [1]}}


def _late(write: Any) -> Any:
    def later(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.3)
        write(*args, **kwargs)

    return later


@pytest.mark.notices(
    "ranks pass different steps to `save` or `load`, or only some of them pass `model=`",
    where="Checkpoints",
    answer="raises on all ranks, nothing changed",
)
@on_ranks(2)
def test_arguments_that_differ_between_ranks(tmp_path: Path) -> None:
    rank, model = dist.get_rank(), torch.nn.Linear(8, 8)
    ours, checkpoints = ZeroAdamW(model.named_parameters()), Checkpoints(tmp_path)
    given = model if rank else None
    for step in (1, 2):
        checkpoints.save(ours, step, model=model)
    for call in (lambda: checkpoints.save(ours, 3, model=given), lambda: checkpoints.load(ours, model=given)):
        assert "whether model= is passed is False on rank 0 and True on rank 1" in error_of(call)
    assert "the step that is loaded is 1 on rank 0 and 2 on rank 1" in error_of(
        lambda: checkpoints.load(ours, 1 + rank)
    )
    assert checkpoints.load(ours, model=model) == 2


@pytest.mark.notices(
    "a checkpoint has the moments of two optimizers, and is loaded into a TrainingState of one",
    where="Checkpoints",
    answer="logs the parameters whose moments are not loaded",
)
def test_moments_of_an_optimizer_that_is_not_passed(tmp_path: Path, caplog: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizers = [torch.optim.AdamW(layer.parameters()) for layer in model]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(TrainingState(model, optimizers), 1)
    checkpoints.load(TrainingState(model, optimizers))
    assert "holds moments" not in caplog.text
    checkpoints.load(TrainingState(model, optimizers[0]))
    assert "also holds moments of 2 parameters that are not loaded, the first is 1.bias" in caplog.text
