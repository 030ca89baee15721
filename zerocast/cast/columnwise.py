"""ColumnwiseCopies: transposed data and scales that are kept, made from gathered rowwise bytes.

The gathers of all frameworks end here: the copies are made, and the weights are marked as gathered.
"""

import functools
from collections.abc import Sequence

from zerocast.cast.tables import StorageSnapshot, WeightTable, WeightTables
from zerocast.formats import Columnwise
from zerocast.weight import QuantizedWeight
from zerocast.weight.buffers import into_flat_buffer
from zerocast.weight.validity import Validity


class ColumnwiseCopies:
    """The columnwise copies of weights on one device whose bytes are gathered together.

    Storage is allocated at the first `make`, and then reused. Weights whose products make their own
    copies have none here. One launch makes the copies of all weights of a format.

    Args:
        weights: the weights that are gathered, also those without a copy.
        backend: the name of the backend that makes the copies.
        validity: the validity of these weights, if no others share it. It is then marked once. None
            to mark weight by weight.
    """

    def __init__(self, weights: Sequence[QuantizedWeight], backend: str, validity: Validity | None = None) -> None:
        self._all = list(weights)
        self._validity = validity
        self._transposed = [w for w in weights if w.format.columnwise is Columnwise.TRANSPOSE]
        self._weights: list[QuantizedWeight] = []
        self._backend = backend
        # The validities of the weights, with their `storage_version` when the tables were made.
        self._storage_versions: list[tuple[Validity, int]] | None = None
        self._tables: list[WeightTable] = []
        # Of the weights in `_tables`, when these were made.
        self._memory = StorageSnapshot(())

    def make(self, marks: bool = True) -> None:
        """Make the copies of the last cast, whose bytes have been gathered. Waits for gathers in
        flight. `marks` is True to mark all weights as gathered, False if the caller does.
        """
        tables = self.tables()
        for weight in self._weights:
            weight.wait()
        for table in tables:
            table.transpose()
        if not marks:
            return
        if self._validity is not None:
            self._validity.copied()
            return
        for weight in self._all:
            weight.state.mark_columnwise()

    def tables(self) -> list[WeightTable]:
        """Return the tables for the current memory."""
        must_bind = self._storage_versions is None
        for validity, version in self._storage_versions or ():
            must_bind = must_bind or validity.storage_version != version
        if must_bind or (self._tables and self._memory.has_moved()):
            self._bind()
        return self._tables

    def _bind(self) -> None:
        self._weights = [w for w in self._transposed if not w.state.columnwise_on_demand]
        for name in ("columnwise_data", "columnwise_scale_inv"):
            into_flat_buffer([w for w in self._weights if w.state.buffers[name] is None], name)
        self._tables = []
        if self._weights:
            make = functools.partial(WeightTable, of_whole_weights=True)
            tables = WeightTables(self._weights[0].device, self._backend, make)
            for w in self._weights:
                for matrix in w.matrices():
                    tables.of(w).add(matrix)
            self._tables = tables.freeze()
        self._memory = StorageSnapshot.joined(table.snapshot for table in self._tables)
        validities = {id(w.state.validity): w.state.validity for w in self._transposed}
        self._storage_versions = [(validity, validity.storage_version) for validity in validities.values()]
