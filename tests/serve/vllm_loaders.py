"""What becomes of loaders that do more than to copy, as JSON: `python -m tests.serve.vllm_loaders`, in an environment with vLLM."""

import json
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

from zerocast.integrations.vllm.loader_map import LoaderMap


class Model(nn.Module):
    """One layer, whose matrix [4, 8] is loaded by a function of it and a stored one."""

    def __init__(self, load: Callable[[Tensor, Tensor], object], weight: Tensor) -> None:
        super().__init__()
        self.layer, self.load = nn.Module(), load
        self.layer.weight = nn.Parameter(weight)
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, value in weights:
            self.load(self.layer.weight.data, value)


def padded_by(value: float) -> Callable[[Tensor, Tensor], object]:
    return lambda own, stored: (own[:2].copy_(stored[:2]), own[2:].fill_(value))


CASES: dict[str, tuple[Callable[[Tensor, Tensor], object], Tensor]] = {
    "padding": (padded_by(0), torch.ones(4, 8)),
    "ones": (padded_by(1), torch.ones(4, 8)),
    "doubled": (lambda own, stored: own.copy_(stored).mul_(2), torch.ones(4, 8)),
    "by index": (lambda own, stored: own.index_copy_(0, torch.arange(4, device="meta"), stored), torch.ones(4, 8)),
    "strides": (Tensor.copy_, torch.ones(8, 4).t()),
}


def outcome(load: Callable[[Tensor, Tensor], object], weight: Tensor) -> object:
    """The elements of padding, or the error."""
    known = LoaderMap(Model(load, weight))
    try:
        known.regions([("stored", torch.float32, (4, 8))])
    except ValueError as error:
        return str(error)
    return [(part.size, part.stride, part.offset) for part in known.model_tensors["layer.weight"].padding]


if __name__ == "__main__":
    print(json.dumps({name: outcome(*case) for name, case in CASES.items()}))
