"""Text: real text as tokens, of which every byte is trained on at most once.

A token is a byte, so a loss is in nats a byte, and no tokenizer has to be had or trusted. The
report holds the file by its name, size and SHA-256.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zerocast.checkpoint.regular_file import read_bounded

MOST_BYTES = 2**30


@dataclass(frozen=True)
class Text:
    """The tokens of a file, and by what the file can be recognized."""

    name: str
    sha256: str
    tokens: Tensor

    @classmethod
    def read(cls, path: Path) -> "Text":
        """Read a file of up to 1 GiB."""
        content = read_bounded(path, MOST_BYTES)
        tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return cls(path.name, hashlib.sha256(content).hexdigest(), tokens)

    def batches(self, steps: int, rank: int, ranks: int, shape: tuple[int, int], seed: int) -> Iterator[Tensor]:
        """Yield the tokens of one rank for each step, (batch, sequence + 1) for `shape`.

        Sequences follow each other in a random order that `seed` gives; the last token of each is a
        label only. Raises ValueError if `steps` would see a byte twice.
        """
        batch, sequence = shape
        count = (len(self.tokens) - 1) // sequence
        if count < steps * ranks * batch:
            raise ValueError(
                f"{self.name} has {len(self.tokens):,} bytes, which are {count:,} sequences of {sequence}; "
                f"{steps} steps of {batch} on {ranks} ranks need {steps * ranks * batch:,}"
            )
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        for step in range(steps):
            first = (step * ranks + rank) * batch
            starts = [number * sequence for number in order[first : first + batch]]
            yield torch.stack([self.tokens[start : start + sequence + 1] for start in starts]).long()
