"""An engine's ranks hold the bytes of the run after each refit, all of them or none, and say why not; without any engine."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerocast
from tests.devices import gpus
from tests.distributed.simulated import Simulated, simulate
from tests.optim.faults import OutOfMemory, Places, of_each_place
from tests.serve.test_export import model
from tests.serve.test_live import collected, step
from zerocast.distributed.group import Group
from zerocast.formats.memory import as_bytes
from zerocast.integrations.vllm.client import VllmServer
from zerocast.serve import EngineReceiver, EngineSender, Message, RefitError, Sender
from zerocast.serve.engine_sender import OPEN
from zerocast.serve.engine_weights import ModelTensor, Region, Strided
from zerocast.serve.receiving import Layout

DEVICES = ["cpu", pytest.param("cuda", marks=gpus(1))]
Recorded = list[tuple[dict[str, Any], list[Tensor]]]


class SlicedWeights:
    """Matrices cut along rows and columns by turns, the rest on every rank; products read a transpose of its own memory, which is
    made again of what was written.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu") -> None:
        self.rank, self.size, self.device = rank, size, device
        self.shapes: dict[str, ModelTensor] = {}
        self.own: dict[str, Tensor] = {}
        self.kernel: dict[str, Tensor] = {}
        self.fails_in = ""
        self.packs_wrongly = False

    def dim(self, shape: tuple[int, ...]) -> int | None:
        return next((d for d in (len(shape) % 2, 0) if len(shape) > d and shape[d] % self.size == 0), None)

    def cut(self, tensor: Tensor) -> Tensor:
        dim = self.dim(tuple(tensor.shape))
        return tensor if dim is None else tensor.chunk(self.size, dim)[self.rank]

    def regions(self, layout: Layout) -> Mapping[str, list[Region]]:
        found = {}
        for name, dtype, shape in layout:
            view = self.cut(torch.empty(shape, dtype=dtype, device="meta"))
            self.shapes[name] = ModelTensor(dtype, tuple(view.shape))
            stored = Strided(tuple(view.shape), view.stride(), int(view.storage_offset()))
            found[name] = [Region(stored, name, Strided(tuple(view.shape), view.contiguous().stride(), 0))]
        return found

    def model_tensors(self) -> Mapping[str, ModelTensor]:
        return self.shapes

    def load(self, values: Mapping[str, Tensor]) -> None:
        self.own = {name: value.to(self.device, copy=True) for name, value in values.items()}
        self.fail("load")
        self.pack(values)

    def tensors(self) -> Mapping[str, Tensor]:
        return self.own

    def written(self, names: Iterable[str]) -> None:
        self.fail("written")
        self.pack(names)

    def check(self) -> None:
        for name, tensor in self.kernel.items():
            if not torch.equal(as_bytes(tensor), as_bytes(dense(self.own[name].t()))):
                raise ValueError(f"products read another {name}")

    def pack(self, names: Iterable[str]) -> None:
        self.kernel.update({name: dense(self.own[name].t()) for name in names if self.own[name].dim() == 2})
        if self.packs_wrongly:
            as_bytes(next(iter(self.kernel.values())))[0] ^= 1

    def fail(self, where: str) -> None:
        if where == self.fails_in:
            self.fails_in = ""
            raise MemoryError("out of memory")


