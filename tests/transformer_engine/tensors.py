"""TransformerEngine's tensors of the cases in tests/casts.py, Hybrid ones of two cases too: their bytes by zerocast's names, and
their casts and gathers on a rank. For inside `host_on_cpu()`.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from tests import casts
from tests.casts import POISON, Gathered, Outcome, Weight
from tests.transformer_engine.host_on_cpu import host_on_cpu, integration
from zerocast import get_format
from zerocast.distributed.group import Group
from zerocast.formats import Columnwise, FormatSpec, layout

ATTRIBUTES = {
    "Float8Tensor": {
        "rowwise_data": "_data",
        "rowwise_scale_inv": "_scale_inv",
        "columnwise_data": "_transpose",
        "columnwise_scale_inv": "_scale_inv",
    },
    "IdentityTensor": {"rowwise_data": "_hp_data"},
}
# The formats that it has tensors for, but for a rule for scales that its quantizers do not know.
HELD = tuple(fmt for fmt in casts.FORMATS if not fmt.startswith(("mxfp4", "int4")) and "exact_in_fp8=True" not in fmt)
_BLOCKS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


def host_tensors() -> Any:
    import transformer_engine.pytorch.tensor as module

    return module


def quantizer(fmt: FormatSpec, device: str = "cpu", scale: float = 1.0) -> Any:
    """TransformerEngine's quantizer of a format."""
    from transformer_engine.pytorch.constants import DType

    te, element = host_tensors(), "" if fmt.element is None else fmt.element.name
    dtype = {"e4m3": DType.kFloat8E4M3, "e5m2": DType.kFloat8E5M2}.get(element)
    options = {"force_pow_2_scales": fmt.power_of_2_scale, "amax_epsilon": fmt.amax_epsilon}
    one = torch.ones(1, device=device)
    made: Any = {
        "fp8_delayed": lambda: te.Float8Quantizer(one * scale, one * 0, dtype),
        "fp8_current": lambda: te.Float8CurrentScalingQuantizer(dtype, torch.device(device), **options),
        "fp8_block": lambda: te.Float8BlockQuantizer(dtype, rowwise=True, columnwise=True, **options),
        "mxfp8": lambda: te.MXFP8Quantizer(dtype, with_2d_quantization=fmt.block == (32, 32)),
        "nvfp4": lambda: te.NVFP4Quantizer(with_2d_quantization=True),
        "identity": te.IdentityQuantizer,
    }[fmt.name]()
    return made


def _filled(buffer: layout.Buffer | None, device: str) -> Tensor:
    assert buffer is not None
    data = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    data.view(torch.uint8).fill_(POISON)
    return data


def tensor(case: Weight, device: str = "cpu", scale: float = 1.0, columnwise: bool = False) -> Any:
    """A tensor of a case, every buffer full of poison; with `columnwise` the copies that derive are there too, and codes that serve
    both directions twice, as TransformerEngine makes them.
    """
    fmt, te = get_format(case.fmt), host_tensors()
    made = quantizer(fmt, device, scale)
    matrix = layout.matrix_shape(case.shape)
    held = {name: buffer for name, buffer in layout.buffers(fmt, matrix, case.nominal).items() if buffer is not None}
    if fmt.columnwise is Columnwise.SHARED:
        held["columnwise_data"] = held["rowwise_data"]
    data = {name: _filled(buffer, device) for name, buffer in held.items()}
    common: dict[str, Any] = {
        "shape": case.shape,
        "dtype": case.nominal,
        "quantizer": made,
        "device": torch.device(device),
    }
    if fmt.name in ("fp8_delayed", "fp8_current"):
        transpose = data["columnwise_data"].view(case.shape[-1], *case.shape[:-1]) if columnwise else None
        result = te.Float8Tensor(
            data=data["rowwise_data"].view(case.shape),
            fp8_scale_inv=data["rowwise_scale_inv"],
            fp8_dtype=made.dtype,
            data_transpose=transpose,
            **common,
        )
    elif fmt.name == "identity":
        result = te.IdentityTensor(
            case.shape, case.nominal, hp_data=data["rowwise_data"].view(case.shape), quantizer=made
        )
    else:
        blocks: dict[str, Any] = {name: data[name] for name in _BLOCKS}
        if not columnwise and not fmt.casts_columnwise:
            blocks |= {"columnwise_data": None, "columnwise_scale_inv": None}
        if fmt.name == "fp8_block":
            result = te.Float8BlockwiseQTensor(**blocks, fp8_dtype=made.dtype, is_2D_scaled=True, **common)
        elif fmt.name == "mxfp8":
            result = te.MXFP8Tensor(**blocks, fp8_dtype=made.dtype, with_gemm_swizzled_scales=False, **common)
        else:
            amax = data["amax"]
            result = te.NVFP4Tensor(
                **blocks,
                amax_rowwise=amax,
                amax_columnwise=amax.clone() if columnwise else None,
                fp4_dtype=made.dtype,
                with_gemm_swizzled_scales=False,
                **common,
            )
    return result


