"""Every operator and every function of torch on a reduced gradient is defined, or raises; none reads noise."""

import copy
import gc
import inspect
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import get_ignored_functions, get_overridable_functions, get_testing_overrides, resolve_name

import zerocast
from tests.observed import NewStorages, operators
from tests.optim.probe import BF16, FP32
from tests.optim.runs import DETERMINISTIC, Run, Trainer, rank
from tests.workers import on_ranks
from zerocast import QuantizedWeight, ZeroAdamW, ZeroConfig
from zerocast.optim import reduced_gradient
from zerocast.optim.reduced_gradient import ReducedGradient


def trained(stage: int = 2) -> Trainer:
    trainer = Trainer(Run(stage=stage))
    trainer.probe.backward(3, rank())
    return trainer


def gradient(shape: tuple[int, ...] = (8, 8)) -> tuple[ReducedGradient, ZeroAdamW]:
    """Return a reduced gradient with the optimizer that keeps it alive."""
    parameter = nn.Parameter(torch.ones(shape))
    optimizer = ZeroAdamW([("w", parameter)], config=DETERMINISTIC)
    (parameter * 3.0).sum().backward()
    assert isinstance(parameter.grad, ReducedGradient)
    return parameter.grad, optimizer


def test_every_operator_is_defined_or_raises():
    """An operator that the table lacks raises in the dispatcher."""
    held, _optimizer = gradient()
    undefined = set(operators("aten")) - {*reduced_gradient._HANDLERS}
    assert len(undefined) > 1500
    for operator in undefined:
        with pytest.raises(RuntimeError, match=r"not defined on the reduced gradient of w.*full_tensor\(\)"):
            ReducedGradient.__torch_dispatch__(operator, (ReducedGradient,), (held,))


# functions with a meaning; the rest of what may return asks for no element, or returned the gradient itself
NORMS = {"linalg_vector_norm", "linalg_norm", "matrix_norm", "vector_norm", "norm", "nuclear_norm"}
METADATA = {"is_nonzero", "is_neg", "is_conj", "is_distributed", "is_pinned", "is_tensor", "is_storage", "__get__"}
METADATA |= {"__repr__", "__format__", "result_type", "can_cast", "is_coalesced", "output_nr", "_is_zerotensor"}


def functions() -> dict[str, Callable[..., Any]]:
    """Return the functions of torch, its tensors and torch.nn.functional that can be overridden."""
    ignored = get_ignored_functions()
    found = {}
    for functions_of in get_overridable_functions().values():
        for function in functions_of:
            if function not in ignored and resolve_name(function):
                found[str(resolve_name(function))] = function
    return found


@pytest.mark.filterwarnings("ignore")
def test_no_function_reads_noise():
    """No tensor or number comes of a function that is called with a reduced gradient for all arguments it needs."""
    overrides, silent = get_testing_overrides(), []
    held, _optimizer = gradient()
    for name, function in functions().items():
        needed = inspect.signature(overrides.get(function, lambda only: None)).parameters.values()
        args = [held for p in needed if p.default is p.empty and p.kind is not p.KEYWORD_ONLY]
        try:
            result = function(*args)
        except Exception:
            continue
        results = result if isinstance(result, tuple | list) else [result]
        known = name.rpartition(".")[2] in NORMS | METADATA | reduced_gradient._ASKED
        if not known and not any(isinstance(each, ReducedGradient) for each in results):
            silent.append((name, type(result)))
    assert silent == []


