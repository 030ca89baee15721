"""Layouts of byte buffers in which a rank's elements are the bytes that it sends.

Megatron splits each bucket twice into equal parts: the elements of its gradients, which decides who
owns which elements, and its bytes, which decides who sends which bytes. The two agree if every byte
of a bucket holds the same number of elements, padding included. So a bucket of these layouts holds
either 4-bit weights or others, and a 4-bit bucket has exactly half as many bytes as elements.
Megatron's own layout pads elements and bytes separately, and mixes widths: a rank then writes bytes
that another rank sends, and they are lost on every rank.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zerocast.formats.layout import round_up
from zerocast.integrations import Patch

from . import host

# Parts of a 4-bit bucket end at multiples of this number of elements: 16 bytes, so that no block of
# 16 elements straddles two parts.
_ELEMENTS_PER_BLOCK = 32


def elements_per_byte(param: Any) -> int:
    """2 for a parameter that the host recognizes as an NVFP4 tensor, else 1."""
    fp4 = host.module(host.FP4)
    is_grouped = getattr(fp4, "is_grouped_nvfp4tensor", fp4.is_nvfp4tensor)  # since 0.19
    return 2 if fp4.is_nvfp4tensor(param) or is_grouped(param) else 1


def sort_by_width(groups: dict[Any, tuple[list[Any], list[int]]]) -> dict[Any, tuple[list[Any], list[int]]]:
    """Sort the parameters of each buffer, and their indices, by width: 8 bits first."""
    sorted_groups = {}
    for key, (params, indices) in groups.items():
        order = sorted(range(len(params)), key=lambda i: elements_per_byte(params[i]))
        sorted_groups[key] = [params[i] for i in order], [indices[i] for i in order]
    return sorted_groups


def lay_out_by_width(
    lay_out: Callable[..., Any],
    params: Sequence[Any],
    bucket_size: int | None,
    ranks: int,
    ddp_config: Any,
    param_indices: Sequence[int] | None = None,
) -> Any:
    """Return the PerBufferParamLayout of a buffer, whose buckets have one width each.

    The host's `lay_out` makes a layout of each run of parameters of one width. These layouts are
    then joined into one, and the buckets of 4-bit parameters padded to a multiple of 32 elements
    per rank. Without 4-bit parameters the layout is the host's, unchanged.
    """
    runs = [list(run) for _, run in itertools.groupby(params, elements_per_byte)]
    layouts = [(elements_per_byte(run[0]), lay_out(run, bucket_size, ranks, ddp_config, [])) for run in reversed(runs)]
    if all(width == 1 for width, _ in layouts):
        return lay_out(params, bucket_size, ranks, ddp_config, param_indices)
    unit = math.lcm(_ELEMENTS_PER_BLOCK * ranks, 2**16 if ddp_config.pad_buckets_for_high_nccl_busbw else 128)
    index_map: dict[Any, tuple[int, int, int]] = {}
    buckets: list[tuple[int, int]] = []
    unpadded: list[int] = []
    for width, layout in layouts:
        first_bucket, shifts = len(buckets), []
        for start, stop in layout.bucket_indices:
            begin = buckets[-1][1] if buckets else 0
            buckets.append((begin, begin + (round_up(stop - start, unit) if width == 2 else stop - start)))
            shifts.append(begin - start)
        for param, (start, stop, bucket) in layout.param_index_map.items():
            index_map[param] = start + shifts[bucket], stop + shifts[bucket], first_bucket + bucket
        unpadded += layout.per_bucket_numel_unpadded
    return dataclasses.replace(
        layouts[0][1],
        param_index_map=index_map,
        bucket_indices=buckets,
        per_bucket_numel_unpadded=unpadded,
        param_indices=[] if param_indices is None else param_indices,
    )


def whole_matrices(model_builders: Sequence[Any]) -> Iterator[Patch]:
    """Yield patches that give the models which megatron.training builds from a configuration a
    layout in which no matrix is split between ranks, as Muon needs.

    Megatron makes such a layout only for models that a script provides. For models from a
    configuration it computes the layout of a DistributedOptimizer, for any optimizer, and none
    under Muon.

    `model_builders` are the host's modules that build models. They are patched where they have the
    function `_ddp_wrap`, which wraps a model in DistributedDataParallel. Older releases lack it.
    """
    (kind,) = host.layer_wise()
    tag = host.module(kind.__module__).tag_params_for_buffer_routing
    for module in model_builders:
        if not hasattr(module, "_ddp_wrap"):
            continue
        wrap = module._ddp_wrap

        @functools.wraps(wrap)
        def call(
            chunks: Sequence[Any], random_init: Any, ddp_config: Any, *args: Any, wrap: Any = wrap, **kwargs: Any
        ) -> Any:
            ddp_config.use_distributed_optimizer = True
            tag(chunks)
            return wrap(chunks, random_init, ddp_config, *args, **kwargs)

        yield Patch(module, "_ddp_wrap", call)
        # This class makes the layout of the buffers.
        yield Patch(module, "DistributedOptimizer", kind)


def group_by_owner(partition: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that puts buckets into groups: a group has buckets of one optimizer only.

    Megatron puts all buckets of plain parameters into the group of the last byte bucket, even where
    ranks own whole matrices and another optimizer owns the plain parameters. Without overlap that
    group is gathered once, before the other optimizer has stepped: ranks would continue with stale
    plain parameters.
    """

    @functools.wraps(partition)
    def call(buffers: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        layer_wise = [buffer for buffer in buffers if host.is_layer_wise_buffer(buffer)]
        others = [buffer for buffer in buffers if not host.is_layer_wise_buffer(buffer)]
        return [group for some in (layer_wise, others) if some for group in partition(some, *args, **kwargs)]

    return call


def pack(buffer: Any, params_with_names: Sequence[tuple[Any, str]]) -> None:
    """Set the byte offsets of a buffer with 4-bit parameters.

    Within a bucket they are the element offsets divided by the elements per byte, 1 or 2.

    Raises ValueError for a bucket of two widths: its layout was not made inside
    `quantized_params()`.
    """
    members: dict[int, list[Any]] = {}
    for param, _ in reversed(params_with_names):
        members.setdefault(buffer.param_index_map[param][2], []).append(param)
    index_map: dict[Any, tuple[int, int, int]] = {}
    buckets: list[tuple[int, int]] = []
    unpadded = 0
    for bucket, (start, stop) in enumerate(buffer.bucket_indices):
        widths = {elements_per_byte(param) for param in members[bucket]}
        if len(widths) > 1:
            raise ValueError(
                f"bucket {bucket} holds 4-bit weights and others: compute its layout inside quantized_params()"
            )
        width, begin = widths.pop(), buckets[-1][1] if buckets else 0
        buckets.append((begin, begin + (stop - start) // width))
        for param in members[bucket]:
            first, last, _ = buffer.param_index_map[param]
            index_map[param] = begin + (first - start) // width, begin + (last - start) // width, bucket
        unpadded += max(index_map[param][1] for param in members[bucket]) - begin
    buffer.nvfp4_packed_param_index_map = index_map
    buffer.nvfp4_packed_bucket_indices = buckets
    buffer.nvfp4_packed_numel_unpadded = unpadded