class Rank:
    """One rank of an engine."""

    def __init__(self, group: Group, device: torch.device | str = "cpu", bytes_group: Group | None = None) -> None:
        self.weights = SlicedWeights(group.rank, group.size, device)
        self.receiver = EngineReceiver(self.weights, group, bytes_group, device)

    def accept(self, messages: Recorded) -> str:
        """Let the engine take recorded messages. Returns the error that it raises, or an empty text."""
        try:
            for message in messages:
                self.stage([message])
                if message[0]["kind"] == "end":
                    self.receiver.apply()
        except RefitError as error:
            return str(error)
        return ""

    def stage(self, messages: Recorded) -> None:
        """Let the engine take messages, which it does not apply."""
        for header, tensors in messages:
            self.receiver.accept(header, lambda tensors=tensors: tensors)  # type: ignore[misc]

    def place(self, shapes: dict[str, ModelTensor], regions: Mapping[str, list[Region]]) -> None:
        """Let the engine have these tensors, at these places of what is sent."""
        self.weights.shapes.update(shapes)
        self.weights.regions = lambda layout: regions  # type: ignore[method-assign]

    def is_servable(self) -> bool:
        try:
            self.receiver.check_servable()
        except RefitError:
            return False
        return True

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        assert self.weights.own.keys() == wanted.keys()
        for name, tensor in wanted.items():
            cut = self.weights.cut(tensor)
            assert torch.equal(as_bytes(self.weights.own[name]), as_bytes(dense(cut))), name
            if cut.dim() == 2:
                assert torch.equal(as_bytes(self.weights.kernel[name]), as_bytes(dense(cut.t()))), name


class Trainer:
    def __init__(self, fmt: str = "fp8_block", naming: str = "modelopt", device: torch.device | str = "cpu") -> None:
        self.model, self.naming = model(fmt).to(device), naming
        self.optimizer = zerocast.ZeroAdamW(self.model.named_parameters(), lr=1e-4)
        self.sender = Sender(self.model, naming, bucket_bytes=30_000)

    def full(self) -> Recorded:
        return recorded(self.sender.named_tensors())

    def delta(self) -> Recorded:
        step(self.model, self.optimizer)
        return recorded(self.sender.named_deltas(self.sender.refit))

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in collected(self.model, self.naming).items()}


def recorded(messages: Iterator[Message]) -> Recorded:
    return [(dict(message.header), [tensor.clone() for tensor in message.tensors]) for message in messages]


def dense(tensor: Tensor) -> Tensor:
    """A contiguous copy. Of a single element `contiguous` would return the view, with the strides of the whole."""
    return tensor.clone(memory_format=torch.contiguous_format)


def on_engine(size: int, run: Callable[[Rank], Any]) -> list[Any]:
    """Returns what `run` does on each rank of an engine."""
    if size == 1:
        return [run(Rank(Group(None, 0, 1)))]
    results, _ = simulate(size, lambda group: run(Rank(group)))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("naming", "fmt"),
    [("modelopt", "nvfp4"), ("compressed-tensors", "mxfp8"), ("deepseek", "fp8_block"), ("modelopt", "fp8_current")],
)
def test_ranks_hold_the_bytes_of_the_run(naming: str, fmt: str, size: int) -> None:
    trainer = Trainer(fmt, naming)
    refits = [(trainer.full(), trainer.weights())] + [(trainer.delta(), trainer.weights()) for _ in range(2)]
    refits.append((recorded(trainer.sender.named_deltas(3)), trainer.weights()))  # nothing has changed

    def run(rank: Rank) -> list[int]:
        numbers = []
        for messages, wanted in refits:
            assert rank.accept(messages) == ""
            rank.check(wanted)
            numbers.append(rank.receiver.refit)
        return numbers

    assert on_engine(size, run) == [[1, 2, 3, 4]] * size


def over_nccl(naming: str, fmt: str) -> list[int]:
    """The ranks of a trainer are those of an engine, which compare bytes by NCCL and agree by gloo, as vLLM's do."""
    device = torch.device("cuda", torch.cuda.current_device())
    trainer = Trainer(fmt, naming, device)
    rank = Rank(Group.of(dist.new_group(backend="gloo")), device, Group.of(dist.group.WORLD))
    numbers = []
    for messages in (trainer.full, trainer.delta, trainer.delta):
        assert rank.accept(messages()) == ""
        rank.check(trainer.weights())
        assert all(tensor.is_cuda for tensor in rank.weights.own.values())
        numbers.append(rank.receiver.refit)
    return numbers