def buffers(weight: Any) -> dict[str, Tensor]:
    """The buffers that a tensor holds, by zerocast's names, the tensor amax among them where TransformerEngine has one."""
    names = ATTRIBUTES.get(type(weight).__name__, {name: f"_{name}" for name in _BLOCKS} | {"amax": "_amax_rowwise"})
    held = {name: getattr(weight, attribute, None) for name, attribute in names.items()}
    if hasattr(weight._quantizer, "amax") and hasattr(weight._quantizer, "scale"):
        held["amax"] = weight._quantizer.amax
    return {name: found for name, found in held.items() if found is not None}


def expected(case: Weight, **options: Any) -> casts.Bytes:
    """The unsharded cast, with codes by columns where TransformerEngine has a name for them too."""
    return with_shared_codes(case.fmt, casts.expected_of_shards(case, **options))


def with_shared_codes(fmt: str, cast: casts.Bytes) -> casts.Bytes:
    """The bytes of a cast as TransformerEngine's tensors hold them."""
    shared = get_format(fmt).columnwise is Columnwise.SHARED
    return {**cast, "columnwise_data": cast["rowwise_data"]} if shared else cast


def dequantized(weight: Any, columnwise: bool) -> Tensor:
    """FP32 values of one direction of an MXFP8Tensor, by the shapes and padding of scales that its quantizer states; its own
    `dequantize` needs Blackwell.
    """
    side, block = ("columnwise", (32, 1)) if columnwise else ("rowwise", (1, 32))
    codes, scales = getattr(weight, f"_{side}_data"), getattr(weight, f"_{side}_scale_inv")
    assert tuple(scales.shape) == weight._quantizer.get_scale_shape(weight.shape, columnwise=columnwise)
    assert not weight._with_gemm_swizzled_scales
    rows, columns = layout.matrix_shape(weight.shape)
    exponents = scales[: rows // block[0], : columns // block[1]].float() - 127
    factors = torch.exp2(exponents).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return codes.view(torch.float8_e4m3fn).float().view(rows, columns) * factors


def bytes_of(weight: Any) -> casts.Bytes:
    return {name: casts.raw(buffer).copy() for name, buffer in buffers(weight).items()}


def columnwise_only(case: Weight, device: str = "cpu") -> Any:
    """A tensor as TransformerEngine makes it by columns alone: FP8 in its transpose, other formats as by rows."""
    made = tensor(case, device, columnwise=True)
    if hasattr(made, "_data"):
        made._data = None
        made._transpose_invalid = False
    return made


def hybrid(rowwise: Weight | None, columnwise: Weight | None, source: str = "original", device: str = "cpu") -> Any:
    """A Hybrid tensor of two cases of one shape; None for a direction that was dropped."""
    te = host_tensors()
    one = rowwise or columnwise
    assert one is not None
    row = tensor(rowwise or one, device)
    column = columnwise_only(columnwise or one, device)
    made = te.HybridQuantizer(
        rowwise_quantizer=row._quantizer, columnwise_quantizer=column._quantizer, columnwise_source=source
    )
    return te.HybridQuantizedTensor(
        shape=one.shape,
        dtype=one.nominal,
        rowwise_storage=row if rowwise else None,
        columnwise_storage=column if columnwise else None,
        quantizer=made,
        device=torch.device(device),
    )


def codes_of(part: Any) -> casts.Bytes:
    """Codes and scales of a direction; the amax of delayed scaling."""
    held = bytes_of(part)
    if getattr(part, "_data", True) is None:
        held["columnwise_data"] = casts.raw(part._transpose).copy()
    return held


def cast(weight: Any, master: Tensor | None, start: int | None, **options: Any) -> list[casts.Bytes]:
    """One call of one weight; the bytes of its directions."""
    integration().quantize_master_weights([weight], [master], [start], None, **options)
    parts = (weight._rowwise_storage, weight._columnwise_storage)
    return [{} if part is None else codes_of(part) for part in parts]


SHAPE = (64, 96)
NUMEL = SHAPE[0] * SHAPE[1]
TILES = "mxfp8:block=32x32"


def weights_of(*formats: str, cuts: tuple[int, ...] = ()) -> tuple[Weight, ...]:
    """A weight of each format, cut before these elements: on one rank more than there are cuts."""
    spans = tuple(itertools.pairwise([0, *cuts, NUMEL]))
    return tuple(Weight(fmt, SHAPE, spans) for fmt in formats)


class Casting(Gathered):
    """The tensors of a case as this rank holds them."""

    def __init__(self, cases: tuple[Weight, ...], device: str = "cpu", columnwise: bool = False) -> None:
        self.cases, self.device = cases, device
        self.complaints: list[str] = []
        self.group: Any = None
        self.rank = Group.of(None).rank
        self.tensors = [tensor(case, device, columnwise=columnwise) for case in cases]

    def masters(self, step: int = 0) -> tuple[list[Tensor | None], list[int | None]]:
        """Masters, in new tensors at every call, and start offsets."""
        shards = [case.shard(self.rank, step) for case in self.cases]
        return [None if m is None else m.to(self.device) for m, _ in shards], [start for _, start in shards]

    def cast(self, step: int = 0, *arguments: Any, **options: Any) -> None:
        """One call, in TransformerEngine's order of arguments."""
        integration().quantize_master_weights(self.tensors, *self.masters(step), self.group, *arguments, **options)

    def cast_both_ways(self, step: int = 0) -> None:
        """A call, and the one that makes the columnwise copies after the gather."""
        self.cast(step, manual_post_all_gather_processing=True)
        integration().post_all_gather_processing(self.tensors)

    def forget_call(self) -> None:
        """The masters of the next call are others, and some contents are not finite."""
        from zerocast.integrations.transformer_engine.plan_cache import plans_of

        for cached in plans_of(self.tensors):
            cached._driver.plan.forget_call()

    def payloads(self, index: int) -> list[Tensor]:
        """The buffers of codes that a gather sends."""
        held, own = buffers(self.tensors[index]), get_format(self.cases[index].fmt).columnwise is Columnwise.OWN_GRID
        return [held["rowwise_data"], held["columnwise_data"]] if own else [held["rowwise_data"]]

    def bytes(self) -> list[casts.Bytes]:
        """Copies of the bytes of all tensors."""
        return [bytes_of(one) for one in self.tensors]


def cast_and_gather(
    cases: tuple[Weight, ...], steps: int = 1, device: str = "cpu", columnwise: bool = False
) -> Outcome:
    """Cast, gather, transpose; the bytes of all tensors after each step."""
    with host_on_cpu():
        casting = Casting(cases, device, columnwise)
        outcome = Outcome([], casting.complaints)
        for step in range(steps):
            casting.forget_call()
            casting.cast(step, manual_post_all_gather_processing=True)
            if step == 0:
                casting.check_others_untouched()
            casting.gather()
            integration().post_all_gather_processing(casting.tensors)
            outcome.steps.append(casting.bytes())
        return outcome
