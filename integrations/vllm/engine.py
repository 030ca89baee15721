"""ZerocastEngine: vLLM's worker side of a refit.

vLLM makes one in each worker after the model was loaded, from an export or, with
`load_format="dummy"`, without weights. Messages come as docs/reference/engines.md has them.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CompilationMode
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from zerocast.distributed.group import Group
from zerocast.integrations.vllm.layers import Layers
from zerocast.integrations.vllm.loader_map import LoaderMap
from zerocast.serve.engine_receiver import EngineReceiver
from zerocast.serve.engine_sender import APPLY, OPEN
from zerocast.serve.engine_weights import ModelTensor, Region
from zerocast.serve.receiving import Layout
from zerocast.serve.refit_message import PROTOCOL, RefitError


@dataclass
class ZerocastInitInfo(WeightTransferInitInfo):
    """The protocol of the trainer, and the folder in which tensors are handed over."""

    protocol: int = 0
    folder: str = ""


@dataclass
class ZerocastUpdateInfo(WeightTransferUpdateInfo):
    """A message: its header, and the file in the folder that has its tensors."""

    header: dict[str, Any] = field(default_factory=dict)
    file: str | None = None


class VllmWeights:
    """The weights of a vLLM model on one rank, an `EngineWeights`."""

    def __init__(self, model: nn.Module) -> None:
        self._map = LoaderMap(model)
        self._layers = Layers(model, self._map.layers)
        self._shapes: dict[str, Tensor] = {}

    def regions(self, layout: Layout) -> Mapping[str, list[Region]]:
        """As vLLM's loaders put the stored tensors."""
        return self._map.regions(layout)

    def model_tensors(self) -> Mapping[str, ModelTensor]:
        """All parameters before they are processed, those of tied weights once."""
        return {name: tensor for name, tensor in self._map.model_tensors.items() if name not in self._layers.aliases}

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Write whole tensors, through the processing that vLLM does after it loads them."""
        self._shapes = {name: values[name].clone() for name in self._map.shapes}
        self._layers.load(values)

    def tensors(self) -> Mapping[str, Tensor]:
        """Views of what kernels read, or the bytes before processing where kernels have others."""
        return {**self._layers.tensors(), **self._shapes}

    def written(self, names: Iterable[str]) -> None:
        """Replay vLLM's processing where kernels have copies."""
        self._layers.written(names)

    def check(self) -> None:
        """Raise ValueError unless those copies are what the processing gave."""
        self._layers.check()


class ZerocastEngine(WeightTransferEngine[ZerocastInitInfo, ZerocastUpdateInfo]):
    """Receives refits on one worker of vLLM."""

    init_info_cls = ZerocastInitInfo
    update_info_cls = ZerocastUpdateInfo
    supports_draft_weight_update = False

    # Made by `init_transfer_engine`, when a trainer connects.
    _receiver: EngineReceiver | None = None
    _folder: Path | None = None
    # True while vLLM takes messages of a refit on this rank.
    _is_open = False

    def init_transfer_engine(self, init_info: ZerocastInitInfo) -> None:
        """Connect to a trainer. Raises RefitError for another protocol, for an engine that cannot
        be refitted exactly, naming the reason, and while a refit is open.
        """
        with self._raised_once():
            self._connect(init_info)

    def _connect(self, init_info: ZerocastInitInfo) -> None:
        if init_info.protocol != PROTOCOL:
            raise ValueError(
                f"the trainer speaks protocol {init_info.protocol} of refits, and this plugin {PROTOCOL}: install one version of "
                "zerocast on both sides"
            )
        parallel = self.parallel_config
        if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1 or parallel.enable_expert_parallel:
            raise ValueError("refits support tensor parallelism only: no pipeline, data or expert parallelism")
        is_eager = self.vllm_config.compilation_config.mode == CompilationMode.NONE
        if self.device.type == "cpu" and not is_eager:
            raise ValueError(
                "on a CPU vLLM compiles packed copies of weights into its code: start it with enforce_eager=True"
            )
        self._folder = Path(init_info.folder)
        if self._receiver is not None:
            # A trainer that comes again, or another one. What the engine has stays.
            self._receiver.discard()
            if self._is_open:
                raise RefitError(OPEN)
            return
        tp = get_tp_group()
        self._receiver = EngineReceiver(
            VllmWeights(self.model),
            Group.of(tp.cpu_group),
            Group.of(tp.device_group),
            self.device,
            has_weights=self.vllm_config.load_config.load_format != "dummy",
        )
        self.model.register_forward_pre_hook(self._check_servable)

    def start_weight_update(self) -> None:
        """Begin a refit, which is staged while requests continue."""
        self._connected.discard()
        self._is_open = True

    def receive_weights(self, update_info: ZerocastUpdateInfo) -> None:
        """Stage a message, or write what is staged. Raises RefitError if a rank cannot."""
        try:
            with self._raised_once():
                if update_info.header.get("kind") == APPLY:
                    self._connected.apply()
                else:
                    self._connected.accept(update_info.header, partial(self._tensors, update_info.file))
        except RefitError:
            # vLLM accepts no more messages of it after an error.
            self._is_open = False
            raise

    def finish_weight_update(self) -> None:
        """End a refit. One that was not applied is dropped."""
        self._connected.discard()
        self._is_open = False

    def shutdown(self) -> None:
        """Disconnect. The engine keeps its weights and its position in the sequence of refits."""
        if self._receiver is not None:
            self._receiver.discard()

    @contextmanager
    def _raised_once(self) -> Iterator[None]:
        """Raise the error of any rank on the last rank only. Collective.

        vLLM reads the answers of ranks in their order and stops at an error. It would take those
        that it has not read for answers to the next call.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        group = Group.of(get_tp_group().cpu_group)
        text = error and (str(error) if isinstance(error, RefitError) else f"{type(error).__name__}: {error}")
        errors = [text for text in group.all_gather_object(text, "the errors of a refit") if text is not None]
        if errors and group.rank == group.size - 1:
            raise RefitError(errors[0]) from error

    @property
    def _connected(self) -> EngineReceiver:
        if self._receiver is None:
            raise RefitError("no trainer is connected: call init_weight_transfer_engine first")
        return self._receiver

    def _check_servable(self, *_: Any) -> None:
        self._connected.check_servable()

    def _tensors(self, file: str | None) -> list[Tensor]:
        if file is None:
            return []
        assert self._folder is not None
        tensors: list[Tensor] = torch.load(self._folder / Path(file).name, map_location="cpu", weights_only=True)
        return tensors
