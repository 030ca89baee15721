"""Settings that `attach` and the construction of a model do not support, and why.

Under these settings Megatron casts, stores or gathers quantized weights in a way that would write
over zerocast's bytes, or not send them.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from zerocast import QuantizedWeight

from . import host, unattached
from .primary import castable_view, errors_of, is_of_te, is_primary, is_te_tensor

SHARDED_OTHERWISE = "Megatron-FSDP and torch's FSDP2 shard parameters their own way: use zerocast.fsdp2"
# The attribute that OptimizerConfig derives from use_precision_aware_optimizer and further
# settings.
MASTERS_ARE_STATES = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
_WHOLE_MASTERS = (
    "use_distributed_optimizer=False is not supported: quantized weights are in the byte buffers of the distributed optimizer; set "
    "it in DistributedDataParallelConfig and in OptimizerConfig"
)


class Setting(NamedTuple):
    """A setting of the host, and a predicate of its unsupported values: by default truthy ones."""

    name: str
    reason: str
    refuses: Callable[[Any], bool] = bool


SETTINGS = (
    Setting("use_megatron_fsdp", SHARDED_OTHERWISE),
    Setting(
        "main_params_dtype",
        "a cast is of FP32 masters: leave it at torch.float32; exp_avg_dtype and exp_avg_sq_dtype may be narrower",
        lambda dtype: dtype not in (None, torch.float32),
    ),
    Setting(
        "reuse_grad_buf_for_mxfp8_param_ag",
        "it gathers bf16 masters through the gradient buffer, for mxfp8, which needs two bytes per element: leave it out, and use "
        "mxfp8:block=32x32, or in layers of TransformerEngine square_mxfp8()",
    ),
)
# Options of megatron.training that `install` does not support, besides the settings above.
OPTIONS = (
    Setting("use_torch_fsdp2", SHARDED_OTHERWISE),
    Setting(
        "moe_use_upcycling",
        "it builds a second model, and copies that: upcycle in a run without zerocast, then train from its checkpoint",
    ),
)


def validate(optimizer: Any, distributed: Sequence[Any], chunks: Sequence[Any], verify_every: int | None) -> None:
    """Run all checks of `attach` that need no collective, before anything is read or changed.
    `distributed` are the optimizers inside `optimizer` that own masters.

    Raises ValueError for settings that are not supported, RuntimeError for a second attachment.
    """
    check_verify_every(verify_every)
    check_owns_parts(optimizer)
    for chunk in chunks:
        _check_experts(chunk)
        check_layers(chunk, {name for name, param in chunk.named_parameters() if isinstance(param, QuantizedWeight)})
    for inner in distributed:
        check_settings([getattr(inner, name, None) for name in ("ddp_config", "config")])
    for inner in distributed:
        check_masters(inner)
    # The optimizers of a chain share a configuration. In a chain with Muon it says Muon, though the
    # plain parameters are updated by Adam.
    if not any(map(host.is_layer_wise, distributed)):
        for inner in distributed:
            check_adam(inner.config)
    _check_first([optimizer, *distributed], host.bucket_groups(chunks))


def check_verify_every(steps: int | None) -> None:
    """Raise ValueError for a number of steps below one."""
    if steps is not None and steps < 1:
        raise ValueError(f"verify_every is None or at least 1, got {steps}")


def check_owns_parts(optimizer: Any) -> None:
    """Raise ValueError for an optimizer, or one in a chain, whose ranks own whole layers and do not
    send them in parts of buckets.
    """
    if host.is_layer_wise(optimizer):
        check_whole_matrices(optimizer.model_chunks)
        return
    if any("LayerWise" in kind.__name__ for kind in type(optimizer).__mro__):
        raise ValueError(
            f"{type(optimizer).__name__} is not supported: its ranks own whole layers, and of those optimizers only the "
            "LayerWiseDistributedOptimizer of megatron-core 0.19 is known; or use optimizer='adam', or Muon as zerocast.ZeroMuon"
        )
    for inner in getattr(optimizer, "chained_optimizers", []):
        check_owns_parts(inner)


def check_settings(settings: Sequence[Any]) -> None:
    """Raise ValueError with the reason where a configuration of the host has an unsupported
    setting.
    """
    for name, reason, refuses in SETTINGS:
        if any(refuses(getattr(config, name, None)) for config in settings):
            raise ValueError(f"{name} is not supported: {reason}")


def masters_are_states(config: Any) -> bool:
    """Return True if optimizers of this configuration keep masters in the state of a fused Adam."""
    return bool(getattr(config, MASTERS_ARE_STATES, False))


def check_masters(optimizer: Any) -> None:
    """Raise ValueError for an optimizer whose masters are a state of its fused Adam."""
    if masters_are_states(optimizer.config):
        raise ValueError(
            "use_precision_aware_optimizer keeps the masters of an optimizer that is built outside quantized_params() in the state "
            "of its fused Adam, where no cast reads them: build the optimizer inside quantized_params()"
        )


def check_adam(config: Any) -> None:
    """Raise ValueError for a configuration of an optimizer other than Adam."""
    if config.optimizer != "adam":
        raise ValueError(
            f"optimizer={config.optimizer!r} is not supported: Megatron's DistributedOptimizer saves the state of Adam only. "
            "With SGD it fails an assertion, under optimizer_cpu_offload only at the first checkpoint: use optimizer='adam'"
        )


def check_options(options: Any) -> None:
    """Raise ValueError for arguments of megatron.training with which `install` cannot train."""
    check_settings([options])
    for name, reason, refuses in OPTIONS:
        if refuses(getattr(options, name, None)):
            raise ValueError(f"--{name.replace('_', '-')} is not supported: {reason}")
    if options.optimizer in ("adam", "sgd"):
        check_adam(options)
        check_distributed(options)
    else:
        check_layer_wise(options)
        check_layout_is_known(options)
    formats = [getattr(options, name, None) for name in ("ckpt_format", "ckpt_convert_format")]
    if any(fmt not in (None, "torch_dist") for fmt in formats):
        raise ValueError(
            f"--ckpt-format {formats[0]}, --ckpt-convert-format {formats[1]}: quantized weights are saved as torch_dist only"
        )


def check_layers(chunk: Any, weights: Container[str]) -> None:
    """Raise ValueError if one of `weights` is the table of Megatron's embedding, or belongs to a
    layer of TransformerEngine.
    """
    # Its table is split over tensor-parallel ranks.
    embedding = host.module(host.LAYERS).VocabParallelEmbedding
    for name, module in chunk.named_modules():
        if isinstance(module, embedding) and f"{name}.weight" in weights:
            raise ValueError(
                f"{name}.weight is the table of an embedding and is not quantized: match it with 'identity'"
            )
        for weight, _ in module.named_parameters(name, recurse=False) if is_of_te(module) else ():
            if weight in weights:
                raise ValueError(
                    f"{weight} is a weight of TransformerEngine's {type(module).__name__}, which multiplies by its own tensors: "
                    "use --transformer-impl local, or --fp8-param-gather and no format for it in the recipe"
                )


def check_grouped(module: Any) -> None:
    """Raise ValueError for a weight of TransformerEngine that holds several experts."""
    # Since 0.19.
    holds_several = getattr(host.module(host.FP8), "is_grouped_tensor_with_quantized_storage", lambda _: False)
    for name, param in module.named_parameters():
        if holds_several(param):
            raise ValueError(
                f"{name} is a {type(param).__name__} with the codes of several experts, and their copies by columns in one buffer: "
                "set moe_single_grouped_weight=False, so that each expert has its own weight"
            )


def check_te_tensors(named: Iterable[tuple[str, Any]]) -> None:
    """Raise TypeError or ValueError for a tensor of TransformerEngine among named parameters that a
    byte buffer cannot hold.
    """
    for name, param in named:
        if is_te_tensor(param):
            with errors_of(name):
                castable_view(param)


def check_distributed(config: Any) -> None:
    """Raise ValueError for a configuration without the distributed optimizer."""
    if not config.use_distributed_optimizer:
        raise ValueError(_WHOLE_MASTERS)


def check_kind(optimizer: Any) -> None:
    """Raise ValueError for an optimizer over quantized weights that keeps no shards of masters."""
    if not isinstance(optimizer, host.module(host.OPTIMIZER).DistributedOptimizer):
        raise ValueError(f"{type(optimizer).__name__}: {_WHOLE_MASTERS}")


def is_by_layer(config: Any) -> bool:
    """Return True for a configuration, or arguments, of an optimizer whose ranks own whole
    matrices.
    """
    return bool(getattr(config, "use_layer_wise_distributed_optimizer", False))


def check_layer_wise(config: Any) -> None:
    """Raise ValueError for a configuration of an optimizer other than Adam whose masters are
    unsharded.
    """
    if not is_by_layer(config) and not config.optimizer.startswith("dist_"):
        raise ValueError(
            f"optimizer={config.optimizer!r} is not supported without use_layer_wise_distributed_optimizer=True, by which a rank "
            "owns whole matrices: every rank would hold all masters. In pretrain() that is --use-distributed-optimizer; or use "
            "optimizer='adam', or zerocast.ZeroMuon"
        )
    scalar = getattr(config, "muon_scalar_optimizer", "adam")
    if scalar != "adam":
        raise ValueError(
            f"muon_scalar_optimizer={scalar!r} is not supported: use 'adam' for the parameters that Muon leaves"
        )


def check_layout_is_known(options: Any) -> None:
    """Raise ValueError if megatron.training's layout would divide a matrix between two ranks."""
    has_layout = any(
        hasattr(host.module(kind.__module__), "tag_params_for_buffer_routing") for kind in host.layer_wise()
    )
    if not has_layout:
        raise ValueError(
            f"--optimizer {options.optimizer} is not supported: this megatron-core has no layout in which a matrix is in the "
            "part of one rank; 0.19 does; or use optimizer='adam', or zerocast.ZeroMuon"
        )
    if not getattr(options, "use_layer_wise_param_layout", True):
        raise ValueError(
            "--no-use-layer-wise-param-layout is not supported: it gathers values of matrices, not bytes: leave it out"
        )


