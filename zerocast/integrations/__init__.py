"""Adapters for training hosts, one package a host, and what they replace in a host (`patches.py`).

A host is imported only when its package here is.

Their sources are the folders of `integrations/` at the top of the repository, installed as packages
of this one. In a source tree they are found there.
"""

from pathlib import Path

_root = Path(__file__).parents[2]
if (_root / "csrc").is_dir():
    __path__.append(str(_root / "integrations"))
