"""Gathers the prose beside the code into one folder, build/pages, from which the site is built.

    python docs/collect_pages.py

Every README and the other prose of the repository become pages at their own paths; pages of docs/
lie at the root of the site. Links are written so that they work in the repository and are rewritten
for the site: a link to a folder becomes one to its README, and a link to a file that is no page
becomes plain text. The folder is made anew; the tool that builds the site knows of nothing else.
"""

import os
import posixpath
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build/pages"
FOLDERS = ("zerocast", "csrc", "integrations", "examples", "tests")
ASSETS = ("png", "svg", "css")
CODE = r"`(?:[^`\n]|\n(?!\s*\n))+`"  # `layers[0](x)` is no link
LINK = re.compile(CODE + r"|(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s#:]+)(#[^()\s]*)?\)")
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$|^<!--.*?-->", re.MULTILINE | re.DOTALL)


def sources() -> dict[str, str]:
    """Files of the repository (pages, pictures, styles) and where they lie in the site."""
    found = [*ROOT.glob("*.md")]
    for folder in ("docs", *FOLDERS):
        found += [path for ending in ("md", *ASSETS) for path in (ROOT / folder).rglob(f"*.{ending}")]
    paths = sorted(path.relative_to(ROOT).as_posix() for path in found)
    return {path: path.removeprefix("docs/") for path in paths}


def for_the_site(markdown: str, source: str, places: dict[str, str]) -> str:
    """Return the text of the page `source` with links that hold in the site; what is inside fences
    and comments stays.

    Raises ValueError for a link or a picture that leads nowhere in the repository.
    """

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        if target is None:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / path).exists():
            raise ValueError(f"{source} links to {target}, and there is no {path}: correct the link, or add the file")
        place = places.get(path) or places.get(posixpath.join(path, "README.md"))
        if place is None:
            return text if posixpath.basename(path) in text else f"{text}, `{path}`"
        return f"{image}[{text}]({os.path.relpath(place, posixpath.dirname(places[source]))}{anchor or ''})"

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(link, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(link, markdown[end:])])


def main() -> None:
    """Write the pages of the site into an empty `build/pages`, and the files that they show."""
    places = sources()
    shutil.rmtree(PAGES, ignore_errors=True)
    for source, place in places.items():
        target = PAGES / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".md"):
            target.write_text(for_the_site((ROOT / source).read_text(), source, places))
        else:
            shutil.copyfile(ROOT / source, target)


if __name__ == "__main__":
    main()
