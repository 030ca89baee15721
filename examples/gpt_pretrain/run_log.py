"""The log of a run: records in metrics.jsonl, curves in TensorBoard, lines on the console.

Only rank 0 writes. metrics.jsonl is complete: the demo makes its progress bars, table and plot from
it only.
"""

import json
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """Read the records of a run so far, without a line that is still being written."""
    if not path.exists():
        return []
    complete, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]


class RunLog:
    """The log of one run on rank 0; on other ranks every method does nothing.

    A resumed run keeps the records up to the step that it resumes from and rewrites the later ones,
    in a new file: a stalled rank 0 of the earlier run may still have the old one open.
    """

    def __init__(self, folder: Path, *, resumed_at: int, enabled: bool) -> None:
        self._enabled = enabled
        if not enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = [record for record in read_records(path) if record["step"] <= resumed_at] if resumed_at else []
        new = path.with_name(path.name + ".new")
        new.unlink(missing_ok=True)
        self._file = new.open("w", buffering=1)
        self._file.writelines(json.dumps(record) + "\n" for record in kept)
        new.replace(path)
        self._board = SummaryWriter(folder / "tensorboard", purge_step=resumed_at + 1)

    def write(self, event: str, step: int, **values: object) -> None:
        """Append one record; numbers also go to TensorBoard as `event/name`."""
        if not self._enabled:
            return
        self._file.write(json.dumps({"event": event, "step": step, **values}, default=str) + "\n")
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._board.add_scalar(f"{event}/{name}", value, step)

    def say(self, text: str) -> None:
        """Print one line on the console."""
        if self._enabled:
            print(text, flush=True)

    def close(self) -> None:
        """Flush and close the files."""
        if self._enabled:
            self._file.close()
            self._board.close()
