# The compiled extension. A base is an address, a typed base (address, dtype name), a table
# (address, rows).
from typing import Any

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
        scale_group: tuple[int, int],
        scale_rounds_down: bool,
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

cpu: Any  # submodules with the stages by the names of backends/ops.py, arguments by keyword
cuda: Any  # where it was built with nvcc
