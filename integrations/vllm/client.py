"""The control plane of vLLM for an `EngineSender`: a server over HTTP, or an LLM in this process.

Both also pause, which drops prefix and KV caches, since these are of the old weights. Neither needs
vLLM in the trainer's environment.
"""

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any


class VllmServer:
    """A vLLM server, which was started with VLLM_SERVER_DEV_MODE=1 for its RL routes.

    Args:
        url: its address, such as http://localhost:8000.
        mode: the handling of requests in flight when it pauses, `wait` or `abort`.
        timeout: seconds for each call.
    """

    def __init__(self, url: str, mode: str = "wait", timeout: float = 300.0) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"url is an address of http or https, got {url!r}")
        if mode not in ("wait", "abort"):
            raise ValueError(
                f"mode is 'wait' or 'abort', got {mode!r}: requests that are kept would continue with old KV caches"
            )
        self._url = url.rstrip("/")
        self._mode = mode
        self._timeout = timeout

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect every worker of the engine to the folder of messages."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin a refit on every worker, while requests continue."""
        self._post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Hand a message to every worker."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End a refit, and name its weights."""
        self._post("finish_weight_update", {"weight_version": weight_version})

    def pause(self) -> None:
        """Let no request compute, and drop caches."""
        self._post(f"pause?mode={self._mode}&clear_cache=true", {})

    def resume(self) -> None:
        """Let requests compute again, with the weights of the refit."""
        self._post("resume", {})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(  # noqa: S310, since the scheme was checked
            f"{self._url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:  # noqa: S310
                response.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(
                f"vLLM answered {path} with {error.code}: {error.read().decode(errors='replace')[:2000]}"
            ) from None


class OfflineVllm:
    """An `LLM` of vLLM in this process.

    Args:
        llm: the LLM, made with `weight_transfer_config={"backend": "zerocast"}`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect every worker of the engine to the folder of messages."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin a refit on every worker, while requests continue."""
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Hand a message to every worker."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End a refit, and name its weights."""
        self._llm.finish_weight_update(weight_version)

    def pause(self) -> None:
        """Let no request compute, and drop caches. Requests in flight are computed again."""
        self._llm.sleep(level=0, mode="keep")
        self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        self._llm.reset_mm_cache()

    def resume(self) -> None:
        """Let requests compute again, with the weights of the refit."""
        self._llm.wake_up(tags=["scheduling"])
