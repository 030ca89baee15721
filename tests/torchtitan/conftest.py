"""Ranks are forked with torchtitan imported, which takes seconds: the one that is installed, or that of the folder that
ZEROCAST_TORCHTITAN names (README.md).
"""

import os
import sys

from tests.workers import preload

if folder := os.environ.get("ZEROCAST_TORCHTITAN"):
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])  # of the server that forks

preload("tests.torchtitan.training")
preload("tests.torchtitan.trainer_on_cpu")
