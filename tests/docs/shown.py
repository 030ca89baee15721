"""What commands print, as pages show it: between two comments, the first of which is the command.

    <!-- begin: zerocast plan llama3-8b --sweep -->
    ...
    <!-- end -->

`python -m tests.docs.shown` (`make shown`) runs the commands and writes what they print today.
"""

import contextlib
import io
import re
import shlex
from pathlib import Path

from tests.docs.page import markdown_files
from zerocast.cli import main

SHOWN = re.compile(r"(<!-- begin: zerocast (.*?) -->\n```text\n)(.*?)(```\n<!-- end -->)", re.DOTALL)


def commands() -> list[tuple[Path, str, str]]:
    """(page, arguments, text) of everything that is shown so."""
    pages = ((path, path.read_text()) for path in markdown_files())
    return [(path, found[2], found[3]) for path, text in pages for found in SHOWN.finditer(text)]


def printed(arguments: str) -> str:
    """The output of a command line, which must end with status 0."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(shlex.split(arguments)) == 0
    return out.getvalue()


if __name__ == "__main__":
    for page in dict.fromkeys(path for path, _, _ in commands()):
        page.write_text(SHOWN.sub(lambda found: f"{found[1]}{printed(found[2])}{found[4]}", page.read_text()))
