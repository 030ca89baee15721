"""The command line: `zerocast <command>`, also as `python -m zerocast <command>`.

One module a command. It needs the extra `cli`, whose packages the library itself never imports.
"""

import sys
from collections.abc import Sequence

EXTRA = ("matplotlib", "tyro")  # safetensors is imported when such a file is met


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    try:
        from zerocast.cli.app import app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        print(f"the command line needs {package}: pip install 'zerocast[cli]'", file=sys.stderr)
        return 2
    return app(arguments)
