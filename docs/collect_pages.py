"""Hooks of mkdocs that gather the prose beside the code into the site.

Every README and the other prose of the repository become pages at their own paths; pages of docs/
lie at the root of the site. Links are written so that they work in the repository and are rewritten
for the site: a link to a folder becomes one to its README, and a link to a file that is no page
becomes plain text.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("zerocast", "csrc", "integrations", "examples", "tests")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s#:]+)(#[^()\s]*)?\)")
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def prose() -> list[str]:
    """The repository paths of all gathered files outside docs/."""
    found = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        found += [*(ROOT / folder).rglob("*.md"), *(ROOT / folder).rglob("*.png")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the prose beside the code."""
    for path in prose():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Make the links of a page hold in the site; what is inside fences stays."""
    source = page.file.src_uri
    here = posixpath.dirname(Path(str(page.file.abs_src_path)).relative_to(ROOT).as_posix())

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(here, target))
        if not (ROOT / path).exists():
            return match[0]  # mkdocs says that it is broken
        uri = site_uri(path, files)
        if uri is None:
            return text if posixpath.basename(path) in text else f"{text}, `{path}`"
        return f"{image}[{text}]({os.path.relpath(uri, posixpath.dirname(source))}{anchor or ''})"

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(link, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(link, markdown[end:])])


def site_uri(path: str, files: Files) -> str | None:
    """Where a path of the repository is in the site."""
    for candidate in (path, posixpath.join(path, "README.md")):
        uri = candidate.removeprefix("docs/")
        if files.get_file_from_path(uri) is not None:
            return uri
    return None
