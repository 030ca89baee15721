"""Text for the example, without a download: the Python standard library of the interpreter that
runs it.

Every machine that can run the example has it: some megabytes of real text, with a structure that a
small model learns in minutes. `--data` takes other files instead. The text is used as bytes.

A batch is a pure function of (seed, step, micro-step, rank). There is no reader whose position must
be saved: a resumed run sees exactly the batches of the uninterrupted one.
"""

import hashlib
import os
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CHUNK = 1 << 14  # bytes that go to one side together; fewer if the text is short
VALIDATION_EVERY = 20  # one chunk in this many is for validation
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def standard_library_files() -> list[Path]:
    """List the `.py` files of the running interpreter's standard library in a fixed order,
    without test suites.
    """
    files: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)  # os.walk goes down into what is left here
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return files


def read_files(paths: Sequence[Path]) -> bytes:
    """Read all files in the given order; a folder means all files below it, sorted by name."""
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return b"\n".join(file.read_bytes() for file in files if not file.is_dir())


@dataclass(frozen=True)
class Batch:
    """`targets` is `tokens` one byte later; both int64 [sequences, context]."""

    tokens: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> "Batch":
        """Return the same batch on `device`."""
        return Batch(self.tokens.to(device, non_blocking=True), self.targets.to(device, non_blocking=True))


class Corpus:
    """Text as two strings of bytes, one to train on and one to validate on.

    Validation takes every twentieth chunk rather than the end of the text: files are sorted by
    name, and the last are not like the first. The split depends only on the text.
    """

    def __init__(self, text: bytes, context: int) -> None:
        size = min(CHUNK, max(len(text) // VALIDATION_EVERY, 1))
        chunks = [text[i : i + size] for i in range(0, len(text), size)]
        train = b"".join(chunk for i, chunk in enumerate(chunks) if i % VALIDATION_EVERY)
        validation = b"".join(chunks[::VALIDATION_EVERY])
        for name, side in (("training", train), ("validation", validation)):
            if len(side) <= context:
                raise ValueError(
                    f"the {name} text has {len(side)} bytes, too few for context {context}: pass more --data"
                )
        self.context = context
        self._orders: dict[int, list[int]] = {}  # of the windows of `batch_once`, by seed
        self.train, self.validation = _as_tensor(train), _as_tensor(validation)
        self.fingerprint = hashlib.sha256(text).hexdigest()[:16]

    @classmethod
    def load(cls, paths: Sequence[Path], context: int) -> "Corpus":
        """Read the text of `paths`, or of the standard library when there are none."""
        return cls(read_files(paths or standard_library_files()), context)

    def train_batch(self, sequences: int, *, seed: int, step: int, micro_step: int, rank: int) -> Batch:
        """Draw sequences that start at random positions of the training text."""
        # A string as seed goes through SHA-512: neighbouring steps have nothing in common, and
        # every Python agrees.
        places = random.Random(f"{seed}.{step}.{micro_step}.{rank}")  # noqa: S311
        return self._cut(self.train, [places.randrange(len(self.train) - self.context) for _ in range(sequences)])

    def batch_once(self, sequences: int, *, seed: int, index: int) -> Batch:
        """Return batch number `index` of a run that sees no byte twice: its windows of the text, in
        an order that `seed` decides. Raises ValueError past the last window.
        """
        order = self._order(seed)
        mine = order[index * sequences : (index + 1) * sequences]
        if len(mine) < sequences:
            raise ValueError(
                f"{len(self.train):,} bytes of text make {len(order):,} sequences of {self.context}, and batch {index} wants "
                f"those up to {(index + 1) * sequences:,}: pass more --data, or fewer --steps"
            )
        return self._cut(self.train, mine)

    def _order(self, seed: int) -> list[int]:
        if seed not in self._orders:
            starts = list(range(0, len(self.train) - self.context, self.context))
            random.Random(f"once {seed}").shuffle(starts)  # noqa: S311
            self._orders[seed] = starts
        return self._orders[seed]

    def validation_batches(self, sequences: int, total: int, *, rank: int, ranks: int) -> Iterator[Batch]:
        """Return this rank's part of `total` sequences that are spread evenly over the
        validation text.
        """
        last = len(self.validation) - self.context - 1
        starts = [last * i // max(total - 1, 1) for i in range(total)][rank::ranks]
        for i in range(0, len(starts), sequences):
            yield self._cut(self.validation, starts[i : i + sequences])

    def _cut(self, text: Tensor, starts: Sequence[int]) -> Batch:
        window = torch.stack([text[start : start + self.context + 1] for start in starts]).long()
        return Batch(window[:, :-1], window[:, 1:])


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
