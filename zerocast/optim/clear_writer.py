"""ClearWriter: torch.distributed.checkpoint's writer of folders, with the disk's own words when it fails.

torch.save answers a write that failed with "unexpected pos 704 vs 598"; that the disk is full is then only in the exception's
context, which does not travel to other ranks.
"""

from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter


class ClearWriter(FileSystemWriter):
    """A FileSystemWriter that raises the OSError behind what torch made of it."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch."""
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            raise _first_os_error(error) from error


def _first_os_error(error: BaseException) -> BaseException:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return OSError(cause.errno, cause.strerror)
        cause = cause.__cause__ or cause.__context__
    return error


def reasons(error: CheckpointException) -> str:
    """What each rank that failed says, without tracebacks."""
    return "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in sorted(error.failures.items()))
