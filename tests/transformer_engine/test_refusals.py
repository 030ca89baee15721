"""What TransformerEngine gets wrong and zerocast does not cast is refused with the reason, on every rank, before a byte changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import casts
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration, needs_te
from tests.transformer_engine.tensors import NUMEL, TILES, Casting, weights_of
from tests.workers import on_ranks

pytestmark = needs_te


def quantizer(**options: Any) -> Callable[[Any], None]:
    """Sets options of the tensor's quantizer."""
    return lambda weight: [setattr(weight._quantizer, name, value) for name, value in options.items()] and None


def attributes(**values: Any) -> Callable[[Any], None]:
    """Sets attributes of the tensor."""
    return lambda weight: [setattr(weight, name, value) for name, value in values.items()] and None


def e5m2(weight: Any) -> None:
    from transformer_engine.pytorch.constants import DType

    weight._quantizer.dtype = DType.kFloat8E5M2


def both_e5m2(weight: Any) -> None:
    e5m2(weight)
    weight._fp8_dtype = weight._quantizer.dtype


def strided(weight: Any) -> None:
    weight._data = weight._data.t().contiguous().t()


def subclassed(weight: Any) -> None:
    kind = type(weight._quantizer)
    weight._quantizer.__class__ = type("MyQuantizer", (kind,), {})


REFUSED = {
    "4over6": ("nvfp4", quantizer(nvfp4_use_4over6=True), "nvfp4_use_4over6 is True and False is needed"),
    "4over6 tensor": ("nvfp4", attributes(_nvfp4_use_4over6=True), "_nvfp4_use_4over6 is True and False is needed"),
    "E4M3 bound": ("nvfp4", attributes(_nvfp4_e4m3_max=256), "_nvfp4_e4m3_max is 256 and 448 is needed"),
    "1-D NVFP4": ("nvfp4", quantizer(with_2d_quantization=False), "with_2d_quantization is False and True is needed"),
    "row scaled": ("nvfp4", attributes(_row_scaled_nvfp4=True), "weights have one FP32 amax per tensor"),
    "stochastic": ("nvfp4", quantizer(stochastic_rounding=True), "weights are rounded to nearest"),
    "Hadamard": ("nvfp4", quantizer(with_rht=True), "without a Hadamard transform"),
    "swizzled NVFP4": ("nvfp4", attributes(_with_gemm_swizzled_scales=True), "written in their compact layout"),
    "swizzled MXFP8": ("mxfp8", attributes(_with_gemm_swizzled_scales=True), "written in their compact layout"),
    "swizzled tiles": (TILES, attributes(_with_gemm_swizzled_scales=True), "written in their compact layout"),
    "E5M2 MXFP8": ("mxfp8", both_e5m2, "mxfp8 weights are E4M3"),
    "E5M2 tiles": (TILES, both_e5m2, "mxfp8 weights are E4M3"),
    "no codes of tiles": (TILES, attributes(_rowwise_data=None), "it has no _rowwise_data: dropped"),
    "1x128 blocks": ("fp8_block", quantizer(block_scaling_dim=1), "block_scaling_dim is 1 and 2 is needed"),
    "1x128 tensor": ("fp8_block", attributes(_is_2D_scaled=False), "_is_2D_scaled is False and True is needed"),
    "other dtype": ("fp8_current", e5m2, "its codes are .*E4M3.* and its quantizer makes .*E5M2"),
    "no scales": ("fp8_block", attributes(_rowwise_scale_inv=None), "it has no _rowwise_scale_inv: dropped"),
    "no codes": ("fp8_current", attributes(_data=None), "it has no _data: dropped, or never made"),
    "no amax": ("nvfp4", attributes(_amax_rowwise=None), "it has no _amax_rowwise"),
    "one direction": ("mxfp8", attributes(_columnwise_data=None), "it has no _columnwise_data"),
    "other scales": (
        "nvfp4",
        attributes(_rowwise_scale_inv=torch.zeros(64, 16, dtype=torch.uint8)),
        r"_rowwise_scale_inv is torch.uint8 \(64, 16\) .* torch.uint8 \(128, 8\) is needed",
    ),
    "strided codes": ("fp8_current", strided, r"with strides \(1, 64\), contiguous"),
    "subclass": ("fp8_current", subclassed, "its quantizer is a MyQuantizer; known: Float8BlockQuantizer, Float8"),
    "another shape of the host": (
        "fp8_current",
        lambda weight: delattr(weight._quantizer, "amax_epsilon"),
        "'Float8CurrentScalingQuantizer' object has no attribute 'amax_epsilon': this TransformerEngine has an API",
    ),
}


SET_LATER = ("4over6", "4over6 tensor", "swizzled MXFP8", "swizzled tiles", "1x128 tensor", "other dtype", "no scales")


@pytest.mark.usefixtures("te")
@pytest.mark.parametrize(("name", "calls"), [*((name, 0) for name in REFUSED), *((name, 2) for name in SET_LATER)])
@pytest.mark.notices(
    "a quantizer or a tensor gets an unsupported option between two calls",
    where="TransformerEngine",
    answer="raises, no byte changed",
)
def test_refused_with_the_reason(name: str, calls: int) -> None:
    """The first call raises, or one after some that were right, of the same list and masters."""
    fmt, change, reason = REFUSED[name]
    here = Casting(weights_of("fp8_current", fmt))
    masters, starts = here.masters()
    for _ in range(calls):
        integration().quantize_master_weights(here.tensors, masters, starts, None)
    change(here.tensors[1])
    before = here.bytes()
    with pytest.raises((ValueError, TypeError, RuntimeError), match=f"model weight 1: .*{reason}"):
        integration().quantize_master_weights(here.tensors, masters, starts, None)
    for held, found in zip(before, here.bytes(), strict=True):
        casts.assert_same_bytes(found, held)


