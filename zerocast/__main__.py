"""`python -m zerocast` runs the command `zerocast`."""

import sys

from zerocast.cli import main

if __name__ == "__main__":
    sys.exit(main())
