"""Where a pool's ranks run the host: on the CPU over gloo, by stand-ins, or each on a GPU over NCCL, as it is; and there
TransformerEngine's tensors as the weights of a small model.

Megatron imports TransformerEngine where it is installed, and keeps its classes and calls in globals of its modules. On a CPU, where
its compiled extension is missing, `te_in_the_host()` fills those globals; and products are torch's, of the dequantized directions.
"""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import casts
from tests.casts import Weight
from tests.megatron.host_on_cpu import WHY_NOT, host_memory, host_on_cpu
from tests.transformer_engine import tensors
from tests.transformer_engine.host_on_cpu import WITH_GPU
from tests.transformer_engine.host_on_cpu import host_on_cpu as te_on_cpu
from zerocast import QuantizedWeight, Recipe, get_format
from zerocast.integrations.megatron import host as megatron_names
from zerocast.integrations.megatron.primary import weight_of


@contextlib.contextmanager
def te_in_the_host() -> Iterator[None]:
    """While the context is open, megatron-core has found TransformerEngine."""
    if WITH_GPU:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(te_on_cpu())
        their, calls = tensors.host_tensors(), importlib.import_module("transformer_engine.pytorch.tensor.utils")
        found: dict[str, dict[str, Any]] = {
            megatron_names.FP8: {
                "FP8_TENSOR_CLASS": their.QuantizedTensor,
                "HAVE_TE_FP8_TENSOR_CLASS": True,
                "MXFP8Tensor": their.MXFP8Tensor,
                "HAVE_TE_MXFP8TENSOR": True,
                "GroupedTensor": importlib.import_module(
                    "transformer_engine.pytorch.tensor.grouped_tensor"
                ).GroupedTensor,
                "HAVE_TE_GROUPED_TENSOR_CLASS": True,
                "_modify_underlying_storage_impl": calls.replace_raw_data,
                "te_post_all_gather_processing": calls.post_all_gather_processing,
            },
            megatron_names.FP4: {"FP4_TENSOR_CLASS": their.NVFP4Tensor, "HAVE_TE_FP4_TENSOR_CLASS": True},
        }
        for path, names in found.items():
            for name, value in names.items():
                stack.enter_context(mock.patch.object(importlib.import_module(path), name, value, create=True))
        yield


