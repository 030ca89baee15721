"""Builds the extension `zerocast.backends._C` and the CUDA kernels, `zerocast.backends._cuda`, and
says where the sources are; everything else is declared in pyproject.toml.

The kernels are built where nvcc and a GPU are found, for that GPU; with ZEROCAST_CUDA=1 for every
target, with ZEROCAST_CUDA=0 not at all. No torch is needed. `kernels/setup.py` makes a package of
them.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext

# Exact bits need exact arithmetic: no fused multiply-add. The two -fno flags change no value:
# without errno and traps, square roots and comparisons vectorise.
EXACT = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# Apple's compiler has no OpenMP; one thread then does the work.
OPENMP = ["-fopenmp"] if sys.platform.startswith("linux") else []

CSRC = Path("csrc")
CUDA_API = CSRC / "api" / "cuda.cpp"
SHARED = [CSRC / "api" / f"{name}.cpp" for name in ("descriptor", "enums", "memory")]
SOURCES = [CSRC / "python_api.cpp", *{*CSRC.glob("api/*.cpp")} - {CUDA_API}, *CSRC.glob("cpu/*.cpp")]
KERNELS = sorted(CSRC.glob("cuda/*.cu"))
HEADERS = [*CSRC.rglob("*.h"), *CSRC.rglob("*.inc"), *CSRC.rglob("*.cuh"), *KERNELS, CUDA_API]
# What the kernels are built from. Both modules hold its digest, and kernels of others are refused.
KERNEL_SOURCES = sorted({*SHARED, CUDA_API, *CSRC.glob("*.h"), *CSRC.glob("api/*.h"), *CSRC.glob("cuda/*")})
KERNEL_DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in KERNEL_SOURCES)).hexdigest()[:16]
JOBS = int(os.environ.get("ZEROCAST_BUILD_JOBS", os.cpu_count() or 1))

# Family- and architecture-specific targets: only those of Blackwell have the FP4 conversion. PTX is
# for what comes after.
ALL_TARGETS = ["80", "90a", "100f", "120f", "90+PTX"]
FAMILY_OF_MAJOR = {"8": "80", "9": "90a", "10": "100f", "12": "120f"}


def find_nvcc() -> str | None:
    """The compiler of CUDA_HOME, else of the path, else of the usual place."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [f"{home}/bin" for home in homes] + [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return next(filter(None, (shutil.which("nvcc", path=place) for place in places)), None)


