"""Megatron's layer-wise optimizer on every rank of a pool: Muon for matrices, Adam for the rest, and the bytes.

Megatron looks Muon up in its registry of emerging optimizers. Without that package, emerging_optimizers, torch's Muon is
registered in that place. Experts are the last two layers, in buffers and over a group of their own; they have no biases, for which
Megatron has no optimizer beside Muon.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zerocast
from tests.megatron import training
from tests.megatron.host_on_cpu import WHY_NOT
from tests.megatron.training import FORMATS, Case, Run
from tests.workers import error_of
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron.host import distributed_optimizers
from zerocast.integrations.megatron.shards import shares

WHY_NO_MUON = WHY_NOT
if not WHY_NO_MUON:
    import megatron.core.optimizer as factories
    from megatron.core import parallel_state

    try:
        from megatron.core.optimizer.emerging_optimizers import EmergingOptimizerEntry
        from megatron.core.optimizer.layer_wise_optimizer import (
            LayerWiseDistributedOptimizer,
            tag_params_for_buffer_routing,
        )
    except ImportError as error:
        WHY_NO_MUON = f"this megatron-core has no layout for whole matrices: {error}"

SETTINGS = {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True, "use_distributed_optimizer": False}


class Muon(torch.optim.Muon):
    """torch's, by whose class nothing tells it from an emerging optimizer."""


def _begin(optimizer: Any, config: Any = None) -> None:
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        optimizer.state[param].setdefault("momentum_buffer", torch.zeros_like(param))


@contextlib.contextmanager
def muon_in_the_host() -> Iterator[None]:
    """Megatron finds an emerging optimizer of the name muon: its own over that package, where there is one."""
    if factories.HAVE_EMERGING_OPTIMIZERS:
        yield
        return

    def arguments(config: Any, *_: Any) -> dict[str, Any]:
        return {"lr": config.lr, "weight_decay": config.weight_decay}

    entry = EmergingOptimizerEntry(Muon, _begin, arguments)
    with (
        mock.patch.object(factories, "HAVE_EMERGING_OPTIMIZERS", True),
        mock.patch.dict(factories._EMERGING_OPTIMIZERS, {"muon": entry}),
    ):
        yield


@contextlib.contextmanager
def host(case: Case) -> Iterator[None]:
    with case.host(), muon_in_the_host():
        yield


def build(case: Case, biases: bool = False) -> Run:
    """Build a run inside `host` and `quantized_params`. Experts have `biases` to be refused."""
    chunk = build_chunk(case, biases=biases)
    return Run(chunk, build_optimizer(case, [chunk]), case)


def build_optimizer(case: Case, chunks: list[Any]) -> Any:
    return training.build_optimizer(Case(overlap=case.overlap, options=SETTINGS | case.options), chunks)


def build_chunk(case: Case, biases: bool = False) -> Any:
    """A quantized model in its DistributedDataParallel, with the layout of whole matrices."""
    return training.build_chunk(case, model=_model(case, biases), layout=full_layout)


def _model(case: Case, biases: bool = False) -> Any:
    torch.manual_seed(case.seed)
    model: Any = training.Model(training.configuration(), case.te)
    for layer in model.layers[2:] if case.experts and not biases else ():
        layer.bias = None
    return model


def full_layout(model: Any, ddp_config: Any) -> Any:
    """Megatron's layout of a model in which no matrix is cut between two ranks."""
    tag_params_for_buffer_routing([model])
    return LayerWiseDistributedOptimizer.compute_full_param_layout(
        list(model.parameters()),
        ddp_config.bucket_size,
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        ddp_config,
        parallel_state.get_expert_data_parallel_world_size(),
    )


def build_attached(case: Case, **options: Any) -> tuple[Run, Any]:
    with integration.quantized_params():
        run = build(case)
    return run, integration.attach(run.optimizer, run.ddp, **options)


def train(case: Case) -> None:
    """Train an attached model, and check its bytes, by `zerocast.verify` too."""
    with host(case):
        run, attachment = build_attached(case)
        assert len(attachment.plans) == 2 + case.experts
        run.train()
        assert zerocast.verify(attachment).ok


def owned(case: Case) -> list[tuple[str, str, int, int]]:
    """(kind of optimizer, parameter, first element, number of elements) that this rank owns."""
    with host(case):
        run, _ = build_attached(case)
        names = {id(param): name for name, param in run.ddp.module.named_parameters()}
        return [
            (type(one).__name__, names[id(param)], start, master.numel())
            for one in distributed_optimizers(run.optimizer)
            for share in shares(one)
            for param, master, start, _ in share.masters()
        ]