@pytest.mark.usefixtures("te")
def test_arguments_that_do_not_fit() -> None:
    here, calls = Casting(weights_of("fp8_current")), integration()
    (weight,), (master,) = here.tensors, here.masters()[0]
    assert master is not None
    shard = torch.zeros(5, dtype=torch.uint8)
    for arguments, reason in (
        (([weight], [master], [0, 1], None), "lists differ in length: 1 model weights, .* 2 start offsets, 1 shards"),
        (([weight], [master], [1], None), r"elements \[1, 6145\) are not inside the weight's 6144"),
        (([weight], [master], [-1], None), r"elements \[-1, 6143\) are not inside"),
        (([weight], [master], [None], None), "needs its start offset as an int"),
        (([weight], [master.half()], [0], None), "the master is torch.float16; float32 or the nominal torch.bfloat16"),
        (([weight, weight], [master, None], [0, None], None), "model weights 0 and 1 are the same weight"),
        (([torch.zeros(3)], [None], [None], None), "model weight 0: it is a Tensor: a quantized tensor"),
        (([weight], [master], [0], None, [None]), "it has a master on this rank and no shard to cast it into"),
        (([weight], [master], [0], None, [shard]), "the shard needs 6144 bytes, its storage has 5"),
        (([weight], [master], [0], None, ["here"]), "its shard is str; tensors of codes are needed"),
    ):
        with pytest.raises((TypeError, ValueError), match=reason):
            calls.quantize_master_weights(*arguments)
    with pytest.raises(TypeError, match="model weight 1: it is a int"):
        calls.post_all_gather_processing([weight, 3])
    assert calls.quantize_master_weights([], [], [], None) is None


@pytest.mark.usefixtures("te")
def test_masters_of_no_elements() -> None:
    """TransformerEngine fails at them for current scaling; a weight that nobody has a master of stays as it is."""
    here = Casting(weights_of("fp8_current"))
    (before,) = here.bytes()
    integration().quantize_master_weights(here.tensors, [torch.zeros(0)], [0], None)
    casts.assert_same_bytes(here.bytes()[0], before)


@on_ranks(2)
@pytest.mark.notices(
    "an argument is wrong on one rank, in the first call with a list of weights or a later one",
    where="TransformerEngine",
    answer="raises on all ranks",
)
@host_on_cpu()
def test_what_is_wrong_on_one_rank_raises_on_all() -> None:
    """An option of a weight, and another order of the list; no byte changes."""
    cases = weights_of("fp8_current", "nvfp4", cuts=(NUMEL // 2,))
    here = Casting(cases)
    before = here.bytes()
    here.tensors[1]._quantizer.nvfp4_use_4over6 = here.rank == 1
    with pytest.raises(ValueError, match="rank 1: model weight 1: nvfp4_use_4over6 is True"):
        here.cast()
    for held, found in zip(before, here.bytes(), strict=True):
        casts.assert_same_bytes(found, held)
    with pytest.raises(ValueError, match=r"weight 0 is fp8_current \(64, 96\) torch.bfloat16 on rank 0 and nvfp4"):
        Casting(cases[:: -1 if here.rank else 1]).cast()


@on_ranks(2)
@pytest.mark.notices(
    "an argument is wrong on one rank, in the first call with a list of weights or a later one",
    where="TransformerEngine",
    answer="raises on all ranks",
)
@host_on_cpu()
def test_what_is_wrong_in_a_later_call_raises_on_all() -> None:
    """An option, the length of a list, and the cut; proper calls between them are as before."""
    (case,) = weights_of("fp8_block", cuts=(NUMEL // 2,))
    (moved,) = weights_of("fp8_block", cuts=(NUMEL // 2 + 7,))
    here, calls = Casting((case,)), integration()
    is_wrong, quantizer, right = here.rank == 1, here.tensors[0]._quantizer, here.masters()

    def cast(given: Any) -> None:
        calls.quantize_master_weights(here.tensors, *given, None)

    cast(right)
    quantizer.block_scaling_dim = 1 if is_wrong else 2
    with pytest.raises(ValueError, match="rank 1: model weight 0: block_scaling_dim is 1"):
        cast(right)
    quantizer.block_scaling_dim = 2
    cast(right)
    with pytest.raises(ValueError, match="rank 1: lists differ in length"):
        cast(([*right[0], None], right[1]) if is_wrong else right)
    cast(right)
    other_part, start = moved.shard(here.rank)
    with pytest.raises(RuntimeError, match=r"rank 1: this rank owns different elements of QuantizedWeight\(shape="):
        cast(([other_part], [start]) if is_wrong else right)
    cast(right)
    owned = slice(*case.spans[here.rank])
    found, expected = here.bytes()[0], casts.expected_of_shards(case)
    assert (found["rowwise_data"][owned] == expected["rowwise_data"][owned]).all()