@pytest.mark.parametrize(
    ("naming", "fmt"),
    [pytest.param(*case, marks=gpus(2)) for case in [("modelopt", "nvfp4"), ("deepseek", "fp8_block")]],
)
def test_ranks_on_gpus(gpu_ranks: Any, naming: str, fmt: str) -> None:
    assert gpu_ranks(2)(over_nccl, naming, fmt) == [[1, 2, 3]] * 2


@pytest.mark.parametrize("where", ["load", "written"])
def test_an_application_that_breaks_off(where: str) -> None:
    """One rank breaks off; then none serves until a full refit."""
    trainer = Trainer()
    first, delta, later, full = trainer.full(), trainer.delta(), trainer.delta(), trainer.full()
    wanted = trainer.weights()

    def run(rank: Rank) -> None:
        if where == "written":
            assert rank.accept(first) == ""
        rank.weights.fails_in = where if rank.weights.rank == 1 else ""
        error = rank.accept(delta if where == "written" else first)
        assert "rank 1 of 2: MemoryError: out of memory; this engine serves nothing until a full refit" in error
        assert not rank.is_servable() and rank.receiver.refit == 0
        assert "without a complete refit" in rank.accept(later)
        assert rank.accept(full) == "" and rank.is_servable()
        rank.check(wanted)

    on_engine(2, run)


@pytest.mark.parametrize("messages", [1, 2])
def test_a_stray_message_ends_no_run(messages: int) -> None:
    """Another run's first message stops a refit that is under way; the run goes on with its next one, until another is applied."""
    trainer, other = Trainer(), Trainer()
    first, before, strays, second = trainer.full(), trainer.weights(), other.full(), trainer.delta()
    third, wanted, taken_over = trainer.full(), trainer.weights(), other.full()

    def run(rank: Rank) -> None:
        assert rank.accept(first) == ""
        assert rank.accept(strays[:messages]) == ""
        rank.check(before)
        assert rank.is_servable()
        assert rank.accept(second[:1]) == ""
        assert "refit 1 arrived late or again" in rank.accept(strays[:1]) and rank.receiver.refit == 1
        assert "and none of it before" in rank.accept(second[1:])
        assert rank.accept(third) == ""
        assert "refit 1 arrived late or again, as refit 3 of its run has begun" in rank.accept(first)
        rank.check(wanted)
        assert rank.accept(taken_over) == ""
        assert "of a run that is over on this rank arrived" in rank.accept(trainer.full())

    on_engine(1, run)


@pytest.mark.parametrize("is_full", [False, True])
def test_products_that_read_something_else(is_full: bool) -> None:
    """What products read was written to, or was made wrongly of what came: no refit calls it the bytes of the run."""
    trainer = Trainer()
    first, second, full = trainer.full(), trainer.delta(), trainer.full()
    wanted = trainer.weights()

    def run(rank: Rank) -> None:
        assert rank.accept(first) == ""
        if rank.weights.rank == 1:
            as_bytes(next(iter(rank.weights.kernel.values()))).zero_()
        assert "a refit cannot be applied: rank 1 of 2: ValueError: products read another" in rank.accept(second)
        assert rank.is_servable()
        rank.weights.packs_wrongly = rank.weights.rank == 1
        error = rank.accept(full)
        assert "failed while it was written: rank 1 of 2: ValueError: products read another" in error
        assert not rank.is_servable()

    def changes(rank: Rank) -> None:
        assert rank.accept(first) == ""
        rank.weights.packs_wrongly = rank.weights.rank == 1
        assert "failed while it was written: rank 1 of 2: ValueError" in rank.accept(second)
        rank.weights.packs_wrongly = False
        assert rank.accept(full) == "" and rank.is_servable()
        rank.check(wanted)

    on_engine(2, run if is_full else changes)


