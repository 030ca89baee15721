"""A pytest plugin: a peer's tests on the CPU over gloo, as they are or with zerocast in them.

ZEROCAST_CHANGES names what is changed (`CHANGES`). Each result is appended to ZEROCAST_RESULTS at once, so that a process that dies
has told of every test before.
"""

import functools
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

# Ranks of a test that takes as many as there are devices.
RANKS = 2


class FakeStream:
    """The stream of a device that has none."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: None


def turn_to_cpu() -> None:
    """Let torch's distributed tests run on forked processes over gloo, as if each CPU rank were a device."""
    from torch.testing._internal import common_distributed, common_fsdp, common_utils

    common_fsdp.DEVICE_COUNT = RANKS
    torch.accelerator.device_count = lambda: RANKS
    # Cycles of a device that waits, which a CPU does not.
    common_utils.get_cycles_per_ms = lambda: 1.0
    common_distributed.skip_if_lt_x_gpu = lambda count, **kwargs: as_is

    replicated = nn.parallel.DistributedDataParallel.__init__

    @functools.wraps(replicated)
    def without_devices(self: Any, *args: Any, device_ids: Any = None, **kwargs: Any) -> None:
        replicated(self, *args, **kwargs)

    nn.parallel.DistributedDataParallel.__init__ = without_devices  # type: ignore[method-assign]

    def fork(self: Any) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    common_distributed.MultiProcessTestCase._spawn_processes = fork  # type: ignore[method-assign]


def as_is(function: Any) -> Any:
    return function


def stand_in_for_torch_npu() -> None:
    """Install modules by the names of torch_npu, whose tests are copies of torch's for another device."""
    from torch.testing._internal import common_fsdp, common_utils

    device: Any = types.SimpleNamespace(
        is_available=lambda: False,
        device_count=lambda: RANKS,
        set_device=lambda index: None,
        current_device=lambda: 0,
        current_stream=lambda: FakeStream(),
        Stream=lambda **kwargs: FakeStream(),
        manual_seed_all=torch.manual_seed,
        manual_seed=torch.manual_seed,
        synchronize=lambda: None,
        _sleep=lambda cycles: None,
    )
    torch.npu = device  # type: ignore[attr-defined]
    torch.Tensor.is_npu = False  # type: ignore[attr-defined]
    torch.Tensor.npu = lambda self, *args: self  # type: ignore[attr-defined]
    nn.Module.npu = lambda self, *args: self  # type: ignore[assignment]
    names: dict[str, dict[str, Any]] = {
        "torch_npu": {"npu": device},
        "torch_npu.testing": {},
        "torch_npu.testing.testcase": {
            "TestCase": common_utils.TestCase,
            "run_tests": common_utils.run_tests,
        },
        "torch_npu.testing.common_utils": {"SupportedDevices": lambda devices: as_is},
        "torch_npu.testing.common_distributed": {"skipIfUnsupportMultiNPU": lambda count: as_is},
        "torch_npu.testing._internal": {},
        "torch_npu.testing._internal.common_fsdp": {"FSDPNPUTest": common_fsdp.FSDPTest},
    }
    for name, content in names.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module


def prepare_before_fully_shard() -> None:
    """Let `fully_shard` prepare the matrices of linear layers that it is given, in FP32 as they are: the values of each test are
    those of plain torch, and gathers are ours.
    """
    from torch.distributed import fsdp
    from torch.distributed.tensor import DTensor

    import zerocast
    from zerocast.fsdp2.parameter import MasterParameter
    from zerocast.fsdp2.prepare import managers_of

    sharded = fsdp.fully_shard

    def is_taken(parameter: Any) -> bool:
        plain = not isinstance(parameter, (DTensor, MasterParameter)) and type(parameter) is nn.Parameter
        return plain and parameter.dim() == 2 and parameter.dtype == torch.float32 and parameter.numel() > 0

    def prepare(module: nn.Module, tied: set[int]) -> None:
        linear = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Linear)} - tied
        names = [name for name, p in module.named_parameters() if id(p) in linear and is_taken(p)]
        if names:
            zerocast.fsdp2.prepare(module, dict.fromkeys(names, "fp8_current"))
            for weight in managers_of(module)[0].weights:
                weight.format = zerocast.get_format("identity")

    @functools.wraps(sharded)
    def fully_shard(module: Any, **kwargs: Any) -> Any:
        modules = module if isinstance(module, list) else [module]
        layers = [layer for each in modules for layer in each.modules() if not isinstance(layer, nn.Linear)]
        # Weights that are the table of an embedding too are not products alone.
        tied = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
        for each in modules:
            prepare(each, tied)
        return sharded(module, **kwargs)

    fsdp.fully_shard = fully_shard
    fsdp._fully_shard.fully_shard = fully_shard


def named(params: Any) -> list[Any]:
    """Return parameters, or groups of them, with made-up names, which ZeroAdamW needs."""
    given = list(params)
    if given and isinstance(given[0], dict):
        return [
            {**group, "params": [(f"{index}.{name}", p) for name, p in named(parameters(group["params"]))]}
            for index, group in enumerate(given)
        ]
    # ZeroAdamW leaves out what needs no gradient, which some tests step all the same.
    return [p if isinstance(p, tuple) else (str(number), p.requires_grad_()) for number, p in enumerate(given)]