def local_targets() -> list[str]:
    """The targets of the GPUs that the driver shows here."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return []
    return sorted({FAMILY_OF_MAJOR.get(capability.split(".")[0], "90+PTX") for capability in found})


def cuda_targets(nvcc: str | None) -> list[str]:
    """What to build for; empty, with one line that says why, for a build without the GPU part."""
    preference = os.environ.get("ZEROCAST_CUDA", "")
    if preference == "1" and nvcc is None:
        sys.exit("ZEROCAST_CUDA=1 asks for the CUDA kernels, and no nvcc is found: set CUDA_HOME")
    targets = ALL_TARGETS if preference == "1" else [] if preference == "0" or nvcc is None else local_targets()
    if not targets:
        reason = "ZEROCAST_CUDA=0" if preference == "0" else "no nvcc is found" if nvcc is None else "no GPU is found"
        print(f"zerocast: building without CUDA kernels ({reason})", file=sys.stderr)
    return targets


def code_flag(target: str) -> str:
    """`-gencode` of a target such as 90a, or 90+PTX."""
    number, _, ptx = target.partition("+")
    return f"-gencode=arch=compute_{number},code={'compute' if ptx else 'sm'}_{number}"


def compile_kernels(nvcc: str, targets: list[str], folder: Path) -> list[str]:
    """Object files of all kernels."""
    flags = ["-std=c++17", "-O3", "-Icsrc", "--fmad=false", "-Xcompiler=-fPIC,-O3", "-Wno-deprecated-gpu-targets"]
    flags += [f'-DZC_CUDA_TARGETS="{" ".join(targets)}"', *map(code_flag, targets)]
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.cu.o"
        subprocess.run([nvcc, *flags, "-c", str(source), "-o", str(target)], check=True)
        return str(target)

    with ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(compile_one, KERNELS))


def library_folders(nvcc: str) -> list[str]:
    """Where nvcc itself would look for the CUDA runtime; it may be a wrapper that lies
    elsewhere.
    """
    dry = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True, check=True)
    lines = [line for line in dry.stderr.splitlines() if line.startswith("#$ LIBRARIES=")]
    return re.findall(r'"-L([^"]+)"', "".join(lines))


class BuildExtension(build_ext):
    """Compiles the kernels, where there is a compiler for them, before the rest."""

    def run(self) -> None:
        """Build both modules, or leave the kernels out, those of an earlier build too."""
        nvcc = find_nvcc()
        targets = cuda_targets(nvcc)
        if targets and nvcc:
            CUDA.extra_objects += compile_kernels(nvcc, targets, Path(self.build_temp))
            CUDA.depends += CUDA.extra_objects
            CUDA.library_dirs += library_folders(nvcc)
        else:
            self.extensions.remove(CUDA)
            for folder in (self.build_lib, *(["."] if self.inplace else [])):
                Path(folder, self.get_ext_filename(CUDA.name)).unlink(missing_ok=True)
        super().run()


def extension(name: str, sources: list[Path], *, options: list[str], libraries: list[str]) -> Pybind11Extension:
    """A compiled module of these sources."""
    return Pybind11Extension(
        f"zerocast.backends.{name}",
        sources=sorted(map(str, sources)),
        depends=sorted(map(str, HEADERS)),
        include_dirs=[str(CSRC)],
        define_macros=[("ZC_KERNEL_SOURCES", f'"{KERNEL_DIGEST}"')],
        cxx_std=17,
        extra_compile_args=["-O3", "-Wall", "-Wextra", *options, *EXACT],
        extra_link_args=options,
        libraries=libraries,
    )


CPU = extension("_C", SOURCES, options=OPENMP, libraries=[])
CUDA = extension("_cuda", [*SHARED, CUDA_API], options=[], libraries=["cudart_static", "dl", "rt", "pthread"])


def repository() -> str | None:
    """The address of the repository that a release is built from: a workflow knows it."""
    server, name = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    return f"{server}/{name}" if server and name else None


def readme(url: str | None) -> str:
    """README.md; with absolute links where there is a repository, for a package index shows the
    page alone.
    """
    text = Path("README.md").read_text(encoding="utf-8")
    if url is None:
        return text
    text = re.sub(r"(!\[[^\]]*\]\()(?=\w[^():]*\))", rf"\1{url}/raw/HEAD/", text)
    return re.sub(r"(\]\()(?=\w[^():]*\))", rf"\1{url}/blob/HEAD/", text)


def urls(url: str | None) -> dict[str, str]:
    """What a package index links to."""
    pages = {
        "Source": "",
        "Documentation": "/tree/HEAD/docs",
        "Changelog": "/blob/HEAD/CHANGELOG.md",
        "Issues": "/issues",
    }
    return {name: url + page for name, page in pages.items()} if url else {}


ParallelCompile(default=JOBS).install()

# Each folder of integrations/ is installed as a package of zerocast.integrations.
HOSTS = {f"zerocast.integrations.{host}": f"integrations/{host}" for host in find_packages("integrations")}

setup(
    long_description=readme(repository()),
    long_description_content_type="text/markdown",
    project_urls=urls(repository()),
    packages=[*find_packages(include=["zerocast*"]), *HOSTS],
    package_dir=HOSTS,
    ext_modules=[CPU, CUDA],
    cmdclass={"build_ext": BuildExtension},
)
