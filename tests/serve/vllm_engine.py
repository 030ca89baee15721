"""An LLM of vLLM that obeys a test over a socket: `python vllm_engine.py SOCKET FOLDER RANKS FORMAT`, in an environment with vLLM.

With the load format `dummy` its weights are not those of the folder: they come from the test, by refits. Each request is a name
and keyword arguments; the answer is a value or an error.
"""

import functools
import os
import sys
from multiprocessing.connection import Client
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "zerocast,zerocast_stand_in" if os.environ.get("ZEROCAST_STAND_IN") else "zerocast",
}

import torch
from torch import Tensor, nn
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

import zerocast
from examples.rollout.vllm_stand_in import decoded
from tests.serve.vllm_messages import dumped, loaded
from zerocast.integrations.vllm.client import OfflineVllm
from zerocast.integrations.vllm.layers import _kernel
from zerocast.integrations.vllm.trainer import ZerocastTrainerInitInfo
from zerocast.serve import Sender

PROMPTS = torch.arange(24).view(2, 12).tolist()


def matrices(model: nn.Module) -> dict[str, Tensor]:
    """What the quantized layers of a rank multiply with, and its other parameters, but those that a CPU has packed away."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale") or hasattr(module, "weight_scale_inv"):
            found[name] = decoded(module).bfloat16()
        elif getattr(module, "weight", None) is not None and module.weight.numel():
            found[name] = module.weight.data.clone()
    return found


def addresses(model: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def kernels(model: nn.Module) -> list[str]:
    """The classes of the kernels of quantized products."""
    quantized = [m for m in model.modules() if hasattr(m, "weight_scale") or hasattr(m, "weight_scale_inv")]
    return sorted({type(_kernel(module, module.quant_method)).__name__ for module in quantized})


def zero(ending: str, model: nn.Module) -> None:
    """Zero the parameters whose names end so; all, as after a wake-up from sleep level 2, which a CPU does not have."""
    for name, parameter in model.named_parameters():
        if name.endswith(ending):
            parameter.data.zero_()


def break_once(model: nn.Module) -> None:
    """Let the next replay of a layer on rank 1 run out of memory."""
    method = next(module for module in model.modules() if hasattr(module, "weight_scale_inv")).quant_method

    def fail(layer: nn.Module) -> None:
        del method.process_weights_after_loading
        raise MemoryError("out of memory")

    if get_tensor_model_parallel_rank() == 1:
        method.process_weights_after_loading = fail


class Recorded:
    """A client with the four calls of vLLM's own."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append(update_info["header"]["kind"])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")


class Engine(OfflineVllm):
    def __init__(self, folder: str, ranks: int, load_format: str) -> None:
        self.llm = LLM(
            folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=64,
            load_format=load_format,
            max_logprobs=-1,
            tensor_parallel_size=ranks,
            weight_transfer_config={"backend": "zerocast"},
        )
        super().__init__(self.llm)

    def matrices(self) -> list[dict[str, Tensor]]:
        return self.llm.apply_model(matrices)

    def kernels(self) -> list[list[str]]:
        return self.llm.apply_model(kernels)

    def addresses(self) -> list[dict[str, int]]:
        return self.llm.apply_model(addresses)

    def zero(self, ending: str = "") -> None:
        self.llm.apply_model(functools.partial(zero, ending))

    def break_once(self) -> None:
        self.llm.apply_model(break_once)

    def version(self) -> str:
        return self.llm.get_weight_version()

    def trainer_calls(self, folder: str) -> list[str]:
        """What the trainer's side of vLLM's interface asks of an engine for two refits, of a small model in this process."""
        model = nn.Linear(128, 128, bias=False)
        zerocast.quantize_(model, {"weight": "fp8_block"}, dtype=torch.bfloat16)
        optimizer = zerocast.ZeroAdamW(model.named_parameters())
        client = Recorded()
        info = ZerocastTrainerInitInfo(rank=0, folder=folder)
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=Sender(optimizer, "deepseek"))
        trainer.send_weights()
        trainer.send_weights()
        trainer.shutdown()
        return client.calls

    def logprobs(self) -> Tensor:
        """Return those of all tokens after each token of the prompts but the last, `[prompts, tokens - 1, vocabulary]`."""
        sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
        answers = self.llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
        places = [answer.prompt_logprobs[1:] for answer in answers]
        return torch.tensor([[[place[token].logprob for token in sorted(place)] for place in each] for each in places])


def answer(engine: Engine, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": getattr(engine, name)(**arguments)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    socket, folder, ranks, load_format = sys.argv[1:]
    with Client(socket) as connection:
        engine = Engine(folder, int(ranks), load_format)
        connection.send_bytes(dumped({"value": None}))
        while (request := loaded(connection.recv_bytes())) is not None:
            connection.send_bytes(dumped(answer(engine, *request)))
