"""What Megatron can and zerocast cannot is refused in the real host, and the error says what to do."""

import re

import pytest

from tests.megatron import refusals
from tests.megatron.host_on_cpu import KNOWS_FOUR_BITS, needs_megatron
from tests.workers import Ranks
from zerocast.integrations.megatron import validate

pytestmark = needs_megatron

NEVER_SHARDED = "ValueError: use_megatron_fsdp is not supported: .* use zerocast.fsdp2"
WHOLE = "ValueError: .*use_distributed_optimizer=False is not supported: .* set it in DistributedDataParallelConfig and in Opt"
OTHERS = "ValueError: optimizer=.* is not supported without use_layer_wise_distributed_optimizer=True"
SGD = "ValueError: optimizer='sgd' is not supported: .* not before the first checkpoint: use optimizer='adam'"
NO_LAYOUT = (
    "ValueError: .* is in no bucket of whole matrices: .* call tag_params_for_buffer_routing.* or use optimizer='adam'"
)
BLOCK = (
    "RuntimeError: QuantizedWeight.* call quantize_, then build DistributedDataParallel and the optimizer, both inside"
)
AS_IT_IS = (
    "RuntimeError: QuantizedWeight.* call zerocast.integrations.megatron.dequantize_ on the sharded state dict before"
)
TABLE = {
    "whole masters": WHOLE,
    "whole masters in DDP": WHOLE,
    "whole masters in both": WHOLE,
    "masters in half precision": "ValueError: main_params_dtype is not supported: .* leave it at torch.float32",
    "sgd": SGD,
    "sgd on the host": SGD,
    "mxfp8 through gradients": "ValueError: reuse_grad_buf_for_mxfp8_param_ag is not supported: .* use mxfp8:block=32x32",
    "mxfp8 through gradients in DDP": "ValueError: reuse_grad_buf_for_mxfp8_param_ag is not .* use mxfp8:block=32x32",
    "fsdp in DDP": NEVER_SHARDED,
    "fsdp": NEVER_SHARDED,
    "torch's fsdp": NEVER_SHARDED,
    "muon": OTHERS,
    "dist_muon": NO_LAYOUT,
    "lion": OTHERS,
    "lion beside muon": "ValueError: muon_scalar_optimizer='lion' is not supported: use 'adam'",
    "layer-wise by hand": NO_LAYOUT,
    "whole masters by hand": WHOLE,
    "no masters by hand": WHOLE,
    "mxfp8": "ValueError: .* mxfp8 needs both directions gathered.* use mxfp8:block=32x32",
    "two blocks": BLOCK,
    "nested blocks": BLOCK,
    "no block": r"RuntimeError: cannot set the data of QuantizedWeight.*integrations.megatron.quantized_params\(\)",
    "no block around the optimizer": r"RuntimeError: cannot view QuantizedWeight.*integrations.megatron.quantized_params\(\)",
    "quantized after DDP": BLOCK,
    "quantized after the optimizer": "ValueError: .* is quantized and in no bucket .* call quantize_ before Distributed",
    "saved as it is": AS_IT_IS,
    "loaded as it is": AS_IT_IS,
}


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.notices(
    "`dist_checkpointing.save` or `load` without `dequantize_`",
    where="Megatron",
    answer="raises on every rank, and names the call",
)
def test_refused_in_the_real_host_with_what_to_do(ranks: Ranks, name: str) -> None:
    if name in refusals.BUILT_SINCE_0_18 and not KNOWS_FOUR_BITS:
        pytest.skip(
            "0.16 and 0.17 refuse this without TransformerEngine or emerging_optimizers, or know other arguments"
        )
    for said in ranks(2)(refusals.say, name):
        assert re.match(TABLE[name], said), said


def test_every_case_and_every_setting_is_in_the_table() -> None:
    assert TABLE.keys() == refusals.CASES.keys()
    for setting, *_ in validate.SETTINGS:
        assert any(f"ValueError: {setting} " in message for message in TABLE.values()), setting
