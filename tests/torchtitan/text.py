"""A text made of numbers, which a small model learns within some steps."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

TEXT = " ".join(f"{a} times {b} is {a * b}." for a in range(2, 20) for b in range(2, 20)).encode()  # bytes are tokens


class Text(IterableDataset[tuple[dict[str, Tensor], Tensor]]):
    """The text from another place on every rank, and the place where the next sequence begins."""

    def __init__(self, rank: int, length: int) -> None:
        self._tokens, self._length, self._start = torch.tensor(list(TEXT)), length, 131 * rank

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            places = (self._start + torch.arange(self._length + 1)) % len(self._tokens)
            self._start += 257
            window = self._tokens[places]
            yield {"input": window[:-1]}, window[1:]

    def state_dict(self) -> dict[str, int]:
        return {"start": self._start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["start"]
