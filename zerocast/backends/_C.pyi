# The compiled extension. A base is an address; a typed base is (address, dtype name); a table is (address, rows).
from typing import TypeAlias

_Typed: TypeAlias = tuple[int, str]
_Table: TypeAlias = tuple[int, int]

class Format:
    def __init__(
        self,
        *,
        element: str,
        scale_rule: str,
        columnwise: str,
        amax_policy: str,
        block: tuple[int, int],
        columnwise_block: tuple[int, int],
        power_of_2_scale: bool,
        most_recent: bool,
        amax_epsilon: float,
        margin: int,
        amax_history_len: int,
    ) -> None: ...

def columns() -> list[str]: ...
def simd_levels() -> list[str]: ...
def simd_level() -> str: ...
def set_simd_level(level: str) -> None: ...
def encode(element: str, source: int, codes: int, numel: int) -> None: ...
def decode(element: str, codes: int, values: int, numel: int) -> None: ...
def round_nominal(nominal: str, source: int, words: int, numel: int) -> None: ...

class cpu:  # a submodule
    @staticmethod
    def partial_amax(
        fmt: Format,
        nominal: str,
        masters: list[int],
        master_dtypes: list[str],
        table: _Table,
        packed: _Typed,
        threads: int,
        /,
    ) -> None: ...
    @staticmethod
    def compute_scales(
        fmt: Format,
        packed: _Typed,
        table: _Table,
        row_scales: list[int],
        column_scales: list[int],
        amaxes: list[int],
        scales: list[int],
        threads: int,
        /,
    ) -> None: ...
    @staticmethod
    def partial_cast(
        fmt: Format,
        nominal: str,
        masters: list[int],
        master_dtypes: list[str],
        packed: _Typed,
        amaxes: list[int],
        scales: list[int],
        table: _Table,
        row_data: list[int],
        column_data: list[int],
        threads: int,
        /,
    ) -> None: ...
    @staticmethod
    def roll_history(
        fmt: Format, table: _Table, amaxes: list[int], scales: list[int], histories: list[int], /
    ) -> None: ...
    @staticmethod
    def transpose(
        fmt: Format,
        table: _Table,
        row_data: list[int],
        row_scales: list[int],
        column_data: list[int],
        column_scales: list[int],
        threads: int,
        /,
    ) -> None: ...
    @staticmethod
    def dequantize(
        fmt: Format,
        data: _Typed,
        scale_inv: int,
        amax: int,
        rows: int,
        columns: int,
        columnwise: bool,
        out: _Typed,
        threads: int,
        /,
    ) -> None: ...
    @staticmethod
    def adam_step(
        master: int,
        grad: _Typed,
        exp_avg: _Typed,
        exp_avg_sq: _Typed,
        segments: _Table,
        scalars: int,
        clip: float,
        threads: int,
        /,
    ) -> None: ...
    @staticmethod
    def adam_amax(
        fmt: Format,
        nominal: str,
        masters: list[int],
        grads: list[_Typed],
        exp_avgs: list[_Typed],
        exp_avg_sqs: list[_Typed],
        table: _Table,
        groups: int,
        scalars: int,
        clip: float,
        packed: _Typed,
        threads: int,
        /,
    ) -> None: ...
