# The compiled extension. A tensor is passed as (address, dtype name, bytes), as `memory` of
# extension.py makes it; tensors and tables of the GPU's stages as addresses.
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
        exact_scales: bool,
        power_of_2_scale: bool,
        most_recent: bool,
        amax_epsilon: float,
        margin: int,
        amax_history_len: int,
    ) -> None: ...

KERNEL_SOURCES: str  # a digest of what CUDA kernels that fit were built from

def columns() -> list[str]: ...
def simd_levels() -> list[str]: ...
def simd_level() -> str: ...
def set_simd_level(level: str) -> None: ...

cpu: Any  # a submodule with the stages by the names of backends/ops.py, arguments by keyword
