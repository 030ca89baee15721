"""An optimizer starts from high-precision weights of any kind: the same masters and bytes as if it had been built on them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerocast
from tests import casts
from tests.checkpoint.storage import SOURCES, new_values
from tests.optim.faults import OutOfMemory
from tests.optim.probe import MIXED, PLAIN
from tests.optim.runs import ADAM, Run, Trainer, boxes, refused, snapshot, weight_bytes
from zerocast import optim
from zerocast.optim import ZeroAdamW

SPECS = tuple(
    spec for spec in MIXED if spec.name in ("norm", "delayed", "block", "nv", "nv_late", "mx", "scalar", "bias")
)
RUN = Run(SPECS)
SHAPES = {spec.name: spec.shape for spec in SPECS}


def trained() -> Trainer:
    """Some other life: moments, steps, delayed scales."""
    trainer = Trainer(RUN)
    trainer.train(range(2))
    return trainer


def loads(source: Any, dtype: torch.dtype) -> list[str]:
    """Return the differences between a trained optimizer that has loaded masters and one that was
    built on the same values.
    """
    trainer, wanted = trained(), new_values(SHAPES, dtype)
    optim.load_masters(trainer.optimizer, source)
    state = trainer.optimizer.state_dict()
    different = []
    for name, master in state["model"].items():
        for where, part in boxes(master):
            if part.dtype != torch.float32 or not torch.equal(part, wanted[name].float()[where]):
                different.append(f"master {name}")
        moments = state["optim"]["state"][name]
        left = [part for key in ("exp_avg", "exp_avg_sq") for _, part in boxes(moments[key])]
        if float(moments["step"]) or any(part.any() for part in left):
            different.append(f"moments of {name}")
    built = Trainer(RUN)
    for spec in SPECS:
        parameter = built.probe.get_parameter(spec.name)
        if spec.fmt == PLAIN:
            parameter.data.copy_(wanted[spec.name])
        else:
            parameter.high_precision_init_val = wanted[spec.name].float()  # type: ignore[attr-defined]
    optimizer = ZeroAdamW(built.probe.named_parameters(), config=RUN.config, **ADAM)
    optimizer.load_state_dict({**optimizer.state_dict(), "zerocast": {}})  # seeds delayed scaling from the masters
    found = weight_bytes(trainer.probe)
    for name, held in weight_bytes(built.probe).items():
        different += [f"{name} {buffer}" for buffer, value in held.items() if not (found[name][buffer] == value).all()]
    report = zerocast.verify(trainer.optimizer)
    return different + [str(difference) for difference in report.differences]


CASES = [*((kind, torch.float32) for kind in SOURCES), ("safetensors", torch.bfloat16), ("dcp", torch.float16)]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_any_kind(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    assert loads(SOURCES[kind](new_values(SHAPES, dtype), tmp_path), dtype) == []


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "mapping"), (2, "file"), (3, "dcp"))]


@pytest.mark.parametrize(("world", "kind"), [(3, "safetensors_folder"), *SLOW])
def test_on_several_ranks(ranks: Any, tmp_path: Path, kind: str, world: int) -> None:
    assert (
        ranks(world)(loads, SOURCES[kind](new_values(SHAPES, torch.float32), tmp_path), torch.float32) == [[]] * world
    )


def spoilt(change: str) -> dict[str, Any]:
    """Tensors that do not fit in one way."""
    state: dict[str, Any] = new_values(SHAPES, torch.float32)
    if change == "shape":
        state["nv"] = state["nv"].view(112, 48)
    elif change == "missing":
        del state["bias"]
    elif change == "more":
        state["rotary.inv_freq"] = torch.zeros(3)
    elif change == "float64":
        state["mx"] = state["mx"].double()
    elif change == "codes":
        state["mx"] = state["mx"].to(torch.float8_e4m3fn)
    elif change == "meta":
        state["mx"] = state["mx"].to("meta")
    elif change == "quantized":
        state["mx"] = casts.cast_whole("mxfp8", state["mx"])
    return state


ERRORS = {
    "shape": r"nv has shape \(112, 48\) in the source, expected \(48, 112\)",
    "missing": r"bias of shape \(1,\) is missing in the source",
    "more": r"rotary\.inv_freq is in the source, but not a master \(pass it in `ignore` to skip it\)",
    "float64": "mx is float64 in the source, expected one of float32, bfloat16, float16",
    "codes": "mx is float8_e4m3fn in the source",
}
IN_MEMORY = {"meta": "mx is meta in the source", "quantized": "mx is QuantizedWeight in the source"}


def refuses(source: Any) -> str:
    """What is raised; nothing changed."""
    trainer = Trainer(RUN)
    said = refused(trainer, lambda: optim.load_masters(trainer.optimizer, source))
    assert "does not fit the masters" in said
    return said.removeprefix("ValueError: ")


def test_first_of_many_problems():
    """An empty source lacks all masters: the error has four of them, and how many more there are."""
    masters = len(Trainer(RUN).optimizer.state_dict()["model"])
    said = refuses({})
    assert masters > 4 and said.count("is missing") == 4 and said.endswith(f"; and {masters - 4} more")


@pytest.mark.parametrize("kind", ["file", "safetensors", "dcp"])
def test_what_does_not_fit(tmp_path: Path, kind: str) -> None:
    for change, message in ERRORS.items():
        (tmp_path / change).mkdir()
        with pytest.raises(ValueError, match=message):
            raise ValueError(refuses(SOURCES[kind](spoilt(change), tmp_path / change)))


@pytest.mark.parametrize("change", IN_MEMORY)
def test_what_has_no_elements_to_read(change: str) -> None:
    assert IN_MEMORY[change] in refuses(spoilt(change))


def one_rank_differs() -> str:
    """Rank 1 is given another mapping."""
    return refuses(spoilt("shape" if dist.get_rank() == 1 else "none"))


def test_one_rank_is_wrong_and_all_say_so(ranks: Any) -> None:
    first, second = ranks(2)(one_rank_differs)
    assert first == second
    assert first.startswith("rank 1: the state dict does not fit the masters: nv has shape")


def test_masters_alone_are_no_whole_checkpoint(tmp_path: Path) -> None:
    SOURCES["dcp"](new_values(SHAPES, torch.float32), tmp_path)
    with pytest.raises(
        ValueError, match=r"has masters but no optimizer state: load them with zerocast\.optim\.load_masters"
    ):
        optim.load(trained().optimizer, tmp_path)


@pytest.mark.parametrize("every", [61, pytest.param(7, marks=pytest.mark.slow)])
def test_a_load_that_breaks_off(every: int) -> None:
    """Memory runs out: nothing has changed, or the optimizer says so until masters are loaded again."""
    trainer, left, at = trained(), 0, 0
    said: list[str] = []
    while True:
        before, memory = snapshot(trainer), OutOfMemory(at)
        try:
            with memory:
                optim.load_masters(trainer.optimizer, new_values(SHAPES, torch.float32))
        except RuntimeError as error:
            said.append(str(error))
        if trainer.optimizer._weights.driver.plan.validity.partial:
            left += 1
            for call in (trainer.optimizer.state_dict, trainer.optimizer.step):
                with pytest.raises(RuntimeError, match="loading a checkpoint failed partway"):
                    call()
            optim.load_masters(trainer.optimizer, new_values(SHAPES, torch.float32))
            assert zerocast.verify(trainer.optimizer).ok
            trainer = trained()
        elif memory.count > at:
            casts.assert_same_bytes(snapshot(trainer), before, f"operator {at}")
        else:
            break
        at += every
    assert left
    assert all("injected" in text for text in said)
