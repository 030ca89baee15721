"""Megatron's layer-wise optimizer on every rank of a pool: Muon for matrices, Adam for the rest, and the bytes.

Megatron looks Muon up in its registry of emerging optimizers. Without that package, emerging_optimizers, torch's Muon is
registered in that place. Experts are the last two layers, in buffers and over a group of their own; they have no biases, for which
Megatron has no optimizer beside Muon.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import zerocast
from tests.megatron import checkpoints, te, training
from tests.megatron.host_on_cpu import WHY_NOT
from tests.megatron.ranks_host import device
from tests.megatron.training import FORMATS, Case, Run
from tests.workers import error_of
from zerocast.distributed.group import Group
from zerocast.integrations import megatron as integration
from zerocast.integrations.megatron import layout
from zerocast.integrations.megatron.host import distributed_optimizers
from zerocast.integrations.megatron.offload import HostMaster
from zerocast.integrations.megatron.ownership import shares

WHY_NO_MUON = WHY_NOT
if not WHY_NO_MUON:
    import megatron.core.optimizer as factories
    from megatron.core import parallel_state

    try:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
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
    """Inside `host` and `quantized_params`. Experts have `biases` to be refused."""
    chunk = build_chunk(case, biases=biases)
    return Run(chunk, build_optimizer(case, [chunk]), case)


def build_optimizer(case: Case, chunks: list[Any]) -> Any:
    return training.build_optimizer(Case(overlap=case.overlap, options=SETTINGS | case.options), chunks)


def build_chunk(case: Case, seed: int = 7, biases: bool = False) -> Any:
    """A quantized model in its DistributedDataParallel, with the layout of whole matrices."""
    config, model, recipe = training.configuration(), _model(case, seed, biases), zerocast.Recipe(FORMATS[case.formats])
    model.to(device())
    ours = te.use_te_tensors(model, recipe, device()) if case.te else recipe
    for param in model.layers[2:].parameters() if case.experts else ():
        param.allreduce = False
    if ours is not None:
        zerocast.quantize_(model, ours)
    options = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": case.overlap,
        "overlap_param_gather": case.overlap,
        "pad_buckets_for_high_nccl_busbw": case.busbw,
        "bucket_size": case.bucket_size,
        "grad_reduce_in_fp32": True,
        **case.ddp_options,
    }
    ddp_config = DistributedDataParallelConfig(**options)
    return DistributedDataParallel(config, ddp_config, model, full_param_layout=full_layout(model, ddp_config))


def _model(case: Case, seed: int = 7, biases: bool = False) -> Any:
    torch.manual_seed(seed)
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


def train(case: Case) -> tuple[list[float], dict[str, int], bool]:
    """Losses by step, the stale bytes in the end, and whether `zerocast.verify` agrees."""
    with host(case):
        run, attachment = build_attached(case)
        assert len(attachment.plans) == 2 + case.experts
        losses, wrong = training.trained(run)
        return losses, wrong, zerocast.verify(attachment).ok


def offloaded(case: Case) -> tuple[list[str], dict[str, int], bool]:
    """Under optimizer CPU offload: parameters with masters in host memory, stale bytes after steps with a detached moment between
    them, and whether `zerocast.verify` agrees.
    """
    with host(case):
        run, attachment = build_attached(case)
        names = {id(param): name for name, param in run.ddp.module.named_parameters()}
        owned = [
            one for part in distributed_optimizers(run.optimizer) for share in shares(part) for one in share.masters()
        ]
        hosted = [names[id(param)] for param, master, *_ in owned if isinstance(master, HostMaster)]
        wrong = training.trained(run)[1]
        attachment.detach()
        attachment = integration.attach(run.optimizer, run.ddp)
        return hosted, wrong | training.trained(run)[1], zerocast.verify(attachment).ok


def reduced(case: Case) -> list[tuple[int, bool]]:
    """(ranks of the group, whether it is the default group) of each all-reduce of a step's casts."""
    with host(case):
        run, _ = build_attached(case)
        run.step(0)
        groups: list[Any] = []
        reduce = Group.all_reduce_max

        def record(self: Group, *args: Any) -> Any:
            groups.append(self)
            return reduce(self, *args)

        with mock.patch.object(Group, "all_reduce_max", record):
            run.step(1)
        return [(group.size, group.handle is parallel_state.get_expert_data_parallel_group()) for group in groups]


