"""No byte outside of a buffer is read or written, also for a hostile file, a freed storage or a call by hand.

Calls that would do so raise before any byte is touched, in `python -O` too: `python -O -m tests.weight.test_memory` runs all of
them and names those that did not.
"""

import functools
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import zerocast
from tests.workers import in_a_process
from zerocast import CastPlan, QuantizedWeight
from zerocast.distributed.group import ONE_PROCESS
from zerocast.weight.weight import _restore

REFUSED = (TypeError, ValueError, RuntimeError)
SHAPE = (64, 64)
FORMATS = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "int4", "identity")
Case = Callable[[], object]


class Saved:
    """An object that a file names `_restore` for."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, self.arguments


def loaded(*arguments: Any) -> Any:
    file = io.BytesIO()
    torch.save(Saved(*arguments), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def good() -> list[Any]:
    held = {"rowwise_data": torch.zeros(SHAPE, dtype=torch.uint8), "rowwise_scale_inv": torch.ones(1)}
    return [SHAPE, "fp8_current", torch.bfloat16, False, True, True, held, None, False, None]


WRONG: dict[int, tuple[Any, ...]] = {
    0: ((512, 512), (1 << 15, 1 << 15), (-64, -64), (64.0, 64), (True, 4096), (), (0, 64), "64", 64, (10**30, 1), None),
    1: ("nvfp4", "no such format", "fp8_current:margin=9", "fp8_block", "", 5, None),
    2: (torch.float64, torch.uint8, "bfloat16", None),
    3: (1, None),
    4: ("yes",),
    5: (7,),
    6: ({}, None, [], {"rowwise_data": None}, {1: torch.zeros(1)}),
    7: (torch.zeros(3), "x", 5, torch.zeros(SHAPE, dtype=torch.int64)),
    8: (2,),
    9: (5, ["a"], (1,)),
}
BUFFERS: dict[str, tuple[Any, ...]] = {
    "rowwise_data": (
        torch.zeros(256, dtype=torch.uint8),
        torch.zeros(64, 128, dtype=torch.uint8)[:, ::2],
        torch.zeros(64, 64),
        torch.zeros(1, 1, dtype=torch.uint8).expand(64, 64),
        torch.zeros(SHAPE, dtype=torch.uint8).to_sparse(),
        torch.zeros(SHAPE, dtype=torch.uint8, device="meta"),
        QuantizedWeight.empty(SHAPE, "fp8_current"),
        "bytes",
    ),
    "rowwise_scale_inv": (torch.ones(0), torch.ones(1, dtype=torch.float64), torch.ones(2), None),
    "columnwise_data": (torch.zeros(1, dtype=torch.uint8),),
    "amax": (torch.zeros(0),),
    "scale": (torch.zeros(1),),  # which fp8_current has not
    "weights": (torch.zeros(1),),
}


def files() -> Iterator[tuple[str, Case]]:
    """Files whose arguments do not fit each other."""
    for place, values in WRONG.items():
        for number, value in enumerate(values):
            arguments = good()
            arguments[place] = value
            yield f"file argument {place} {number}", functools.partial(loaded, *arguments)
    for name, values in BUFFERS.items():
        for number, value in enumerate(values):
            arguments = good()
            arguments[6] = {**arguments[6], name: value}
            yield f"file buffer {name} {number}", functools.partial(loaded, *arguments)
            held = arguments[6]
            make = functools.partial(
                QuantizedWeight.of_buffers, SHAPE, zerocast.get_format("fp8_current"), torch.bfloat16
            )
            yield f"of_buffers {name} {number}", functools.partial(make, held)


def resized(tensor: Tensor, divisor: int) -> None:
    storage = tensor.untyped_storage()
    storage.resize_(storage.nbytes() // divisor if divisor else 0)


def shrunk_under_plan(fmt: str, name: str, divisor: int) -> None:
    """A cast, then another one after a buffer, or the master, lost memory."""
    weight, master = QuantizedWeight.empty(SHAPE, fmt), torch.randn(64 * 64)
    plan = CastPlan([weight], [master], [0], ONE_PROCESS)
    plan.cast()
    plan.post_all_gather()
    target = master if name == "master" else weight.state.buffers[name]
    assert target is not None
    resized(target, divisor)
    plan.cast()
    plan.post_all_gather()


def shrunk_second_master() -> None:
    flat = torch.randn(2 * 4096)
    masters = list(flat.split(4096))
    plan = CastPlan([QuantizedWeight.empty(SHAPE, "fp8_current") for _ in masters], masters, [0, 0], ONE_PROCESS)
    plan.cast()
    resized(flat, 2)
    plan.cast()


def shrunk_at_its_address(name: str) -> None:
    """A cast, then another one after memory was freed, and half as much of it was taken again, which an allocator often
    gives the address that was freed.
    """
    shape = 256, 256
    weight, master = QuantizedWeight.empty(shape, "fp8_current"), torch.randn(256 * 256)
    plan = CastPlan([weight], [master], [0], ONE_PROCESS)
    plan.cast()
    target = master if name == "master" else weight.rowwise_data
    half = target.untyped_storage().nbytes() // 2
    resized(target, 0)
    target.untyped_storage().resize_(half)
    plan.cast()


def other_data(change: Callable[[Tensor], Tensor]) -> None:
    """A cast, then another one after a master was given other data."""
    weight, master = QuantizedWeight.empty(SHAPE, "fp8_current"), torch.randn(4096)
    plan = CastPlan([weight], [master], [0], ONE_PROCESS)
    plan.cast()
    master.data = change(master.data)
    plan.cast()


def shrunk_under_optimizer(name: str) -> None:
    layer = zerocast.quantize_(
        torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16), zerocast.Recipe({"*": "fp8_block"})
    )
    optimizer = zerocast.ZeroAdamW(layer.named_parameters(), lr=1e-3)
    for number in range(2):
        layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        if not number:
            weight = layer.weight
            assert isinstance(weight, QuantizedWeight)
            target = weight.state.buffers[name]
            assert target is not None
            resized(target, 0)


def kept() -> Iterator[tuple[str, Case]]:
    """Yield the cases in which memory is freed, shortened or replaced after a plan was built."""
    for fmt in FORMATS:
        weight = QuantizedWeight.empty(SHAPE, fmt)
        names = [name for name, buffer in weight.state.buffers.items() if buffer is not None]
        for name in ("master", *names):
            for divisor in (0, 2):
                yield f"plan {fmt} {name} {divisor}", functools.partial(shrunk_under_plan, fmt, name, divisor)
    yield "second master", shrunk_second_master
    for name in ("master", "rowwise_data"):
        yield f"same address {name}", functools.partial(shrunk_at_its_address, name)
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "short": lambda data: torch.randn(16),
        "strided": lambda data: torch.randn(8192)[::2],
        "float64": lambda data: torch.zeros(4096, dtype=torch.float64),
        "int32": lambda data: torch.zeros(4096, dtype=torch.int32),
        "a part of it": lambda data: data[:16],
        "its bytes as int32": lambda data: data.view(torch.int32),
    }
    for name, change in changes.items():
        yield f"other data {name}", functools.partial(other_data, change)
    for name in ("rowwise_data", "rowwise_scale_inv"):
        yield f"optimizer {name}", functools.partial(shrunk_under_optimizer, name)


def table_of_a_plan(**changes: Any) -> None:
    """Stage partial_amax by a table of a plan, over other tensors."""
    plan = CastPlan([QuantizedWeight.empty(SHAPE, "fp8_current")], [torch.randn(4096)], [0], ONE_PROCESS)
    table = plan.tables[0]
    given = {"masters": table.masters.tensors, "table": table.table, "packed": torch.zeros(8), **changes}
    torch.ops.zerocast.partial_amax(
        "cpu", "fp8_current", torch.bfloat16, given["masters"], given["table"], given["packed"]
    )


def calls() -> Iterator[tuple[str, Case]]:
    """Ops that are given tensors by hand."""
    run = torch.ops.zerocast
    few, one = torch.zeros(16, dtype=torch.uint8), torch.ones(1)
    codes, scales = torch.zeros(SHAPE, dtype=torch.uint8), torch.ones(1, 4)
    freed = torch.zeros(SHAPE, dtype=torch.uint8)
    resized(freed, 0)
    bf16, big = torch.bfloat16, 1 << 15
    yield "dequantize", lambda: run.dequantize("cpu", "fp8_current", few, one, None, big, big, False, bf16)
    yield "dequantize freed", lambda: run.dequantize("cpu", "fp8_current", freed, one, None, *SHAPE, False, bf16)
    yield "dequantize strided", lambda: run.dequantize("cpu", "fp8_current", codes.t(), one, None, *SHAPE, False, bf16)
    yield "dequantize none", lambda: run.dequantize("cpu", "fp8_current", codes, None, None, *SHAPE, False, bf16)
    yield "dequantize int", lambda: run.dequantize("cpu", "fp8_current", codes, one, None, *SHAPE, False, torch.int64)
    yield "dequantize negative", lambda: run.dequantize("cpu", "fp8_current", codes, one, None, -64, -64, False, bf16)
    yield "dequantize scales", lambda: run.dequantize("cpu", "mxfp8", codes, few, None, *SHAPE, False, bf16)
    yield "dequantize amax", lambda: run.dequantize("cpu", "nvfp4", codes, codes, None, *SHAPE, False, bf16)
    yield "upcast", lambda: run.upcast("cpu", "mxfp4", few, few, None, 1 << 14, 1 << 14, False)
    yield "upcast format", lambda: run.upcast("cpu", "fp8_current", codes, one, None, *SHAPE, False)
    yield "transposed", lambda: run.transposed("cpu", "fp8_current", few, one, 1 << 12, 1 << 12)
    yield "transposed scales", lambda: run.transposed("cpu", "fp8_block", codes, scales[:, :1], *SHAPE)
    yield "quantize_gradient", lambda: run.quantize_gradient("cpu", torch.zeros(4096), 2, few)
    yield "quantize_gradient parts", lambda: run.quantize_gradient("cpu", torch.zeros(4096), 0, few)
    yield "add_gradients", lambda: run.add_gradients("cpu", few, 8, 8, False, torch.zeros(1 << 20))
    yield "table masters", lambda: table_of_a_plan(masters=[torch.zeros(16)])
    yield "table none", lambda: table_of_a_plan(masters=[])
    yield "table shape", lambda: table_of_a_plan(table=torch.zeros(4, 3, dtype=torch.int64))
    yield "table dtype", lambda: table_of_a_plan(table=torch.zeros(1, 24))


def cases() -> dict[str, Case]:
    return {**dict(files()), **dict(kept()), **dict(calls())}


def run() -> None:
    """Name the cases that did not raise, and end the process with their number."""
    silent = []
    for name, case in cases().items():
        print(name, flush=True)
        try:
            case()
        except REFUSED:
            continue
        silent.append(name)
    print("not refused:", silent)
    raise SystemExit(min(len(silent), 100))


def test_every_case_is_refused() -> None:
    """In a process of its own, which a case may end."""
    status, printed = in_a_process(run)
    assert status == 0, printed[-2500:]


@pytest.mark.slow
def test_every_case_is_refused_without_asserts() -> None:
    command = [sys.executable, "-O", "-m", "tests.weight.test_memory"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout[-500:] + ended.stderr[-2000:]


@pytest.mark.parametrize("name", ["file argument 0 0", "plan nvfp4 rowwise_data 2", "quantize_gradient"])
def test_an_error_names_both_sizes(name: str) -> None:
    with pytest.raises(ValueError, match=r"262,144 bytes.*4,096 bytes|2,048 .* 1,024|16 elements, 4,224"):
        cases()[name]()


if __name__ == "__main__":
    run()
