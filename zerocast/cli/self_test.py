"""The self-test: every usable backend against the reference on random weights and gradients.

A round trains the same small model for a few steps with each backend and compares all results:
masters, moments, and every buffer of every weight. It covers every stage of a step, and
`dequantize`. Shapes are random, too.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zerocast import backends
from zerocast.backends import ops
from zerocast.cli.output import Progress
from zerocast.distributed.group import ONE_PROCESS
from zerocast.formats import get_format
from zerocast.formats.layout import BUFFERS
from zerocast.formats.memory import as_bytes
from zerocast.formats.spec import Columnwise
from zerocast.optim import ZeroAdamW, ZeroConfig
from zerocast.weight.weight import NOMINAL_DTYPES, QuantizedWeight

REFERENCE = "reference"
FORMATS = (
    "fp8_delayed:amax_history_len=4",
    "fp8_delayed:amax_compute_algo=most_recent,amax_history_len=3,element=e5m2,margin=1",
    "fp8_current",
    "fp8_current:element=e5m2,power_of_2_scale=True",
    "fp8_block",
    "fp8_block:power_of_2_scale=False",
    "mxfp8",
    "mxfp8:block=32x32",
    "mxfp4",
    "nvfp4",
    "nvfp4:exact_in_fp8=True",
    "int4",
    "identity",
)
STEPS = 2


@dataclass(frozen=True)
class Outcome:
    """The result of one backend on one device.

    Attributes:
        rounds: rounds with equal bytes.
        nbytes: bytes compared in them.
        problem: the first difference or error, empty if there is none.
    """

    device: str
    backend: str
    rounds: int
    nbytes: int
    problem: str = ""

    @property
    def ok(self) -> bool:
        """True if at least one round was compared and nothing differed."""
        return self.rounds > 0 and not self.problem


def self_test(device: torch.device, seconds: float, seed: int) -> list[Outcome]:
    """Run rounds of every usable backend on `device` until `seconds` have passed, at least one."""
    names = usable(device)
    outcomes = {name: Outcome(str(device), name, 0, 0) for name in names}
    end = time.monotonic() + seconds
    number = 0
    progress = Progress()
    while names and (number == 0 or time.monotonic() < end):
        progress.say(f"round {number + 1} on {device}: reference")
        expected = _results(REFERENCE, device, seed + number)
        for name in names:
            progress.say(f"round {number + 1} on {device}: {name}")
            if not outcomes[name].problem:
                outcomes[name] = _compare(outcomes[name], device, seed + number, expected)
        number += 1
    progress.clear()
    return list(outcomes.values())


def usable(device: torch.device) -> list[str]:
    """Return the usable backends other than the reference."""
    return [name for name in backends.backend_names() if name != REFERENCE and backends.why_not(name, device) is None]


def _compare(so_far: Outcome, device: torch.device, seed: int, expected: dict[str, Tensor]) -> Outcome:
    """Return the outcome after one more round."""
    try:
        results = _results(so_far.backend, device, seed)
        problem = next(_differences(results, expected), "")
    except Exception as error:
        # Any error of a backend is a result to report.
        problem = f"{type(error).__name__}: {error}"
    if problem:
        return replace(so_far, problem=f"{problem} (seed {seed})")
    nbytes = sum(tensor.numel() for tensor in expected.values())
    return replace(so_far, rounds=so_far.rounds + 1, nbytes=so_far.nbytes + nbytes)


def _differences(results: dict[str, Tensor], expected: dict[str, Tensor]) -> Iterator[str]:
    for name, expected_bytes in expected.items():
        differs = results[name] != expected_bytes
        if differs.any():
            at = int(differs.byte().argmax())
            yield (
                f"{name} differs in {int(differs.sum()):,} of {expected_bytes.numel():,} bytes, first at {at:,}: "
                f"{int(results[name][at]):#04x} where {int(expected_bytes[at]):#04x} is expected"
            )


def _results(backend: str, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Return the bytes of all tensors after a few steps, keyed by name."""
    draw = random.Random(seed)  # noqa: S311
    generator = torch.Generator().manual_seed(seed)
    model = nn.ParameterDict()
    for number, fmt in enumerate(FORMATS):
        model[str(number)] = _parameter(fmt, device, draw, generator)
    config = ZeroConfig(backend=backend, keep_columnwise=True)
    optimizer = ZeroAdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, group=ONE_PROCESS, config=config)
    for _ in range(STEPS):
        for parameter in model.values():
            gradient = torch.randn(parameter.shape, generator=generator) * 10.0 ** draw.randint(-6, 2)
            parameter.grad = gradient.to(device, parameter.dtype)
        optimizer.step()
    return {name: as_bytes(tensor.contiguous()).cpu() for name, tensor in _tensors(backend, model, optimizer)}


def _parameter(fmt: str, device: torch.device, draw: random.Random, generator: torch.Generator) -> nn.Parameter:
    """Return a weight that was not cast yet, so that every byte of it will come from the
    optimizer's backend.
    """
    matrix = _matrix(fmt, draw, generator).to(device)
    dtype = draw.choice(NOMINAL_DTYPES)
    if get_format(fmt).element is None:
        # The matrix has numbers that FP16 cannot hold, and an optimizer raises on masters that are
        # not finite.
        largest = torch.finfo(dtype).max
        return nn.Parameter(matrix.clamp(-largest, largest).to(dtype))
    weight = QuantizedWeight.empty(matrix.shape, fmt, dtype, device)
    weight.high_precision_init_val = matrix
    if weight.scale is not None:
        weight.scale.fill_(2.0 ** draw.randint(-6, 6))
    return nn.Parameter(weight)


def _matrix(fmt: str, draw: random.Random, generator: torch.Generator) -> Tensor:
    """Return a matrix of random shape with zeros, blocks of zeros and numbers of very different
    magnitude.
    """
    rows, columns = (
        multiple * draw.randint(1, 320 // multiple) if multiple > 1 else draw.randint(1, 320)
        for multiple in get_format(fmt).multiple
    )
    matrix = torch.randn(rows, columns, generator=generator) * 10.0 ** draw.randint(-8, 3)
    matrix[draw.randrange(rows) :, : draw.randint(0, columns)] *= draw.choice((0.0, -0.0, 1e-30, 1e6))
    return matrix


def _tensors(backend: str, model: nn.ParameterDict, optimizer: ZeroAdamW) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that training has written, with a name for it, and the values that
    `dequantize` gives of the weights.
    """
    state = optimizer.state_dict()
    for number, parameter in model.items():
        fmt = FORMATS[int(number)]
        yield f"{fmt}: master", state["model"][number]
        for moment in ("exp_avg", "exp_avg_sq"):
            yield f"{fmt}: {moment}", state["optim"]["state"][number][moment]
        weight = getattr(parameter, "state", None)
        buffers = {"rowwise_data": parameter} if weight is None else {name: weight.buffers[name] for name in BUFFERS}
        for name, tensor in buffers.items():
            if tensor is not None:
                yield f"{fmt}: {name}", tensor
        if weight is not None:
            # A format without a columnwise copy is read as it is stored.
            has_columns = parameter.format.columnwise is not Columnwise.NONE
            for columnwise in (False, True) if has_columns else (False,):
                data, scale_inv = parameter.direction(columnwise)
                arguments = str(parameter.format), data, scale_inv, parameter.amax, *parameter.matrix_shape, columnwise
                direction = "columnwise" if columnwise else "rowwise"
                yield f"{fmt}: dequantized {direction}", ops.dequantize(backend, *arguments, parameter.dtype)