def train_chunks(case: Case) -> list[dict[str, int]]:
    """Of two model chunks under one optimizer, after steps and then with masters of a state dict: the stale bytes of each."""
    with host(case):
        with integration.quantized_params():
            chunks = [build_chunk(case, seed) for seed in (1, 2)]
            optimizer = build_optimizer(case, chunks)
        attachment = integration.attach(optimizer, chunks)
        runs, found = [Run(chunk, optimizer, case) for chunk in chunks], []
        for number in range(case.steps):
            for run in runs:
                run.forward_and_backward(number)
            optimizer.step()
        for run in runs:
            run.force_sync()
            found.append(run.stale_bytes())
        assert zerocast.verify(attachment).ok
        values = [_filled(run, 0.25 + number) for number, run in enumerate(runs)]
        optimizer.reload_model_params(state_dict={f"model{number}": held for number, held in enumerate(values)})
        for number, run in enumerate(runs):
            assert all(bool((master == 0.25 + number).all()) for master in run.masters().values())
            found.append(run.stale_bytes())
        return found


def train_in_megatrons_groups(case: Case) -> dict[str, int]:
    """The stale bytes where buckets of both optimizers are gathered together, as Megatron alone does it."""
    with host(case), mock.patch.object(layout, "of_one_owner", lambda partition: partition):
        run, _ = build_attached(case)
        return training.trained(run)[1]


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


def begins_with(case: Case) -> bool:
    """Whether masters are the values before quantization, which one after it would not be."""
    with host(case):
        plain = _model(case)
        run, _ = build_attached(case)
        masters = run.masters()
        assert not any(tensor.get_high_precision_init_val() is not None for tensor in run.te_tensors.values())
        return all(torch.equal(param.float(), masters[name]) for name, param in plain.named_parameters())


def detach_and_attach(case: Case) -> tuple[str, str, bool, dict[str, int]]:
    """What a step and a load say before `attach` and after `detach`; whether going on is the run without a break."""
    with host(case):
        straight, _ = build_attached(case)
        with integration.quantized_params():
            run = build(case)
        before = error_of(lambda: run.step(0))
        run.ddp.zero_grad_buffer()
        attachment = integration.attach(run.optimizer, run.ddp)
        run.step(0)
        attachment.detach()
        matrices = run.optimizer.chained_optimizers[0]
        after = error_of(lambda: matrices.load_state_dict(matrices.state_dict()))
        again = integration.attach(run.optimizer, run.ddp)
        run.step(1)
        again.refresh()
        straight.step(0)
        straight.step(1)
        run.force_sync()
        straight.force_sync()
        theirs, ours = straight.masters(), run.masters()
        return before, after, all(torch.equal(theirs[name], ours[name]) for name in theirs), run.stale_bytes()


def _twice(case: Case) -> None:
    run, _ = build_attached(case)
    integration.attach(run.optimizer, run.ddp)


def _not_laid_out(case: Case) -> None:
    with integration.quantized_params():
        build_optimizer(case, [training.build_chunk(case)])


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


MISTAKES: dict[str, Callable[[Case], None]] = {
    "twice": _twice,
    "not laid out": _not_laid_out,
    "experts with biases": _with_biases,
    "experts that are quantized too late": _outside,
    "other recipes": _other_recipes("half", "other half"),
    "experts of other recipes": _other_recipes("mixed", "narrow experts"),
}


def say(name: str) -> str:
    """The message of a mistake."""
    case = Case("fp8_current", experts="expert" in name)
    with host(case):
        return error_of(lambda: MISTAKES[name](case))


def _raise(*_: Any, **__: Any) -> None:
    raise MemoryError("in the test")


def broken_step(case: Case) -> tuple[str, list[str]]:
    """What is said of a step that broke off in Muon; what a step, a forward pass, a save and `verify` say then."""
    with host(case):
        run, attachment = build_attached(case)
        run.step(0)
        held = copy.deepcopy(run.optimizer.state_dict()[0])
        matrices = run.optimizer.chained_optimizers[0]
        with mock.patch.object(matrices.optimizer, "step", _raise):
            broke = error_of(lambda: run.step(1))
        said = [
            error_of(run.optimizer.step),
            error_of(lambda: run.forward(0)),
            error_of(run.optimizer.state_dict),
            error_of(lambda: matrices.save_state_dict_to_file("never written")),
            error_of(lambda: zerocast.verify(attachment)),
        ]
        alone = error_of(lambda: matrices.load_state_dict(held))  # Adam's part stays as the step left it
        return broke, [*said, alone]


