"""Builds `zerocast_kernels._cuda`, for every target: the file that ../setup.py builds as
`zerocast.backends._cuda`. There is no sdist, since the sources are those of zerocast.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.findall(r'^__version__ = "(.+)"', (ROOT / "zerocast" / "__init__.py").read_text(), re.MULTILINE)[0]


class BuildKernels(build_ext):
    """Takes the kernels from a build of zerocast."""

    def build_extension(self, ext: Extension) -> None:
        """Build zerocast into a temporary folder, and copy the kernels out of it."""
        built, target = Path(self.build_temp).resolve(), Path(self.get_ext_fullpath(ext.name))
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(built)]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"ZEROCAST_CUDA": "1"}, check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(built / "zerocast" / "backends" / target.name, target)


setup(
    version=VERSION,
    install_requires=[f"zerocast=={VERSION}"],
    packages=["zerocast_kernels"],
    ext_modules=[Extension("zerocast_kernels._cuda", sources=[])],
    cmdclass={"build_ext": BuildKernels},
)
