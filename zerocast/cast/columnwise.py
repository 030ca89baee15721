"""Columnwise copies that are kept: transposed data and scales, made from the gathered rowwise
bytes, one launch a format.

Weights whose products make their own copies are left out.
"""

import functools
from collections.abc import Sequence

from zerocast.cast.flat_buffer import into_flat_buffer
from zerocast.cast.tables import WeightTable, WeightTables
from zerocast.formats import Columnwise
from zerocast.weight import QuantizedWeight
from zerocast.weight.validity import Validity


class ColumnwiseCopies:
    """The columnwise copies of a list of weights on one device. Storage is allocated at the
    first `make`, and then reused.
    """

    def __init__(self, weights: Sequence[QuantizedWeight], backend: str) -> None:
        self._transposed = [w for w in weights if w.format.columnwise is Columnwise.TRANSPOSE]
        self._weights: list[QuantizedWeight] = []
        self._backend = backend
        self._places: list[tuple[Validity, int]] | None = None  # where the tables have them
        self._tables: list[WeightTable] = []

    def make(self) -> None:
        """Transpose all of them; waits for gathers in flight."""
        tables = self.tables()
        for w in self._weights:
            w.wait()
        for table in tables:
            table.transpose()

    def tables(self) -> list[WeightTable]:
        """The tables of where everything lies now."""
        if self._have_moved():
            self._bind()
        return self._tables

    def _have_moved(self) -> bool:
        if self._places is None or any(validity.places != places for validity, places in self._places):
            return True
        return any(table.moved() for table in self._tables)

    def _bind(self) -> None:
        self._weights = [w for w in self._transposed if not w.state.columnwise_on_demand]
        for name in ("columnwise_data", "columnwise_scale_inv"):
            into_flat_buffer([w for w in self._weights if w.state.buffers[name] is None], name)
        self._tables = []
        if self._weights:
            make = functools.partial(WeightTable, of_whole_weights=True)
            tables = WeightTables(self._weights[0].device, self._backend, make)
            for w in self._weights:
                tables.of(w).add(w)
            self._tables = tables.freeze()
        validities = {id(w.state.validity): w.state.validity for w in self._transposed}
        self._places = [(validity, validity.places) for validity in validities.values()]