ESCAPES: dict[str, Callable[[Any], object]] = {
    "numpy": lambda g: g.numpy(),
    "asarray": np.asarray,
    "item": lambda g: g[0].item(),
    "tolist": lambda g: g.tolist(),
    "dlpack": lambda g: g.__dlpack__(),
    "data_ptr": lambda g: g.data_ptr(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda g: torch.save(g, io.BytesIO()),
    "data sum": lambda g: g.data.sum(),
    "plain copy": lambda g: torch.zeros(8, 8).copy_(g),
    "norm of rows": lambda g: g.norm(dim=1),
    "kept dimensions": lambda g: torch.linalg.vector_norm(g, keepdim=True),
    "norm below 0": lambda g: g.norm(-1),
    "other shape": lambda g: g.add_(torch.ones(8)),
    "set data": lambda g: setattr(g, "data", torch.ones(8, 8)),
    "set other data": lambda g: setattr(g, "data", gradient()[0]),
    "share": lambda g: g.share_memory_(),
}


@pytest.mark.notices("a reduced gradient is read, copied or computed with", where="ZeroAdamW", answer="raises")
@pytest.mark.parametrize("escape", ESCAPES.values(), ids=ESCAPES)
def test_escapes(escape):
    held, _optimizer = gradient()
    with pytest.raises((RuntimeError, ValueError), match="reduced gradient"):
        escape(held)


def test_the_storage_has_no_memory():
    """Compilers ask for the storage, to see whether tensors share one."""
    held, _optimizer = gradient()
    with pytest.raises(RuntimeError, match="not allocated"):
        list(held.untyped_storage())


def test_what_can_be_asked():
    held, _optimizer = gradient((3, 5))
    assert (held.shape, held.dtype, held.device.type, held.numel(), held.dim()) == ((3, 5), FP32, "cpu", 15, 2)
    assert not (held.is_sparse or held.requires_grad or held.grad_fn)
    assert "ReducedGradient(w, shape=(3, 5)" in f"{held} {held!r}"
    assert isinstance(held, Tensor)
    assert len({held}) == 1


@on_ranks(3)
def test_changes_in_place():
    """A change in place does to this rank's slice what it would do to the whole."""
    trainer = trained()
    generator = torch.Generator().manual_seed(1)
    for parameter in trainer.probe.parameters():
        whole = parameter.grad.full_tensor()
        noise = torch.randn(parameter.shape, generator=generator)
        steps: list[Callable[[Any], object]] = [
            lambda t: t.mul_(2.0),
            lambda t: t.div_(torch.tensor(3.0)),
            lambda t, n=noise: t.add_(n, alpha=0.5),
            lambda t, n=noise: t.sub_(n),
            lambda t: t.clamp_(min=-1.0).clamp_(max=1.0),
            lambda t, n=noise: torch._foreach_mul_([t], [n]),
            lambda t: torch._foreach_add_([t], 0.25),
            lambda t: torch._foreach_clamp_max_([t], 0.5),
            lambda t: t.neg_(),
            lambda t: t.detach().mul_(1.5),
            lambda t: t.data.mul_(1.5),
            lambda t, n=noise: t.copy_(n).nan_to_num_(),
            lambda t: t.add_(t.detach()),
            lambda t: t.zero_(),
        ]
        for change in steps:
            change(parameter.grad)
            change(whole)
            assert torch.equal(parameter.grad.full_tensor(), whole)
        parameter.grad *= 2.0
        parameter.grad += noise
        assert torch.equal(parameter.grad.full_tensor(), noise)
        wanted = noise.norm()
        assert float(parameter.grad.norm()) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_by_autograd_alone(stage):
    """`autograd.grad` neither sees nor disturbs what lies on the parameters."""
    trainer = trained(stage)
    parameters = [trainer.probe.get_parameter(name) for name in ("norm", "nv")]
    before = [p.grad.full_tensor() for p in parameters]
    loss = trainer.probe.loss({s.name: s.gradient(2, 0) for s in trainer.run.specs})
    found = torch.autograd.grad(loss, parameters)
    assert [type(g) for g in found] == [Tensor, Tensor]
    assert all(torch.equal(p.grad.full_tensor(), b) for p, b in zip(parameters, before, strict=True))


@pytest.mark.parametrize("stage", [1, 2])
def test_a_mode_of_the_dispatcher_changes_nothing(stage):
    """Profilers and meters pass each operator on by themselves, autograd's too."""
    trainer = trained(stage)
    once = trainer.probe.get_parameter("norm").grad.full_tensor()
    with NewStorages():
        trainer.probe.backward(3, 0)
        norm = nn.utils.clip_grad_norm_(trainer.probe.parameters(), 1e30)
    assert norm > 0
    assert torch.equal(trainer.probe.get_parameter("norm").grad.full_tensor(), 2 * once)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_adds_to_a_reduced_gradient(stage):
    parameter = nn.Parameter(torch.ones(8, 8))
    optimizer = ZeroAdamW([("w", parameter)], stage=stage, config=DETERMINISTIC)
    for _ in range(3):
        parameter.square().sum().backward(create_graph=True)
    assert torch.equal(parameter.grad.full_tensor(), torch.full((8, 8), 6.0))
    optimizer.step()
    assert not optimizer.state_dict()["model"]["w"].requires_grad


@pytest.mark.parametrize("stage", [1, 2])
def test_compiled_with_reduced_gradients_in_place(stage):
    """A second trace finds reduced gradients on the parameters."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    zerocast.quantize_(model, zerocast.Recipe({"0.weight": "fp8_current"}), dtype=FP32)
    optimizer = ZeroAdamW(model.named_parameters(), stage=stage, config=DETERMINISTIC)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.ones(2, 16)
    compiled(x).sum().backward()
    once = model[1].weight.grad.full_tensor()
    torch._dynamo.reset()
    compiled(x).sum().backward()
    assert torch.equal(model[1].weight.grad.full_tensor(), 2 * once)
    optimizer.step()


@pytest.mark.parametrize("grad_dtype", [None, FP32, BF16])
def test_the_dtype_is_that_of_gradients(grad_dtype):
    """torch's setter takes it, for weights whose gradients are of another dtype than they are too."""
    trainer = Trainer(Run(config=ZeroConfig(grad_dtype=grad_dtype)))
    trainer.probe.backward(3, 0)
    for parameter in trainer.probe.parameters():
        wide = grad_dtype is FP32 and isinstance(parameter, QuantizedWeight)
        assert parameter.grad.dtype is (FP32 if wide else parameter.dtype)
        parameter.grad = parameter.grad


@pytest.mark.parametrize("stage", [1, 2])
def test_a_model_stays_on_its_device_with_its_gradients(stage):
    """`Module.to` sets the data of each gradient to the gradient."""
    trainer = trained(stage)
    wanted = [p.grad.full_tensor() for p in trainer.probe.parameters()]
    trainer.probe.to("cpu")
    assert all(torch.equal(p.grad.full_tensor(), w) for p, w in zip(trainer.probe.parameters(), wanted, strict=True))
    trainer.optimizer.step()


def test_gradients_hold_no_model():
    """A parameter and its gradient are no cycle that the garbage collector cannot see."""
    trainer = trained()
    parameters = [weakref.ref(p) for p in trainer.probe.parameters()]
    gradients = [weakref.ref(p.grad) for p in trainer.probe.parameters()]
    del trainer
    gc.collect()
    assert all(reference() is None for reference in parameters + gradients)
