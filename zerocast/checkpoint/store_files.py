"""The files of torch.distributed.checkpoint in a store that fsspec opens. Importing this imports
fsspec.
"""

import os
from typing import Any

from fsspec.core import url_to_fs
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem


class StoreFiles(FileSystem):
    """The files of a checkpoint below a URL, which fsspec opens."""

    def init_path(self, path: str | os.PathLike[str], **options: Any) -> str:
        """Open the file system of a URL; the path in it, since not all of them take a URL."""
        self.fs, inner = url_to_fs(os.fspath(path), **options)
        return str(inner)
