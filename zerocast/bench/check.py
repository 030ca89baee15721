"""Nobody times a wrong kernel: what a row writes is compared with the reference backend, byte for byte, before it is timed."""

from itertools import zip_longest

import torch
from torch import Tensor

from zerocast.bench.job import Place
from zerocast.bench.row import Row
from zerocast.bench.workload import Workload

REFERENCE = "reference"


class WrongBytesError(Exception):
    """A backend wrote other bytes than the reference; the message says where."""


def check(row: Row, workload: Workload, place: Place) -> None:
    """Run the row's work once on `workload`, by its backend and by the reference, from the same inputs.

    Raises WrongBytesError if anything that was written differs. Buffers start full of random bytes, the same for both.
    """
    written = []
    for backend in (place.backend, REFERENCE):
        job = row.work.build(workload, row.fmt, place.with_backend(backend))
        job.run()
        written.append(job.written())
    for index, (found, expected) in enumerate(zip_longest(*written)):
        if found is None or expected is None or not torch.equal(_bytes(found), _bytes(expected)):
            raise WrongBytesError(
                f"{row.name} by {place.backend} on {workload.name}: buffer {index} of {len(written[1])} differs from the reference"
            )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
