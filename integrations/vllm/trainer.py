"""The trainer's side, as vLLM's interface has it. `EngineSender` itself does not need vLLM."""

from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from zerocast.integrations.vllm import NAME
from zerocast.serve.engine_sender import EngineSender


@dataclass
class ZerocastTrainerInitInfo(TrainerInitInfo):
    """The folder in which tensors are handed over, which all workers see."""

    backend: ClassVar[str] = NAME

    folder: str


class ZerocastTrainerEngine(TrainerWeightTransferEngine[ZerocastTrainerInitInfo]):
    """An `EngineSender` as vLLM's trainer interface: `source` is a `zerocast.serve.Sender`."""

    init_info_cls = ZerocastTrainerInitInfo

    def __init__(self, *, client: Any, source: Any, folder: str, is_sender: bool = True) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._sender = EngineSender(source, client, folder)

    @classmethod
    def trainer_init(
        cls, init_info: ZerocastTrainerInitInfo, *, client: Any, source: Any = None
    ) -> "ZerocastTrainerEngine":
        """Connect to the engine. All ranks of the sender's group call it."""
        return cls(client=client, source=source, folder=init_info.folder, is_sender=init_info.is_sender)

    def send_weights(self) -> None:
        """Refit the engine, by what changed or in full. All ranks of the sender's group call it."""
        self._sender.refit()

    def shutdown(self) -> None:
        """Remove the folder of messages, after the last refit."""
        self._sender.close()
