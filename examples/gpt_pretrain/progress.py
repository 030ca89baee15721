"""Progress of several runs: bars on a terminal, occasional lines elsewhere."""

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from examples.gpt_pretrain.run_log import Record


class Progress:
    """One bar for each run, or ten lines for each if the console is not a terminal."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
        self._bars = Bars(TextColumn("{task.description:>11}"), *columns, console=console)
        self._tasks = {name: self._bars.add_task(name, start=False, total=None, note="waits") for name in names}
        self._console = console
        self._printed: dict[str, int] = {}  # tenths of each run that were printed

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def start(self, name: str) -> None:
        """Start the clock of a run, or restart it."""
        self._bars.reset(self._tasks[name], note="starts")

    def update(self, name: str, records: Sequence[Record]) -> None:
        """Show the progress of a run, according to its records."""
        losses = [record for record in records if record["event"] == "train"]
        if not losses:
            return
        step, total = losses[-1]["step"], records[0]["config"]["steps"]
        note = f"loss {losses[-1]['loss']:.3f}  {losses[-1]['tokens_per_s']:,.0f} tokens/s"
        self._bars.update(self._tasks[name], completed=step, total=total, note=note)
        tenths = 10 * step // total
        if not self._console.is_terminal and tenths != self._printed.get(name, 0):
            self._printed[name] = tenths
            self._console.print(f"{name:>11}  step {step}/{total}  {note}", highlight=False)

    def stop(self, name: str) -> None:
        """Stop the clock of a run."""
        self._bars.stop_task(self._tasks[name])