def parameters(given: Any) -> list[Any]:
    return [given] if isinstance(given, torch.Tensor) else list(given)


ADAMW = ("betas", "eps", "weight_decay")
MUON = ("momentum", "nesterov", "weight_decay")


def optimize_by(ours: Any, *replaced: str, name: Callable[[Any], Any] = as_is, taken: tuple[str, ...] = ADAMW) -> None:
    """Let each of these classes of torch.optim be a class of ours, with those options that it has."""

    def initialise(self: Any, params: Any, lr: Any = 1e-3, **options: Any) -> None:
        kept = {key: value for key, value in options.items() if key in taken}
        ours.__init__(self, name(params), lr=lr, **kept)

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        given = parameters(param_group["params"])
        if name is not as_is:
            number = len(self.param_groups)
            given = [p if isinstance(p, tuple) else (f"{number}.{index}", p) for index, p in enumerate(given)]
        (group,) = name([{**param_group, "params": given}])
        ours.add_param_group(self, group)

    for each in replaced:
        setattr(torch.optim, each, type(each, (ours,), {"__init__": initialise, "add_param_group": add_param_group}))


def zero_adamw() -> None:
    import zerocast

    optimize_by(zerocast.ZeroAdamW, "SGD", "Adam", "AdamW", name=named)


def with_rules(params: Any) -> list[Any]:
    """Return parameters in groups that say what updates them: Muon, if all of a group are matrices."""
    given = named(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [{**group, "use_muon": all(p.dim() in (2, 3) for _, p in group["params"])} for group in groups]


def zero_muon() -> None:
    import zerocast

    optimize_by(zerocast.ZeroMuon, "SGD", "Adam", "AdamW", name=with_rules, taken=MUON)


def fused_adamw() -> None:
    import zerocast

    # Its defaults are those of torch.optim.AdamW, which must be found before it is replaced.
    optimize_by(zerocast.fsdp2.FusedAdamW, "SGD", "Adam")


def average_prepared_models() -> None:
    """Let AveragedModel be given a model whose linear layers are prepared for FSDP2."""
    import zerocast

    averaged = torch.optim.swa_utils.AveragedModel.__init__

    @functools.wraps(averaged)
    def of_prepared(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        recipe = {
            f"{name}.weight": "fp8_current" for name, layer in model.named_modules() if isinstance(layer, nn.Linear)
        }
        averaged(self, zerocast.fsdp2.prepare(model, recipe) if recipe else model, *args, **kwargs)

    torch.optim.swa_utils.AveragedModel.__init__ = of_prepared  # type: ignore[method-assign]


def our_accelerator() -> None:
    import accelerate

    from zerocast.integrations.huggingface import Accelerator

    accelerate.Accelerator = accelerate.accelerator.Accelerator = Accelerator


def our_accelerator_with_zero_adamw() -> None:
    our_accelerator()
    zero_adamw()


def zero_strategy() -> None:
    """Let Lightning's models be quantized, and its Trainer use ZeroStrategy where no strategy is asked for."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    import zerocast
    from zerocast.integrations.lightning import ZeroStrategy

    zero_adamw()
    made, started = BoringModel.__init__, Trainer.__init__

    @functools.wraps(made)
    def quantized(self: Any) -> None:
        made(self)
        zerocast.quantize_(self, {"layer.weight": "fp8_current"})

    @functools.wraps(started)
    def with_strategy(self: Any, *args: Any, **options: Any) -> None:
        if options.get("strategy", "auto") == "auto" and options.get("accelerator", "auto") in ("auto", "cpu"):
            options |= {"strategy": ZeroStrategy(), "accelerator": "cpu", "devices": 1}
        started(self, *args, **options)

    BoringModel.__init__ = quantized
    Trainer.__init__ = with_strategy


CHANGES: dict[str, Callable[[], None]] = {
    "gloo": turn_to_cpu,
    "torch_npu": stand_in_for_torch_npu,
    "prepare": prepare_before_fully_shard,
    "zero_adamw": zero_adamw,
    "zero_muon": zero_muon,
    "fused_adamw": fused_adamw,
    "zero_strategy": zero_strategy,
    "averages": average_prepared_models,
    "accelerator": our_accelerator,
    "accelerator_zero_adamw": our_accelerator_with_zero_adamw,
}

for change in os.environ["ZEROCAST_CHANGES"].split():
    CHANGES[change]()


def pytest_runtest_teardown() -> None:
    """Put a setting of torch back. A test whose ranks are threads restores it once a thread, each to what it had found, which is
    for some what another thread had set. Then no later test could load a model under DistributedDataParallel.
    """
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Append the outcome of a test, once it is over or has failed before it began."""
    report = yield
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        said = str(call.excinfo.value)[-2000:] if call.excinfo else ""
        with open(os.environ["ZEROCAST_RESULTS"], "a") as results:
            results.write(json.dumps({"test": item.nodeid, "outcome": report.outcome, "said": said}) + "\n")
    return report
