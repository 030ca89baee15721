"""What TransformerEngine gets wrong and zerocast does not cast is refused with the reason, on every rank, before a byte changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import casts, sharded
from tests.sharded import Weight
from tests.transformer_engine.casting import Casting
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration, needs_te
from tests.transformer_engine.tensors import bytes_of
from tests.workers import Ranks, error_of


def wrong_on_one_rank(cases: tuple[Weight, ...]) -> str:
    """The error where an option of rank 1's second weight is one that is not cast; no byte changes."""
    with host_on_cpu():
        casting = Casting(cases)
        if casting.rank == 1:
            casting.tensors[1]._quantizer.nvfp4_use_4over6 = True
        before = [bytes_of(one) for one in casting.tensors]
        error = error_of(casting.cast)
        for held, one in zip(before, casting.tensors, strict=True):
            casts.assert_same_bytes(bytes_of(one), held)
        return error


def wrong_in_a_later_call(case: Weight, moved: tuple[tuple[int, int], ...]) -> list[str]:
    """Errors of calls whose arguments are wrong on rank 1: its options, its list, its cut; and of proper calls after each."""
    with host_on_cpu():
        casting, calls = Casting((case,)), integration()
        masters, starts = casting.masters()
        (start, stop), quantizer, errors = moved[casting.rank], casting.tensors[0]._quantizer, []
        other_part = [case.master().view(-1)[start:stop].clone()]

        def cast(*given: Any) -> None:
            errors.append(error_of(lambda: calls.quantize_master_weights(casting.tensors, *given, None)))

        cast(masters, starts)
        is_wrong = casting.rank == 1
        quantizer.block_scaling_dim = 1 if is_wrong else 2
        cast(masters, starts)
        quantizer.block_scaling_dim = 2
        cast(masters, starts)
        cast([*masters, None] if is_wrong else masters, starts)
        cast(masters, starts)
        cast(*(other_part, [start]) if is_wrong else (masters, starts))
        cast(masters, starts)
        casts.assert_same_bytes(
            {
                "rowwise_data": bytes_of(casting.tensors[0])["rowwise_data"].reshape(-1)[
                    slice(*case.spans[casting.rank])
                ]
            },
            {"rowwise_data": sharded.expected(case)["rowwise_data"].reshape(-1)[slice(*case.spans[casting.rank])]},
        )
        return errors


def other_formats(cases: tuple[Weight, ...]) -> str:
    """The error where ranks pass different lists."""
    with host_on_cpu():
        casting = Casting(cases if dist.get_rank() == 0 else cases[::-1])
        return error_of(casting.cast)


pytestmark = needs_te

SHAPE = (64, 96)
NUMEL = SHAPE[0] * SHAPE[1]
TILES = "mxfp8:block=32x32"


def halves(fmt: str, offset: int = 0) -> Weight:
    middle = NUMEL // 2 + offset
    return Weight(fmt, SHAPE, ((0, middle), (middle, NUMEL)))


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
    "subclass": (
        "fp8_current",
        subclassed,
        "its quantizer is a MyQuantizer; known: Float8BlockQuantizer, Float8Current",
    ),
    "another shape of the host": (
        "fp8_current",
        lambda weight: delattr(weight._quantizer, "amax_epsilon"),
        "'Float8CurrentScalingQuantizer' object has no attribute 'amax_epsilon': this TransformerEngine has an API",
    ),
}


SET_LATER = ("4over6", "4over6 tensor", "swizzled MXFP8", "swizzled tiles", "1x128 tensor", "other dtype")


@pytest.mark.usefixtures("te")
@pytest.mark.parametrize(("name", "calls"), [*((name, 0) for name in REFUSED), *((name, 2) for name in SET_LATER)])
@pytest.mark.notices(
    "a quantizer or a tensor gets an unsupported option between two calls",
    where="TransformerEngine",
    answer="raises, names the weight, no byte changed",
)
def test_refused_with_the_reason(name: str, calls: int) -> None:
    """In the first call, or after some that were right, of the same list and masters."""
    fmt, change, reason = REFUSED[name]
    here = Casting((Weight("fp8_current", SHAPE, ((0, NUMEL),)), Weight(fmt, SHAPE, ((0, NUMEL),))))
    masters, starts = here.masters()
    for _ in range(calls):
        integration().quantize_master_weights(here.tensors, masters, starts, None)
    change(here.tensors[1])
    before = [bytes_of(one) for one in here.tensors]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=f"model weight 1: .*{reason}"):
        integration().quantize_master_weights(here.tensors, masters, starts, None)
    for one, held in zip(here.tensors, before, strict=True):
        casts.assert_same_bytes(bytes_of(one), held)