def check_whole_matrices(chunks: Sequence[Any]) -> None:
    """Raise ValueError unless the layout puts each quantized weight into the part of one rank."""
    for name, param in (item for chunk in chunks for item in chunk.named_parameters() if item[1].requires_grad):
        if is_primary(param) and not hasattr(param, host.MANAGED):
            raise ValueError(
                f"{name} is in no bucket of whole matrices: before DistributedDataParallel is built call "
                "tag_params_for_buffer_routing([model]), and pass it the full_param_layout of "
                "LayerWiseDistributedOptimizer.compute_full_param_layout (use_layer_wise_param_layout of megatron.training); or "
                "use optimizer='adam'"
            )
        is_of_an_expert = not getattr(param, "allreduce", True)
        if is_of_an_expert and not host.is_managed_by_layer(param):
            raise ValueError(
                f"{name} of an expert is not a matrix, and Megatron has no Adam for experts under a "
                "LayerWiseDistributedOptimizer: set add_bias_linear=False, or use optimizer='adam'"
            )


def has_stepped(optimizer: Any) -> bool:
    """Return True if the inner optimizer holds any state yet."""
    inner = optimizer.optimizer
    return any(inner.state.values()) or any(group.get("step", 0) for group in inner.param_groups)


def _check_experts(chunk: Any) -> None:
    """Raise ValueError for a module with all of its experts in one quantized weight.

    GroupedMLP of older releases is such a module.
    """
    for name, module in chunk.named_modules():
        params = module.named_parameters(recurse=False) if hasattr(module, "num_local_experts") else ()
        for weight, param in params:
            if isinstance(param, QuantizedWeight):
                raise ValueError(
                    f"{name}.{weight} holds {module.num_local_experts} experts side by side, and a {type(module).__name__} "
                    "splits it into experts, across which blocks would extend: set moe_grouped_gemm=False, so each has its own "
                    "weights, or leave it out of the recipe"
                )


def _check_first(optimizers: Sequence[Any], groups: Sequence[Any]) -> None:
    """Raise RuntimeError if another attachment has replaced methods of an optimizer or a bucket
    group.
    """
    attached = [
        optimizer
        for optimizer in optimizers
        if "step_with_ready_grads" in vars(optimizer) and not unattached.is_refused(optimizer)
    ]
    attached += [group for group in groups if "start_param_sync" in vars(group)]
    if attached:
        raise RuntimeError(f"a {type(attached[0]).__name__} is attached already: detach() first")
