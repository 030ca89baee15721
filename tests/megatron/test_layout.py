"""For any number of ranks, the elements that a rank owns of a bucket and the bytes that it sends are the same part of it."""

from types import SimpleNamespace

import pytest

from tests.megatron.host_on_cpu import KNOWS_FOUR_BITS, needs_four_bits, needs_megatron
from zerocast import QuantizedWeight
from zerocast.formats.layout import Span, byte_range
from zerocast.integrations.megatron import layout, quantized_params

if KNOWS_FOUR_BITS:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

pytestmark = [needs_megatron, needs_four_bits]
ONE_WIDTH = [((208, 64), "nvfp4"), ((64, 16), "nvfp4"), ((48, 176), "nvfp4"), ((96, 240), "nvfp4")]
TWO_WIDTHS = [*ONE_WIDTH, ((80, 48), "fp8_block"), ((16, 16), "nvfp4"), ((112, 16), "fp8_current"), ((32, 80), "nvfp4")]


@pytest.mark.parametrize("kinds", [ONE_WIDTH, TWO_WIDTHS], ids=["one width", "two widths"])
@pytest.mark.parametrize("busbw", [False, True])
@pytest.mark.parametrize("bucket_size", [None, 10_000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 7, 8, 12, 64, 128, 256, 384])
def test_what_a_rank_owns_is_what_it_sends(
    ranks: int, bucket_size: int | None, busbw: bool, kinds: list[tuple[tuple[int, int], str]]
) -> None:
    weights = [QuantizedWeight.empty(shape, fmt).requires_grad_() for shape, fmt in kinds]
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, pad_buckets_for_high_nccl_busbw=busbw)
    with quantized_params():
        ((params, indices),) = layout.sort_by_width(group_params_for_buffers(weights, True)).values()
        found = DistributedOptimizer._compute_per_buffer_param_layout(params, bucket_size, ranks, config, indices)
        buffer = SimpleNamespace(param_index_map=found.param_index_map, bucket_indices=found.bucket_indices)
        layout.pack(buffer, [(param, "") for param in params])
    covered = dict.fromkeys(map(id, weights), 0)
    for weight in weights:
        start, stop, bucket = found.param_index_map[weight]
        first_byte, last_byte, packed_bucket = buffer.nvfp4_packed_param_index_map[weight]
        assert packed_bucket == bucket and last_byte - first_byte == weight.rowwise_data.numel()
        assert first_byte % 16 == 0
        (begin, end), (first, last) = found.bucket_indices[bucket], buffer.nvfp4_packed_bucket_indices[bucket]
        assert (end - begin) % ranks == 0 and (last - first) % ranks == 0
        owned, sent = (end - begin) // ranks, (last - first) // ranks
        for rank in range(ranks):
            mine = Span(start, stop).intersect(Span(begin + rank * owned, begin + (rank + 1) * owned))
            if mine.numel:
                span = Span(mine.start - start, mine.stop - start)
                low, high = byte_range(weight.format, weight.shape, span, weight.dtype)
                assert first + rank * sent <= first_byte + low and first_byte + high <= first + (rank + 1) * sent
                covered[id(weight)] += span.numel
    assert covered == {id(weight): weight.numel() for weight in weights}


def test_a_bucket_of_two_widths_is_refused() -> None:
    weights = [QuantizedWeight.empty((16, 16), fmt).requires_grad_() for fmt in ("nvfp4", "fp8_current")]
    places = {weight: (256 * i, 256 * (i + 1), 0) for i, weight in enumerate(weights)}
    buffer = SimpleNamespace(param_index_map=places, bucket_indices=[(0, 512)])
    with quantized_params(), pytest.raises(ValueError, match=r"bucket 0 holds 4-bit weights and others"):
        layout.pack(buffer, [(weight, "") for weight in weights])
