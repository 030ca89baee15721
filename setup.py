"""Builds the extension `zerocast._C`; everything else is declared in pyproject.toml."""

import os
import sys
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

# Exact bits need exact arithmetic: no fused multiply-add. The two -fno flags change no value: without errno and traps, square
# roots and comparisons vectorise.
EXACT = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# Apple's compiler has no OpenMP; one thread then does the work.
OPENMP = ["-fopenmp"] if sys.platform.startswith("linux") else []

CSRC = Path("csrc")
SOURCES = [CSRC / "python_api.cpp", *CSRC.glob("api/*.cpp"), *CSRC.glob("cpu/*.cpp")]
HEADERS = [*CSRC.rglob("*.h"), *CSRC.rglob("*.inc")]

ParallelCompile("ZEROCAST_BUILD_JOBS", default=os.cpu_count() or 1).install()

setup(
    ext_modules=[
        Pybind11Extension(
            "zerocast._C",
            sources=sorted(map(str, SOURCES)),
            depends=sorted(map(str, HEADERS)),
            include_dirs=[str(CSRC)],
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra", *OPENMP, *EXACT],
            extra_link_args=OPENMP,
        )
    ],
)