def check_first_masters(case: Case) -> None:
    """Masters are the values before quantization, which one after it would not be."""
    with host(case):
        plain = _model(case)
        run, _ = build_attached(case)
        masters = run.masters()
        assert not any(tensor.get_high_precision_init_val() is not None for tensor in run.te_tensors.values())
        assert all(torch.equal(param.float(), masters[name]) for name, param in plain.named_parameters())


def _with_biases(case: Case) -> None:
    with integration.quantized_params():
        build(case, biases=True)


def _outside(case: Case) -> None:
    """Experts that are quantized once all is built."""
    with integration.quantized_params():
        run = build(replace(case, formats="half"))
    zerocast.quantize_(run.ddp.module, zerocast.Recipe(FORMATS["other half"]))
    integration.attach(run.optimizer, run.ddp)


def _other_recipes(first: str, second: str) -> Callable[[Case], None]:
    """Ranks with one recipe of FORMATS each."""

    def mistake(case: Case) -> None:
        build_attached(replace(case, formats=(first, second)[dist.get_rank()]))

    return mistake


MISTAKES: dict[str, tuple[Callable[[Case], None], str]] = {
    "experts with biases": (_with_biases, "ValueError: .*bias of an expert is not a matrix.* add_bias_linear=False"),
    "experts that are quantized too late": (_outside, "ValueError: .* is quantized and in no bucket"),
    "other recipes": (
        _other_recipes("half", "other half"),
        "ValueError: weight 0 is module.layers.0.weight on rank 0 and module.layers.2.weight on rank 1",
    ),
    "experts of other recipes": (
        _other_recipes("mixed", "narrow experts"),
        "ValueError: rank 0: weight 0 is module.layers.3.weight on rank 0 and module.layers.2.weight on",
    ),
}


def break_a_step(case: Case) -> None:
    """A step breaks off in Muon: then a step, a forward pass, a save and `verify` raise."""
    with host(case):
        run, attachment = build_attached(case)
        run.step(0)
        held = copy.deepcopy(run.optimizer.state_dict()[0])
        matrices = run.optimizer.chained_optimizers[0]
        broken = mock.patch.object(matrices.optimizer, "step", side_effect=MemoryError("in the test"))
        with broken, pytest.raises(MemoryError):
            run.step(1)
        for call in (
            run.optimizer.step,
            lambda: run.forward(0),
            run.optimizer.state_dict,
            lambda: matrices.save_state_dict_to_file("never written"),
            lambda: zerocast.verify(attachment),
            lambda: matrices.load_state_dict(held),  # Adam's part stays as the step left it
        ):
            assert "an optimizer step failed partway" in error_of(call)


def finetune(case: Case) -> None:
    """Masters are values that are loaded into the model, or those of a state dict without their rounding."""
    with host(case):
        run, _ = build_attached(case)
        run.ddp.module.load_state_dict(_filled(run, 0.25), strict=False)
        run.optimizer.reload_model_params()
        assert all(bool((master == 0.25).all()) for master in run.masters().values())
        assert not run.stale_bytes()
        run.optimizer.reload_model_params(state_dict={"model": _filled(run, 0.3, torch.float32)})
        assert all(bool((master == torch.tensor(0.3)).all()) for master in run.masters().values())
        assert not run.stale_bytes()


def _filled(run: Run, value: float, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: torch.full(p.shape, value, dtype=dtype) for name, p in run.ddp.module.named_parameters()}


@contextlib.contextmanager
def _checkpoints_of_muon() -> Iterator[None]:
    """Inside, saved and resumed runs are of this host, whose matrices have no moments of Adam."""
    state = mock.patch.object(training, "_state", lambda run: {"master": run.masters()})
    with muon_in_the_host(), mock.patch.object(training, "build_attached", build_attached), state:
        yield


def resume(case: Case, folder: str, kind: str) -> None:
    with _checkpoints_of_muon():
        training.resume(case, folder, kind)


def saved(case: Case, folder: str, kind: str) -> training.State:
    with _checkpoints_of_muon():
        return training.saved(case, folder, kind)


def check_loaded(case: Case, folder: str, kind: str, written: training.State) -> None:
    with _checkpoints_of_muon():
        training.check_loaded(case, folder, kind, written)