@pytest.mark.usefixtures("te")
def test_arguments_that_do_not_fit() -> None:
    here, calls = Casting((Weight("fp8_current", SHAPE, ((0, NUMEL),)),)), integration()
    (weight,), (master,) = here.tensors, here.masters()[0]
    assert master is not None
    for arguments, reason in (
        (
            ([weight], [master], [0, 1]),
            "lists differ in length: 1 model weights, 1 master weights, 2 start offsets, 1 shards",
        ),
        (([weight], [master], [1]), r"elements \[1, 6145\) are not inside the weight's 6144"),
        (([weight], [master], [-1]), r"elements \[-1, 6143\) are not inside"),
        (([weight], [master], [None]), "needs its start offset as an int"),
        (([weight], [master.half()], [0]), "the master is torch.float16; float32 or the nominal torch.bfloat16"),
        (([weight, weight], [master, None], [0, None]), "model weights 0 and 1 are the same weight"),
        (
            ([torch.zeros(3)], [None], [None]),
            "model weight 0: it is a Tensor: a quantized tensor of TransformerEngine is",
        ),
        (([weight], [master], [0], None, [None]), "it has a master on this rank and no shard to cast it into"),
        (
            ([weight], [master], [0], None, [torch.zeros(5, dtype=torch.uint8)]),
            "the shard needs 6144 bytes, its storage has 5",
        ),
        (([weight], [master], [0], None, ["here"]), "its shard is str; tensors of codes are needed"),
    ):
        rest = arguments[3:] or (None,)
        with pytest.raises((TypeError, ValueError), match=reason):
            calls.quantize_master_weights(*arguments[:3], *rest)
    with pytest.raises(TypeError, match="model weight 1: it is a int"):
        calls.post_all_gather_processing([weight, 3])
    assert calls.quantize_master_weights([], [], [], None) is None


@pytest.mark.usefixtures("te")
def test_masters_of_no_elements() -> None:
    """TransformerEngine fails at them for current scaling; a weight that nobody has a master of stays as it is."""
    here = Casting((Weight("fp8_current", SHAPE, ((0, NUMEL),)),))
    before = bytes_of(here.tensors[0])
    integration().quantize_master_weights(here.tensors, [torch.zeros(0)], [0], None)
    casts.assert_same_bytes(bytes_of(here.tensors[0]), before)


@pytest.mark.usefixtures("te")
def test_a_later_call_that_is_wrong_changes_nothing() -> None:
    here = Casting((Weight("fp8_block", SHAPE, ((0, NUMEL),)),))
    here.cast()
    scales = here.tensors[0]._rowwise_scale_inv
    here.tensors[0]._rowwise_scale_inv = None
    with pytest.raises(ValueError, match="model weight 0: it has no _rowwise_scale_inv"):
        here.cast(1)
    here.tensors[0]._rowwise_scale_inv = scales
    here.cast(1)
    casts.assert_same_bytes(
        bytes_of(here.tensors[0]), {"rowwise_data": sharded.expected(here.cases[0], step=1)["rowwise_data"]}
    )


@pytest.mark.notices(
    "an argument of the first call with a list of weights is wrong on one rank",
    where="TransformerEngine",
    answer="raises on all ranks",
)
def test_what_is_wrong_on_one_rank_raises_on_all(ranks: Ranks) -> None:
    for error in ranks(2)(wrong_on_one_rank, (halves("fp8_current"), halves("nvfp4"))):
        assert error.startswith("ValueError: rank 1: model weight 1: nvfp4_use_4over6 is True")
    for error in ranks(2)(other_formats, (halves("fp8_current"), halves("nvfp4"))):
        assert error.startswith("ValueError: weight 0 is fp8_current (64, 96) torch.bfloat16 on rank 0 and nvfp4")


@pytest.mark.notices(
    "an argument of a later call is wrong on one rank",
    where="TransformerEngine",
    answer="raises on all ranks",
)
def test_what_is_wrong_in_a_later_call_raises_on_all(ranks: Ranks) -> None:
    case, moved = halves("fp8_block"), halves("fp8_block", offset=7)
    for errors in ranks(2)(wrong_in_a_later_call, case, moved.spans):
        first, option, _, lists, _, cut, last = errors
        assert "rank 1: model weight 0: block_scaling_dim is 1" in option
        assert "rank 1: lists differ in length" in lists
        assert "rank 1: this rank owns different elements of QuantizedWeight(shape=(64, 96)" in cut
        assert [first, *errors[2:5:2], last] == [""] * 4