class OutsideCollectives(Places):
    """Counts no operator of a collective, or of what compares ranks, both of which the other ranks would wait for. Places are noted
    where nothing fails alone, since that takes long.
    """

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not on_engine.__code__:
            if frame.f_code.co_name in (
                "all_reduce_max",
                "all_gather_into",
                "_gathered_numbers",
                "validate_across_ranks",
            ):
                return func(*args, **(kwargs or {}))
            frame = frame.f_back  # type: ignore[assignment]
        kind = Places if self._at < 0 else OutOfMemory
        return kind.__torch_dispatch__(self, func, types, args, kwargs)


EVERY = pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.slow)])


@EVERY
@pytest.mark.parametrize("is_full", [False, True])
def test_a_rank_that_is_out_of_memory(is_full: bool, every: int) -> None:
    """Wherever it is, all ranks say so, and have what they had, or serve nothing; a full refit mends it."""
    trainer = Trainer()
    first, before = trainer.full(), trainer.weights()
    step(trainer.model, trainer.optimizer)
    second = trainer.full() if is_full else recorded(trainer.sender.named_deltas(1))
    wanted, last = trainer.weights(), trainer.full()

    def refitted(at: int) -> list[Any]:
        def run(rank: Rank) -> Any:
            assert rank.accept(first) == ""
            with OutsideCollectives(at if rank.weights.rank else -1) as memory:
                error = rank.accept(second)
            rank.check(wanted if not error else before) if rank.is_servable() else None
            assert rank.is_servable() or "serves nothing" in error
            assert rank.accept(last) == ""
            rank.check(wanted)
            return error, memory.places

        return on_engine(2, run)

    places = refitted(-1)[1][1]
    assert len(places) > 100
    for at in of_each_place(places)[::every]:
        errors = [error for error, _ in refitted(at)]
        assert errors[0] == errors[1] and "rank 1 of 2: OutOfMemoryError: injected before" in errors[0], at


@EVERY
@pytest.mark.parametrize("is_full", [False, True])
def test_a_rank_of_the_sender_that_is_out_of_memory(is_full: bool, every: int) -> None:
    trainer = Trainer()

    def sent(at: int) -> list[Any]:
        def run(group: Simulated) -> Any:
            sender = Sender(trainer.model, "modelopt", bucket_bytes=30_000, group=group)
            recorded(sender.named_tensors())
            with OutsideCollectives(at if group.rank else -1) as memory:
                try:
                    list(sender.named_tensors() if is_full else sender.named_deltas(1))
                except RuntimeError as error:
                    return str(error), memory.places
            return "", memory.places

        return simulate(2, run)[0]

    places = sent(-1)[1][1]
    assert len(places) > 50
    for at in of_each_place(places)[::every]:
        errors = [error for error, _ in sent(at)]
        assert errors[0] == errors[1] and errors[0].startswith("rank 1: injected before"), at


def test_an_engine_of_other_weights() -> None:
    trainer = Trainer()
    first = trainer.full()

    def run(rank: Rank) -> None:
        rank.weights.shapes["lm_head.weight"] = ModelTensor(torch.bfloat16, (8, 4))
        assert "0 of the 32 elements of lm_head.weight are filled" in rank.accept(first)
        assert not rank.is_servable()
        narrow = rank.weights.regions
        rank.weights.regions = lambda layout: {  # type: ignore[method-assign]
            name: regions for name, regions in narrow(layout).items() if not name.endswith("_scale")
        }
        error = rank.accept(trainer.full())
        assert "the engine does not read" in error and "_scale" in error

    on_engine(1, run)


def rows(first: int, count: int, columns: int) -> Strided:
    """`count` rows of a matrix of so many columns, from row `first` on."""
    return Strided((count, columns), (columns, 1), first * columns)