class TELinear(nn.Module):
    """A linear layer of the host's shape: its forward pass reads rowwise codes, its backward pass columnwise ones."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((0.1 * torch.randn(outputs, inputs)).bfloat16())
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        y: Tensor = _TEProduct.apply(x, self.weight)
        return y if self.bias is None else y + self.bias, None


class _TEProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ te_values(weight, columnwise=False).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (x,), (dy,) = ctx.saved_tensors, grads
        return dy @ te_values(ctx.weight, columnwise=True), dy.flatten(0, -2).t() @ x.flatten(0, -2)


def te_values(weight: Any, columnwise: bool) -> Tensor:
    """What a direction of a tensor holds."""
    if type(weight).__name__ == "MXFP8Tensor":
        return tensors.dequantized(weight, columnwise).to(weight.dtype)
    held = tensors.buffers(weight)
    return QuantizedWeight.of_buffers(weight.shape, te_format_of(weight), weight.dtype, held).read(
        columnwise, weight.dtype
    )


def te_bytes_of(weight: Any) -> tuple[str, casts.Bytes]:
    """The format of a tensor and its bytes, columnwise copy included, but for the amax that delayed scaling moves on."""
    found = tensors.bytes_of(weight)
    assert {"rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"} <= found.keys()
    if te_format_of(weight).name == "fp8_delayed":
        del found["amax"]
    return str(te_format_of(weight)), found


def te_format_of(weight: Any) -> Any:
    """The format of a tensor, as it was made here or as zerocast reads it."""
    made = getattr(weight, "zerocast_format", None)
    return get_format(made) if made else weight_of(weight).format


def use_te_tensors(model: nn.Module, recipe: Recipe, device: torch.device) -> Recipe | None:
    """Replace the weights of TELinears by tensors of TransformerEngine; the part of the recipe that is of other layers."""
    theirs = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, TELinear)}
    for name, module in theirs.items():
        module.weight = te_parameter(str(recipe.format_of(name)), module.weight.detach(), device)
    names = {name for name, param in model.named_parameters() if param.dim() >= 2} - {*theirs}
    formats = {name: recipe.format_of(name) for name in names}
    return Recipe({name: str(fmt) for name, fmt in formats.items() if fmt.element is not None}) if names else None


def te_parameter(fmt: str, value: Tensor, device: torch.device) -> nn.Parameter:
    """Make a parameter as TransformerEngine does, which quantizes by its compiled extension."""
    case = Weight("fp8_delayed" if "delayed" in fmt else fmt, tuple(value.shape), ((0, value.numel()),), value.dtype)
    made: Any = tensors.tensor(case, str(device), columnwise=True)
    cast = tensors.with_shared_codes(case.fmt, casts.unsharded(case.fmt, value.cpu().float(), value.dtype))
    held = tensors.buffers(made)
    if get_format(case.fmt).name == "fp8_delayed":
        del held["amax"]  # of casts by its quantizer, which there were none of
    for name, buffer in held.items():
        content = torch.from_numpy(cast[name]).view(buffer.dtype).view(buffer.shape)
        buffer.copy_(content)
    param: Any = nn.Parameter(made)
    param.zerocast_format = case.fmt
    param._high_precision_init_val = value.to(torch.device("cpu"), copy=True)
    param.get_high_precision_init_val = MethodType(lambda self: vars(self).get("_high_precision_init_val"), param)
    param.clear_high_precision_init_val = MethodType(
        lambda self: vars(self).pop("_high_precision_init_val", None), param
    )
    return param


def move_te_scales(weights: dict[str, Any]) -> dict[str, float]:
    """What delayed scaling does between forward passes, with a history of one; by name, the scales before."""
    before = {}
    for name, weight in weights.items():
        quantizer = weight._quantizer
        if te_format_of(weight).name == "fp8_delayed":
            before[name] = float(quantizer.scale)
            quantizer.scale.copy_(torch.where(quantizer.amax > 0, 448 / quantizer.amax, quantizer.scale))
            quantizer.amax.zero_()
    return before


if not WHY_NOT:
    import megatron.core.optimizer as factories
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.optimizer import distrib_optimizer, optimizer_config


def _adam(
    chunk: int,
    noop: Tensor,
    tensors: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    correction: int,
    weight_decay: float,
) -> None:
    """Adam with decoupled weight decay, in FP32, of lists of gradients, parameters and both moments."""
    assert decoupled and correction
    for grad, param, first, second in zip(*tensors, strict=True):
        g, m, v = grad.float(), first.float(), second.float()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps) + weight_decay * param
        param.sub_(lr * update)
        first.copy_(m)
        second.copy_(v)


@contextlib.contextmanager
def fused_adam_in_the_host() -> Iterator[None]:
    """Within `te_in_the_host()`, megatron-core has found TransformerEngine's FusedAdam: its Python, whose one kernel is `_adam`.

    With TransformerEngine installed on a GPU, Megatron takes it by itself.
    """
    compiled = importlib.import_module("transformer_engine_torch")
    found = importlib.import_module("transformer_engine.pytorch.optimizers").FusedAdam
    names: list[tuple[Any, dict[str, Any]]] = [
        (compiled, {"multi_tensor_adam": _adam}),
        (factories, {"Adam": found, "USING_PYTORCH_OPTIMIZER": False, "is_te_min_version": lambda *_: True}),
        (distrib_optimizer, {"Adam": found, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True}),
        (optimizer_config, {"is_te_min_version": lambda *_: True}),
    ]
    with contextlib.ExitStack() as stack:
        for module, values in names:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(module, name, value))
        yield


def device() -> torch.device:
    """Return the device of the tensors of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


@contextlib.contextmanager
def host(te: str = "", fused_adam: bool = False, offload: bool = False) -> Iterator[None]:
    """Inside, the real DistributedDataParallel and DistributedOptimizer run here, for `te` layers beside TransformerEngine, whose
    FusedAdam is taken then or by the host's own choice; for `offload` with host memory apart.
    """
    if dist.get_backend() == "gloo":
        with contextlib.ExitStack() as stack:
            if te or fused_adam:
                stack.enter_context(te_in_the_host())
            stack.enter_context(host_on_cpu())
            if fused_adam:
                stack.enter_context(fused_adam_in_the_host())
            if offload:
                stack.enter_context(host_memory())
            yield
        return
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield


@contextlib.contextmanager
def groups(seconds: float | None = None, **sizes: int) -> Iterator[None]:
    """The host's process groups made anew, of other sizes or with a timeout; afterwards there are none."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    timeout = {} if seconds is None else {"distributed_timeout_minutes": seconds / 60}
    parallel_state.initialize_model_parallel(**sizes, **timeout)
    if dist.get_backend() == "nccl":
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
