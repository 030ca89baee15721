"""The CUDA kernels: what they were built for, and that Blackwell converts to FP4 in hardware, Hopper by arithmetic."""

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.stages import row, table
from zerocast import get_format
from zerocast.backends.extension import memory

launch = pytest.importorskip("zerocast.backends.cuda.launch", exc_type=ImportError)


def targets() -> list[str]:
    found: list[str] = launch.kernels.targets().split()
    return found


def disassembler() -> str:
    """Return the path of cuobjdump, from the CUDA toolkit or from Triton."""
    found = shutil.which("cuobjdump")
    if found is None:
        triton = pytest.importorskip("triton", reason="neither a cuobjdump nor Triton, which brings one")
        found = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    return found


def dumped(target: str, *options: str) -> str:
    """What the disassembler says of the code for a target."""
    command = [disassembler(), *options, "--gpu-architecture", f"sm_{target}", launch.kernels.__file__]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def kernels(target: str) -> set[str]:
    """The mangled names of all kernels, in no time."""
    return set(re.findall(r"Function (\S+):", dumped(target, "--dump-resource-usage")))


@functools.cache
def machine_code(target: str) -> str:
    """The instructions of every kernel."""
    return dumped(target, "--dump-sass")


def casts_to_fp4(target: str) -> str:
    """The instructions of one of the kernels that write E2M1."""
    name = min(name for name in kernels(target) if "cast_kernel" in name and "E2M1E" in name)
    return dumped(target, "--dump-sass", "--function", name)


def without_our_names(code: str) -> str:
    """Our type is in the names of kernels."""
    return code.replace("E2M1E", "")


COMPILED = [target for target in targets() if "+" not in target]


@pytest.mark.parametrize("target", COMPILED)
def test_blackwell_converts_in_hardware_and_older_ones_do_not(target: str) -> None:
    assert bool(re.search(r"F2FP\S*E2M1", casts_to_fp4(target))) == (target in ("100f", "120f"))


@pytest.mark.slow
@pytest.mark.parametrize("target", [target for target in COMPILED if target in ("80", "90a")])
def test_no_kernel_for_older_ones_has_such_an_instruction(target: str) -> None:
    assert "E2M1" not in without_our_names(machine_code(target))


def test_every_kernel_is_there_for_every_target() -> None:
    first, *others = map(kernels, COMPILED)
    assert len(first) > 100
    assert all(other == first for other in others)


def memory_accesses_of_callees(code: str) -> Iterator[str]:
    """Instructions that reach global or shared memory, between an address that is called and the return. The stack (LDL and
    STL) is left out: a division that ptxas calls may spill a register to it.
    """
    for kernel in re.split(r"Function : ", code)[1:]:
        called = {int(address, 16) for address in re.findall(r"CALL\.REL\S* (?:R\d+ )?0x([0-9a-f]+)", kernel)}
        inside = False
        for address, instruction in re.findall(r"/\*([0-9a-f]{4,6})\*/ +([^;]+);", kernel) if called else ():
            inside |= int(address, 16) in called
            if inside and re.search(r"\b(LD|ST|ATOM|RED)[GS]?\b", instruction):
                yield f"{kernel.split(maxsplit=1)[0]} at {address}: {instruction}"
            inside &= not instruction.startswith("RET")


@pytest.mark.slow
@pytest.mark.parametrize("target", [target for target in COMPILED if target != "80"])
def test_nothing_is_called_but_arithmetic(target: str) -> None:
    """All functions of the kernels are inlined; only divisions and square roots are called.

    ptxas 13.0 keeps values that all lanes share in uniform registers across a call that only some
    lanes make. The called function overwrites these registers, and the other lanes then wrote to
    wild addresses. The divisions and roots that ptxas itself calls are safe. For sm_80 it also
    writes the return from a shuffle as a call, so that target is left out.
    """
    assert not list(memory_accesses_of_callees(machine_code(target)))


def ordinals(kind: str, fmt: str, **columns: int) -> list[tuple[int, int]]:
    rows = table(row(**columns))
    found: list[tuple[int, int]] = launch.kernels.ordinals(kind, launch.format_of(get_format(fmt)), memory(rows))
    return found


@pytest.mark.parametrize("fmt", ["fp8_current", "fp8_block", "nvfp4", "mxfp8", "mxfp8:block=32x32"])
def test_thread_blocks_are_those_of_the_owned_span(fmt: str) -> None:
    """A 64th of a weight needs about a 64th of the blocks, wherever it lies, and an empty span none."""
    numel = 4096 * 4096
    shape = {"rows": 4096, "columns": 4096}
    for kind in ("amax", "cast"):
        ((_, whole),) = ordinals(kind, fmt, **shape, start=0, numel=numel)
        ((first, part),) = ordinals(kind, fmt, **shape, start=numel // 2, numel=numel // 64)
        assert whole // 64 <= part <= whole // 64 + 64
        assert first in (0, whole // 2)
        assert ordinals(kind, fmt, **shape, start=0, numel=0) == [(0, 0)]


def test_extents_beyond_32_bits_are_refused_where_blocks_are_counted_in_them() -> None:
    huge = {"rows": 1, "columns": 2**33, "start": 0, "numel": 2**33}
    with pytest.raises(ValueError, match="at most"):
        ordinals("cast", "fp8_block", **huge)
    assert ordinals("cast", "fp8_current", **huge)[0][1] == 2**33 // (4 * 16 * 256)