@pytest.mark.parametrize(
    ("taken", "padding", "refusal"),
    [
        ([(0, 64), (64, 192)], [], ""),
        ([(0, 128), (0, 128)], [], "16384 of the 32768 elements of down.weight are filled, 16384 of them more"),
        ([(0, 128), (64, 192)], [], "32768 of the 32768 elements of down.weight are filled, 8192 of them more"),
        ([(0, 64)], [(64, 192)], ""),
        ([(0, 64)], [(0, 192)], "24576 of the 32768 elements of down.weight are filled, 8192 of them more than once"),
    ],
)
def test_every_element_of_an_engine_is_filled_once(
    taken: list[tuple[int, int]], padding: list[tuple[int, int]], refusal: str
) -> None:
    """A count of elements is not enough. Padding, which the engine fills with zeros itself, is told by its place as well."""
    columns = 128
    value = torch.arange(256 * columns, dtype=torch.float32).bfloat16().view(256, columns)
    layer = nn.Linear(columns, sum(count for _, count in taken), bias=False, dtype=torch.bfloat16)
    layer.weight.data.copy_(torch.cat([value[first : first + count] for first, count in taken]))
    full = recorded(Sender(nn.ModuleDict({"down": layer}), "bf16").named_tensors())

    def run(rank: Rank) -> None:
        places = tuple(rows(first, count, columns) for first, count in padding)
        before = [sum(count for _, count in taken[:i]) for i in range(len(taken))]
        regions = [
            Region(rows(start, count, columns), "down.weight", rows(first, count, columns))
            for start, (first, count) in zip(before, taken, strict=True)
        ]
        shape = ModelTensor(torch.bfloat16, (256, columns), places)
        rank.place({"down.weight": shape}, {"down.weight": regions})
        error = rank.accept(full)
        assert refusal in error and bool(refusal) == bool(error) == (not rank.is_servable())
        if not refusal:
            end = 256 - sum(count for _, count in padding)
            assert torch.equal(rank.weights.own["down.weight"][:end], value[:end])
            assert not rank.weights.own["down.weight"][end:].any()

    on_engine(1, run)


def test_elements_of_which_an_engine_takes_one() -> None:
    """Such as the scales of fused weights: other values are refused before anything is written, in full and as changes."""
    scales = nn.ParameterDict({name: nn.Parameter(torch.tensor([2.0])) for name in "qkv"})
    sender = Sender(scales, "bf16")
    first = recorded(sender.named_tensors())
    scales["k"].data.fill_(3)
    refused = [recorded(sender.named_deltas(1)), recorded(sender.named_tensors())]
    accepted = [first]
    for value in (4, 5):
        for scale in scales.values():
            scale.data.fill_(value)
        accepted.append(recorded(sender.named_tensors() if value == 4 else sender.named_deltas(4)))

    def run(rank: Rank) -> None:
        places = {name: Strided((1,), (1,), number) for number, name in enumerate("qkv")}
        regions = {name: [Region(Strided((1,), (1,), 0), "scales", place)] for name, place in places.items()}
        rank.place({"scales": ModelTensor(torch.float32, (3,), is_uniform=True)}, regions)
        assert rank.accept(first) == ""
        for messages in refused:
            assert "scales would be [2.0, 3.0, 2.0], one for each of the weights" in rank.accept(messages)
            assert rank.is_servable() and rank.weights.own["scales"].tolist() == [2.0, 2.0, 2.0]
        assert [rank.accept(messages) for messages in accepted[1:]] == ["", ""]

    on_engine(1, run)


