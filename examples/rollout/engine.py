"""The generator with vLLM: a server in its own environment, which the plugin refits.

In the control it is a server of bf16 weights, which are quantized again and reloaded from a folder.
"""

import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from examples.rollout import toy
from examples.rollout.config import RolloutConfig
from zerocast import QuantizedWeight
from zerocast.export import export_hf
from zerocast.integrations.vllm.client import VllmServer
from zerocast.serve import EngineSender, Sender

ROOT = Path(__file__).parents[2]
NAME = "policy"
OPTIONS = f"--served-model-name {NAME} --skip-tokenizer-init --enforce-eager --dtype bfloat16 --max-logprobs -1"
REFITTED = ["--load-format", "dummy", "--weight-transfer-config", '{"backend": "zerocast"}']


class Engine:
    """The generator as its trainer sees it. `close` ends it.

    Attributes:
        passes: names of the passes that compute its distributions over answers.
    """

    def __init__(self, model: Any, group: Any, config: RolloutConfig, folder: Path) -> None:
        self._model, self._config, self._folder = model, config, folder
        naming = "bf16" if config.requantize else toy.NAMINGS[config.format]
        export_hf(model, folder / "exported", naming)
        own = config.requantize or has_product(config.format)
        self.passes: tuple[str, ...] = ("vLLM" if own else "vLLM, stand-in for products",)
        self._server = Server(config.vllm.absolute(), folder, not own, [] if config.requantize else REFITTED)
        self._client = VllmServer(self._server.url)
        self._plain = toy.build()
        self._sender = Sender(model, naming, group=group, dtype=torch.bfloat16)
        self._engine: EngineSender | None = None

    def refit(self) -> int:
        """Send all weights, later only changes. Returns the number of bytes that were sent."""
        if not self._config.requantize:
            self._engine = self._engine or EngineSender(self._sender, self._client, self._folder)
            self._engine.refit()
            return self._engine.nbytes
        for name, parameter in self._plain.named_parameters():
            live = self._model.get_parameter(name)
            is_quantized = isinstance(live, QuantizedWeight)
            parameter.data.copy_(toy.requantized(live.dequantize()) if is_quantized else live.detach())
        values = {name: parameter.detach() for name, parameter in self._plain.named_parameters()}
        (self._folder / "again").mkdir(exist_ok=True)
        save_file(values, self._folder / "again" / "model.safetensors")
        self._client.pause()
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder / "again")}}
        self._server.post("collective_rpc", reload)
        self._client.resume()
        return sum(value.nbytes for value in values.values())

    def sample(self, step: int) -> tuple[Tensor, Tensor]:
        """Return (sequences, i64 `[count, 5]`; the log-probabilities of their answers, f32 `[1,
        count, tokens]`).
        """
        prompts = toy.prompts(step, self._config.batch_size)
        answers, logits = self._server.complete(prompts.tolist())
        return torch.cat([prompts, torch.tensor(answers)[:, None]], 1), torch.tensor(logits)[None]

    def close(self) -> None:
        """End the server and its processes."""
        self._server.close()


class Server:
    """vLLM's server of a folder, in the environment of a Python."""

    def __init__(self, python: Path, folder: Path, stand_in: bool, options: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples/rollout/vllm_site")]),
            "VLLM_PLUGINS": "zerocast,zerocast_stand_in" if stand_in else "zerocast",
            "ZEROCAST_STAND_IN": "in place",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }
        # `vllm serve` of vllm-cpu does not start: it asks for the version of a package `vllm`.
        served = ["--model", str(folder / "exported"), "--host", "127.0.0.1", "--port", str(port)]
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *served, *OPTIONS.split(), *options]
        self._log = folder / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(  # noqa: S603, a command of our own
                command, cwd=folder, env=environment, stdout=log, stderr=log
            )
        try:
            self._wait()
            # vLLM's attention assumes that AMX is initialized, which only products larger than
            # those of our prompts do. Without it the first request would be an illegal instruction.
            self.complete([[0] * 12])
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        for _ in range(600):
            if self._process.poll() is not None:
                raise RuntimeError(f"vLLM ended:\n{self._log.read_text()[-3000:]}")
            try:
                urllib.request.urlopen(f"{self.url}/health").close()  # noqa: S310
                return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"vLLM did not start:\n{self._log.read_text()[-3000:]}")

    def complete(self, prompts: list[list[int]]) -> tuple[list[int], list[list[float]]]:
        """Return a token after each prompt, and the log-probabilities of all that it was drawn
        from.
        """
        names = [f"token_id:{token}" for token in range(toy.VOCABULARY)]
        asked = {"model": NAME, "prompt": prompts, "max_tokens": 1, "logprobs": toy.VOCABULARY}
        form = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        choices = self.post("v1/completions", {**asked, **form})["choices"]
        found = [choice["logprobs"]["top_logprobs"][0] for choice in choices]
        return [choice["token_ids"][0] for choice in choices], [[each[name] for name in names] for each in found]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer of a route."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/{path}", json.dumps(body).encode(), headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=300) as response:  # noqa: S310
            return json.load(response)

    def close(self) -> None:
        """End the server with its processes."""
        self._process.terminate()
        self._process.wait(60)


def has_product(fmt: str) -> bool:
    """Return True if vLLM has a product of weights of a format on this CPU."""
    return fmt == "fp8_block" and "amx_tile" in Path("/proc/cpuinfo").read_text()
