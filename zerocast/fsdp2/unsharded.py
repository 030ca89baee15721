"""What a prepared model refuses that FSDP2 has not sharded: its forward pass would compute with the FP32 masters.

A prepared weight reaches a product as a QuantizedWeight, once FSDP2 has gathered it. The master itself gets there only where FSDP2
does not manage the weight.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from torch.utils._pytree import tree_map_only

ADVICE = (
    "call fully_shard on the model that was given to zerocast.fsdp2.prepare, or on modules in it, before the first forward pass "
    "(it takes the place of DistributedDataParallel and FullyShardedDataParallel)"
)


class Named(Protocol):
    """A prepared weight."""

    name: str


def check_managed(prepared: Iterable[Named], managed: Iterable[Named]) -> None:
    """RuntimeError if FSDP2 does not manage all prepared weights."""
    missing = sorted({weight.name for weight in prepared} - {weight.name for weight in managed})
    if missing:
        raise RuntimeError(
            f"{missing[0]} is prepared, and no FSDP module inside the prepared model manages it: {ADVICE}"
        )


def check_product(func: Any, kind: type, args: Any, kwargs: Any) -> None:
    """RuntimeError if an operator computes a product with a master, a tensor of class `kind`, that was never cast.

    Shapes may be probed on the meta device. Once FSDP2 has sharded and cast a weight, a module cannot reach its master.
    """
    if func.namespace != "aten" or func._schema.name[6:] not in PRODUCTS:
        return

    def refuse(master: Any) -> Any:
        if not master.owner.is_cast and not master.is_meta:
            raise RuntimeError(
                f"{master.owner.name} is prepared, and {func} would compute with its FP32 master, since FSDP2 did not gather it: "
                f"{ADVICE}"
            )
        return master

    tree_map_only(kind, refuse, (args, kwargs))


_NAMES = """
    mm addmm _addmm_activation bmm baddbmm addbmm mv addmv matmul linear einsum tensordot bilinear _trilinear mkldnn_linear
    linalg_multi_dot chain_matmul _grouped_mm _scaled_mm _scaled_mm_v2 _scaled_grouped_mm _scaled_grouped_mm_v2
    convolution convolution_overrideable _convolution _convolution_mode _slow_conv2d_forward mkldnn_convolution
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    cudnn_convolution cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu
    miopen_convolution miopen_convolution_transpose miopen_depthwise_convolution
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell mkldnn_rnn_layer _cudnn_rnn miopen_rnn
    _native_multi_head_attention _transformer_encoder_layer_fwd _triton_multi_head_attention
"""
PRODUCTS = frozenset(
    _NAMES.split()
)  # what layers of torch compute with weights: tests/fsdp2/test_unsharded.py has each layer