class Engine:
    """An engine of one rank behind the calls of an `EngineClient`, as a worker of vLLM keeps sessions."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.calls = rank, list[str]()
        self.is_open = self.is_applied = False
        self.folder = Path()
        self.version = ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        assert init_info["protocol"] == 1
        self.folder = Path(init_info["folder"])
        if self.is_open:
            raise RuntimeError(f"Worker failed with error '{OPEN}'")

    def start_weight_update(self) -> None:
        if self.is_open:
            raise RuntimeError("a weight update is already active")
        self.calls.append("start")
        self.is_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        header, file = update_info["header"], update_info.get("file")
        self.is_open = False
        self.calls.append(header["kind"])
        if header["kind"] == "apply":
            self.rank.receiver.apply()
        else:
            self.rank.receiver.accept(header, lambda: torch.load(self.folder / file) if file else [])
        self.is_open = True

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if not self.is_open:
            raise RuntimeError("no weight update is active")
        self.version = weight_version or self.version
        self.calls.append("finish")
        self.is_open = False

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def said(self) -> list[str]:
        """The calls since the last time, messages of a kind once."""
        calls, self.calls = self.calls, []
        return [call for i, call in enumerate(calls) if i == 0 or call != calls[i - 1]]


def connected(tmp_path: Path, device: str = "cpu") -> tuple[Trainer, Engine, EngineSender]:
    trainer, engine = Trainer(device=device), Engine(Rank(Group(None, 0, 1), device))
    return trainer, engine, EngineSender(trainer.sender, engine, tmp_path)


@pytest.mark.parametrize("device", DEVICES)
def test_an_engine_is_kept_current(device: str, tmp_path: Path) -> None:
    """The engine computes while messages come and are checked, and is paused only while they are written."""
    trainer, engine, sender = connected(tmp_path, device)
    assert sender.refit() == 1
    full_nbytes = sender.nbytes
    assert engine.said() == ["start", "full", "end", "pause", "apply", "finish", "resume"]
    step(trainer.model, trainer.optimizer)
    assert sender.refit() == 2 and sender.nbytes < full_nbytes
    assert engine.said() == ["start", "delta", "end", "pause", "apply", "finish", "resume"]
    engine.rank.check(trainer.weights())
    assert engine.version == f"{trainer.sender.run}-2"
    assert sender.refit(full=True) == 3
    assert "delta" not in engine.said()
    assert list(engine.folder.iterdir()) == []
    sender.close()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_refuses_the_connection(tmp_path: Path) -> None:
    class Other(Engine):
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            raise ValueError("the trainer speaks protocol 1 of refits, and this plugin 2")

    with pytest.raises(RefitError, match="connection to an engine failed: ValueError: the trainer speaks protocol 1"):
        EngineSender(Trainer().sender, Other(Rank(Group(None, 0, 1))), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", DEVICES)
def test_an_engine_that_refuses_changes_gets_all(device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, engine, sender = connected(tmp_path, device)
    sender.refit()
    as_bytes(next(iter(engine.rank.weights.own.values()))).zero_()
    engine.said()
    step(trainer.model, trainer.optimizer)
    assert sender.refit() == 3
    refused, applied = ["start", "delta", "end"], ["start", "full", "end", "pause", "apply", "finish", "resume"]
    assert engine.said() == refused + applied
    assert "a full refit follows: a refit failed: RefitError: a refit cannot be applied" in caplog.text
    engine.rank.check(trainer.weights())


def test_an_engine_that_breaks_stays_paused(tmp_path: Path) -> None:
    _, engine, sender = connected(tmp_path)
    sender.refit()
    engine.said()
    engine.rank.weights.fails_in = "load"
    with pytest.raises(RefitError, match="MemoryError: out of memory; this engine serves nothing until a full refit"):
        sender.refit(full=True)
    assert "resume" not in engine.said() and not engine.rank.is_servable()
    engine.rank.weights.shapes["more.weight"] = ModelTensor(torch.bfloat16, (8, 4))
    with pytest.raises(RefitError, match=r"of more.weight are filled, .*; this engine serves nothing until a full"):
        sender.refit()
    del engine.rank.weights.shapes["more.weight"]
    with mock.patch.object(engine, "pause", side_effect=TimeoutError), pytest.raises(RefitError, match="TimeoutError"):
        sender.refit()
    assert "resume" not in engine.said() and not engine.rank.is_servable()
    assert sender.refit() == 5
    assert engine.said()[-1] == "resume" and engine.rank.is_servable()


@pytest.mark.parametrize("call", ["pause", "finish_weight_update"])
def test_an_engine_whose_weights_are_whole_goes_on(call: str, tmp_path: Path) -> None:
    """Though a call around the writing of them failed."""
    _, engine, sender = connected(tmp_path)
    sender.refit()
    with (
        mock.patch.object(engine, call, side_effect=TimeoutError("timed out")),
        pytest.raises(RefitError, match="a refit failed: TimeoutError: timed out"),
    ):
        sender.refit(full=True)
    assert "resume" in engine.said() and engine.rank.is_servable()
    assert sender.refit() == 3


def test_a_refit_is_applied_whole_and_once() -> None:
    first = Trainer().full()

    def run(rank: Rank) -> None:
        receiver = rank.receiver
        rank.stage(first)
        assert not rank.is_servable()
        receiver.apply()
        with pytest.raises(RefitError, match="a refit was not applied: no refit came to its last message"):
            receiver.apply()
        assert rank.is_servable()

    def early(rank: Rank) -> None:
        assert rank.accept(first[:-1]) == ""
        with pytest.raises(RefitError, match=r"was not applied: no refit .*; this engine serves nothing until a full"):
            rank.receiver.apply()

    def again(rank: Rank) -> None:
        rank.stage(first)
        assert "came after the last one" in rank.accept(first[-1:])

    for what in (run, early, again):
        on_engine(1, what)


def test_a_refit_that_another_trainer_left_open(tmp_path: Path) -> None:
    _, engine, sender = connected(tmp_path)
    engine.start_weight_update()
    assert sender.refit() == 1
    assert engine.said()[-1] == "resume"


def test_an_error_of_the_first_rank_reaches_the_others(tmp_path: Path) -> None:
    """The others read the messages to their end all the same, since these are collective."""
    trainer = Trainer()

    def run(group: Simulated) -> str:
        sender = Sender(trainer.model, "modelopt", group=group)
        engine = Engine(Rank(Group(None, 0, 1)))
        engine.rank.weights.fails_in = "load"
        try:
            EngineSender(sender, engine, tmp_path).refit()
        except RefitError as error:
            return str(error)
        return ""

    errors, _ = simulate(2, run)
    assert errors[0] == errors[1] and "MemoryError" in str(errors[0])


def test_a_vllm_server_over_http() -> None:
    calls: list[tuple[str, bytes]] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            calls.append((self.path, body))
            self.send_response(500 if "update" in self.path else 200)
            self.end_headers()
            self.wfile.write(b'{"error": "a refit was not applied"}')

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        client = VllmServer(f"http://127.0.0.1:{server.server_port}")
        client.pause()
        client.resume()
        client.init_weight_transfer_engine({"protocol": 1})
        with pytest.raises(RuntimeError, match=r"answered update_weights with 500: .*not applied"):
            client.update_weights({"header": {}})
    finally:
        server.shutdown()
        server.server_close()
    assert calls == [
        ("/pause?mode=wait&clear_cache=true", b"{}"),
        ("/resume", b"{}"),
        ("/init_weight_transfer_engine", b'{"init_info": {"protocol": 1}}'),
        ("/update_weights", b'{"update_info": {"header": {}}}'),
    ]
    with pytest.raises(ValueError, match="old KV caches"):
        VllmServer("http://localhost", mode="keep")
    with pytest.raises(ValueError, match="http or https"):
        VllmServer("file:///etc/passwd")


def test_the_entry_point_is_that_of_the_package() -> None:
    """Tests in vLLM have zerocast from its sources, where no entry point is installed, and the one of a site of theirs."""
    root = Path(__file__).parents[2]
    declared = 'zerocast = "zerocast.integrations.vllm:register"'
    assert declared in (root / "pyproject.toml").read_text()
    assert declared.replace('"', "") in next(root.glob("examples/rollout/vllm_site/*/entry_points.txt")).read_text()
