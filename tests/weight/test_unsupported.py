"""What is said in place of an operator that is not defined on a QuantizedWeight: every operator of this torch, and real calls."""

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import utils
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

import zerocast
from tests import casts
from tests.observed import operators
from tests.workers import error_of, on_ranks
from zerocast import QuantizedWeight
from zerocast.weight import unsupported, weight

CALLS = r"dequantize\(|quantize_|zerocast\.(ZeroAdamW|CastPlan|fsdp2\.prepare|export|optim)"
FAMILIES = {name: text for name, text in vars(unsupported).items() if name.isupper() and isinstance(text, str)}


def model(fmt: str = "nvfp4", dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)).to(dtype)
    zerocast.quantize_(layers, zerocast.Recipe({"*.weight": fmt}))
    return layers


def plain() -> QuantizedWeight:
    found = model()[0].weight.detach()
    assert isinstance(found, QuantizedWeight)
    return found


def experts() -> QuantizedWeight:
    return casts.cast_whole("nvfp4", torch.ones(4, 32, 64), torch.bfloat16)


def tensor_places(operator: Any) -> list[str]:
    return [a.name for a in operator._schema.arguments if "Tensor" in str(a.type)]


def said(operator: Any, place: str) -> str:
    """The message for a weight at one place among the arguments."""
    argument = next(a for a in operator._schema.arguments if a.name == place)
    value: Any = [WEIGHT] if "List" in str(argument.type) else WEIGHT
    with pytest.raises(RuntimeError) as caught:
        QuantizedWeight.__torch_dispatch__(operator, (), (), {place: value})
    return str(caught.value)


WEIGHT = plain()


def test_every_operator_of_this_torch_has_a_handler_or_names_a_call() -> None:
    seen, used = 0, set()
    for operator in operators():
        if operator in weight._HANDLERS:
            continue
        for place in tensor_places(operator):
            message = said(operator, place)
            assert message.startswith(f"{operator} is not defined on a QuantizedWeight: "), operator
            assert re.search(CALLS, message), message
            assert len(message) < 330, message
            used.add(message.partition("QuantizedWeight: ")[2])
            seen += 1
    assert seen > 5000
    assert {name for name, text in FAMILIES.items() if text not in used} == {"FLAT"}  # of views that have a handler


def test_who_writes_and_who_views_is_read_from_the_schema() -> None:
    """An operator of a later torch belongs where its schema puts it, whatever it is called."""
    instead_of_values = set(FAMILIES.values()) - {unsupported.VALUES, unsupported.PRODUCT}
    written = viewed = 0
    for operator in operators():
        if operator in weight._HANDLERS or operator.namespace != "aten":
            continue
        for argument in operator._schema.arguments:
            if argument.alias_info is None or "Tensor" not in str(argument.type):
                continue
            assert said(operator, argument.name).partition("QuantizedWeight: ")[2] in instead_of_values, operator
            written, viewed = written + argument.alias_info.is_write, viewed + (not argument.alias_info.is_write)
    assert written > 1000 and viewed > 60


def test_an_operator_of_a_later_torch() -> None:
    with torch.library._scoped_library("zerocast_later", "DEF") as library:
        library.define("write(Tensor(a!) self) -> Tensor(a!)")
        library.define("view(Tensor(a) self) -> Tensor(a)")
        library.define("read(Tensor self) -> Tensor")
        ops = torch.ops.zerocast_later
        for operator, text in ((ops.write, "WRITE"), (ops.view, "VIEW"), (ops.read, "VALUES")):
            with pytest.raises(RuntimeError, match=re.escape(FAMILIES[text])):
                operator(plain())


def torchs_average() -> None:
    """A second update, since the first one copies."""
    averaged = model()
    average = AveragedModel(averaged)
    average.update_parameters(averaged)
    average.update_parameters(averaged)


def safetensors_file(saved: nn.Module) -> None:
    pytest.importorskip("safetensors.torch").save(dict(saved.state_dict()))