def broken_refresh(case: Case) -> tuple[str, str, dict[str, int]]:
    """Of masters written by hand, where the all-reduce of experts fails after that of dense layers: the error; what a forward pass
    says; stale bytes after another refresh.
    """
    with host(case):
        run, attachment = build_attached(case)
        run.step(0)
        for one in distributed_optimizers(run.optimizer):
            for share in shares(one):
                for _, master, *_ in share.masters():
                    master.mul_(1.5)
        reduce, experts = Group.all_reduce_max, parallel_state.get_expert_data_parallel_group()

        def fail(self: Group, *args: Any) -> Any:
            return _raise() if self.handle is experts else reduce(self, *args)

        with mock.patch.object(Group, "all_reduce_max", fail):
            broke = error_of(attachment.refresh)
        said = error_of(lambda: run.forward(0))
        attachment.refresh()
        return broke, said, run.stale_bytes()


def wrong_bytes(case: Case) -> list[tuple[str, list[str]]]:
    """What `zerocast.verify` names where one byte of each weight in turn is wrong on the last rank."""
    with host(case):
        (run, attachment), found = build_attached(case), []
        run.step(0)
        for name, weight in run.weights.items():
            data = weight.rowwise_data.view(-1)
            if dist.get_rank() == dist.get_world_size() - 1:
                data[5] ^= 1
            found.append((name, sorted({one.name for one in zerocast.verify(attachment).differences})))
            attachment.refresh()
        assert zerocast.verify(attachment).ok
        return found


def finetuned(case: Case) -> list[dict[str, int]]:
    """Masters from values that are loaded into the model, and from a state dict without their rounding: stale bytes."""
    with host(case):
        (run, _), found = build_attached(case), []
        run.ddp.module.load_state_dict(_filled(run, 0.25), strict=False)
        run.optimizer.reload_model_params()
        assert all(bool((master == 0.25).all()) for master in run.masters().values())
        found.append(run.stale_bytes())
        run.optimizer.reload_model_params(state_dict={"model": _filled(run, 0.3, torch.float32)})
        assert all(bool((master == torch.tensor(0.3)).all()) for master in run.masters().values())
        return [*found, run.stale_bytes()]


def _filled(run: Run, value: float, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: torch.full(p.shape, value, dtype=dtype) for name, p in run.ddp.module.named_parameters()}


def resume(case: Case, kind: str) -> tuple[dict[str, bool], dict[str, int]]:
    """As `checkpoints.resume`, of this host."""
    with muon_in_the_host(), mock.patch.object(checkpoints, "build_attached", build_attached):
        return checkpoints.resume(case, kind)


def saved(case: Case, folder: str, kind: str) -> dict[str, torch.Tensor]:
    with host(case):
        run, _ = build_attached(case)
        for number in range(case.steps):
            run.step(number)
        checkpoints.save(run, folder, kind)
        return run.masters()


def loaded(case: Case, folder: str, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Masters after a load, and stale bytes then and after two more steps."""
    with host(case):
        run, _ = build_attached(case)
        checkpoints.load(run, folder, kind)
        masters, wrong = run.masters(), run.stale_bytes()
        for number in range(2):
            run.step(number)
        run.force_sync()
        return masters, wrong | run.stale_bytes()


def from_a_file(case: Case, folder: str) -> dict[str, int]:
    """The stale bytes after each rank has loaded what it had saved to a file of its own."""
    with host(case):
        run, _ = build_attached(case)
        run.step(0)
        matrices, path = run.optimizer.chained_optimizers[0], f"{folder}/{dist.get_rank()}.pt"
        matrices.save_state_dict_to_file(path)
        before = run.masters()
        run.step(1)
        with mock.patch.object(torch, "load", functools.partial(torch.load, weights_only=False)):
            matrices.load_state_dict_from_file(path)
        after = run.masters()
        assert all(torch.equal(before[name], after[name]) for name in run.weights)
        return {name: count for name, count in run.stale_bytes().items() if "weight" in name}
