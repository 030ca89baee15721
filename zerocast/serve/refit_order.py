"""RefitOrder: refits of a run are numbered, and a receiver only goes forward."""

from zerocast.serve.bucket import ASK
from zerocast.serve.refit_message import FULL, Header, RefitError


class RefitOrder:
    """The refits that have begun at a receiver, so that none comes late or twice."""

    def __init__(self) -> None:
        # The newest refit that has begun, by run.
        self._begun: dict[str, int] = {}
        # The run of the last complete refit, and the runs that had the complete ones before.
        self._present: str | None = None
        self._over: set[str] = set()

    @property
    def has_begun(self) -> bool:
        """True if a refit has begun, of any run."""
        return bool(self._begun)

    def check(self, header: Header, complete: tuple[str, int] | None) -> None:
        """Raise RefitError unless the refit of this header may begin.

        Args:
            header: the first header of a refit.
            complete: the run and refit of the receiver's bytes; None if they are of no refit.
        """
        run = header["run"]
        refit = header["refit"]
        newest = self._begun.get(run)
        if run in self._over:
            raise RefitError(
                f"refit {refit} of a run that is over on this rank arrived, as another run's refit was complete since: {ASK}"
            )
        if newest is not None and refit <= newest:
            raise RefitError(
                f"refit {refit} arrived late or again, as refit {newest} of its run has begun on this rank: {ASK}"
            )
        if header["kind"] == FULL:
            return
        if complete is None:
            raise RefitError(f"changes came to a receiver without a complete refit: {ASK}")
        if (run, header["since"]) != complete:
            of_run = "" if run == complete[0] else "another run's "
            raise RefitError(
                f"changes since {of_run}refit {header['since']} came to a receiver of refit {complete[1]}: one was missed, {ASK}"
            )

    def begin(self, header: Header) -> None:
        """Note that the refit of this header has begun."""
        self._begun[header["run"]] = header["refit"]

    def complete(self, run: str) -> None:
        """Note that a refit of this run is complete, which ends the run before it. A refit that has
        only begun ends none, since its first message may be a stray one.
        """
        if self._present is not None and self._present != run:
            self._over.add(self._present)
        self._present = run