REAL: dict[str, tuple[Callable[[], Any], str]] = {
    "safetensors": (lambda: safetensors_file(model()), "STORAGE"),
    "data_ptr": (lambda: plain().data_ptr(), "STORAGE"),
    "storage": (lambda: plain().storage(), "STORAGE"),
    "numpy": (lambda: plain().numpy(), "VALUES"),
    "numpy array": (lambda: np.asarray(plain()), "VALUES"),
    "tolist": (lambda: plain().tolist(), "VALUES"),
    "dlpack": (lambda: torch.from_dlpack(plain()), "VALUES"),
    "numpy's dlpack": (lambda: np.from_dlpack(plain()), "VALUES"),
    "cuda array": (lambda: plain().__cuda_array_interface__, "STORAGE"),
    "apply_": (lambda: plain().apply_(abs), "VALUES"),
    "iteration": (lambda: list(plain()), "VIEW"),
    "some experts": (lambda: experts()[torch.tensor([0, 1])], "VIEW"),
    "select": (lambda: plain().select(0, 1), "VIEW"),
    "chunk": (lambda: plain().chunk(2), "SPLIT"),
    "parameters_to_vector": (lambda: utils.parameters_to_vector(model().parameters()), "FLAT"),
    "spectral_norm": (lambda: parametrizations.spectral_norm(model()[0]), "LIKE"),
    "init": (lambda: nn.init.xavier_uniform_(plain()), "INITIALISE"),
    "init to zero": (lambda: nn.init.zeros_(plain()), "INITIALISE"),
    "init to a constant": (lambda: nn.init.constant_(plain(), 1.0), "INITIALISE"),
    "decay": (lambda: plain().mul_(0.9), "WRITE"),
    "an EMA of weights": (lambda: torch.zeros(32, 64, dtype=torch.bfloat16).lerp_(plain(), 0.1), "AVERAGE"),
    "torch's average": (torchs_average, "AVERAGE"),
    "foreach in place": (lambda: torch._foreach_mul_([plain()], 2.0), "OPTIMIZER"),
    "zeros_like": (lambda: torch.zeros_like(plain()), "LIKE"),
    "norm": (lambda: utils.get_total_norm([plain()]), "VALUES"),
    "to a dtype": (lambda: model().to(torch.float64), "CONVERT"),
    "dynamic quantization": (lambda: torch.ao.quantization.quantize_dynamic(model(), {nn.Linear}), "CONVERT"),
    "view as bytes": (lambda: plain().view(torch.uint8), "CONVERT"),
    "sparse": (lambda: plain().to_sparse(), "CONVERT"),
    "pin_memory": (lambda: plain().pin_memory(), "STORAGE"),
    "convolution": (lambda: F.conv1d(torch.ones(1, 32, 64, dtype=torch.bfloat16), experts()), "PRODUCT"),
    "a sum of batched products": (
        lambda: torch.baddbmm(torch.ones(4, 2, 64), torch.ones(4, 2, 32), experts()),
        "PRODUCT",
    ),
    "vmap over experts": (lambda: torch.func.vmap(lambda w: w.sum())(experts()), "VALUES"),
    "compiled": (lambda: torch.compile(lambda w: w.sum(), backend="eager")(plain()), "VALUES"),
    "stacked models": (lambda: torch.func.stack_module_state([model(), model()]), "VALUES"),  # type: ignore[list-item]
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REAL)
def test_real_calls_are_told_what_to_do(name: str) -> None:
    call, text = REAL[name]
    # Megatron's integration, if it was imported in this process, has an answer of its own.
    pinned = torch.ops.aten.is_pinned.default
    handlers = {op: handler for op, handler in weight._HANDLERS.items() if op is not pinned}
    with mock.patch.dict(weight._HANDLERS, handlers, clear=True), pytest.raises(RuntimeError) as caught:
        call()
    assert FAMILIES[text] in str(caught.value)


READS: dict[str, Callable[[Any], Any]] = {
    "apply_": lambda w: Tensor.apply_(w, abs),
    "data_ptr": Tensor.data_ptr,
    "dlpack": lambda w: torch._C._to_dlpack(w),
    "address of the storage": lambda w: w.untyped_storage().data_ptr(),
    "storage resized": lambda w: w.untyped_storage().resize_(0),
    "byte of the storage": lambda w: w.untyped_storage()[0],
}


@pytest.mark.parametrize("name", READS)
@on_ranks(2)
def test_what_passes_below_raises_and_does_not_crash(name: str) -> None:
    """Memory that is not there was address 0 once: a crash, or a capsule of nothing."""
    with pytest.raises(RuntimeError), torch._C.DisableTorchFunctionSubclass():
        READS[name](plain())


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda w: torch.func.vmap(lambda x: F.linear(x, w))(inputs(3, 2, 64)),
    "vmap of a gradient": lambda w: torch.func.vmap(torch.func.grad(lambda x: F.linear(x, w).square().sum()))(
        inputs(3, 64)
    ),
    "grad of the input": lambda w: torch.func.grad(lambda x: F.linear(x, w, inputs(32)).sum())(inputs(2, 64)),
    "grad of the weight": lambda w: torch.func.grad(lambda v: F.linear(inputs(2, 64), v).square().sum())(w),
    "vjp": lambda w: torch.func.vjp(lambda x: x @ w, inputs(2, 32))[1](inputs(2, 64))[0],
    "jvp": lambda w: torch.func.jvp(lambda x: F.linear(x, w), (inputs(2, 64),), (inputs(2, 64),))[1],
    "jacrev": lambda w: torch.func.jacrev(lambda x: F.linear(x, w))(inputs(64)),
    "functionalize": lambda w: torch.func.functionalize(lambda x: F.linear(x, w))(inputs(2, 64)),
}


def inputs(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).bfloat16()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func_over_products(name: str) -> None:
    weight = plain()
    found, expected = TRANSFORMS[name](weight), TRANSFORMS[name](weight.dequantize())
    torch.testing.assert_close(found, expected)
    assert found.abs().sum() > 0


WRAPPERS: dict[str, tuple[Callable[[], Any], str]] = {
    "DDP": (lambda: DistributedDataParallel(model()), "FLAT"),
    "fully_shard": (lambda: fully_shard(model()), "SPLIT"),
    "FSDP1": (lambda: FullyShardedDataParallel(model(), device_id=torch.device("cpu")), "FLAT"),
    "tensor parallelism": (
        lambda: parallelize_module(model(), init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()}),
        "SPLIT",
    ),
    "all_reduce": (lambda: dist.all_reduce(plain()), "COLLECTIVE"),
    "broadcast": (lambda: dist.broadcast(plain(), 0), "COLLECTIVE"),
    "all_gather": (lambda: dist.all_gather([torch.zeros(32, 64).bfloat16()] * 2, plain()), "COLLECTIVE"),
}


@pytest.mark.notices(
    "`DDP(model)`, FSDP1, or `fully_shard` after `quantize_`", where="Weights", answer="raises on all ranks"
)
@pytest.mark.parametrize("name", WRAPPERS)
@on_ranks(2)
def test_wrappers_of_others_raise_on_all_ranks(name: str) -> None:
    wrap, text = WRAPPERS[name]
    message = error_of(wrap)
    assert FAMILIES[text] in message
    assert "zerocast.ZeroAdamW" in message or "zerocast.fsdp2.prepare" in message
