"""vLLM as a receiver of live weights: a weight-transfer engine called `zerocast`.

The entry point `vllm.general_plugins` calls `register` in every process of vLLM. It imports neither
torch nor the engine: vLLM does so where `--weight-transfer-config '{"backend": "zerocast"}'` asks
for it.
"""

NAME = "zerocast"


def register() -> None:
    """Register both sides of the engine with vLLM's factories. Another call does nothing."""
    # Every process of vLLM imports this module, so it imports as little as it can.
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    sides = (
        (WeightTransferEngineFactory, "zerocast.integrations.vllm.engine", "ZerocastEngine"),
        (WeightTransferTrainerFactory, "zerocast.integrations.vllm.trainer", "ZerocastTrainerEngine"),
    )
    for factory, module, name in sides:
        if NAME not in factory._registry:
            factory.register_engine(NAME, module, name)
