"""Readers find every page of the site: once in the navigation, or by a link; and links lead to what is there."""

import importlib.util
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.page import ROOT

_SPEC = importlib.util.spec_from_file_location("collect_pages", ROOT / "docs/collect_pages.py")
assert _SPEC is not None and _SPEC.loader is not None
collect_pages: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(collect_pages)

NAVIGATION: list[dict[str, Any]] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
SOURCES: dict[str, str] = collect_pages.sources()
PAGES = {place for place in SOURCES.values() if place.endswith(".md")}


def listed(entries: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the pages below some entries, in their order."""
    for entry in entries:
        ((_, value),) = entry.items()
        yield from listed(value) if isinstance(value, list) else [value]


def linked(page: str) -> Iterator[str]:
    """Yield the pages that a page of the site links to."""
    (source,) = (path for path, place in SOURCES.items() if place == page)
    text = collect_pages.for_the_site((ROOT / source).read_text(), source, SOURCES)
    for target in filter(None, (found[2] for found in collect_pages.LINK.findall(text))):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def test_nothing_is_listed_twice_or_missing() -> None:
    found = list(listed(NAVIGATION))
    assert sorted(page for page in found if found.count(page) > 1) == []
    assert sorted(set(found) - PAGES) == [], "the builder would say nothing"


def test_every_page_of_docs_and_every_readme_of_the_product_is_listed() -> None:
    wanted = {place for source, place in SOURCES.items() if place in PAGES and not source.startswith("tests/")}
    tables = {page for page in wanted if page.endswith("/table.md")}  # the study shows them
    assert sorted(wanted - tables - set(listed(NAVIGATION))) == []


def test_every_page_can_be_reached() -> None:
    reached, new = set(listed(NAVIGATION)), set(listed(NAVIGATION))
    while new:
        new = {page for one in new for page in linked(one) if page in PAGES} - reached
        reached |= new
    assert sorted(PAGES - reached) == [], "link them from a page that is listed"


@pytest.mark.parametrize("link", ["[a page](nowhere.md)", "![a picture](nowhere.svg)", "[a folder](../nowhere)"])
def test_a_broken_link_ends_the_build(link: str) -> None:
    """Zensical 0.0.73 passes over pictures and folders that are not there."""
    with pytest.raises(ValueError, match=re.escape("docs/install.md links to")):
        collect_pages.for_the_site(f"# Install\n\n{link}\n", "docs/install.md", collect_pages.sources())


def test_what_is_no_page_becomes_text_and_code_stays() -> None:
    links = "[the build](../pyproject.toml), [FSDP2](../zerocast/fsdp2), [home](https://example.com)"
    code = "`layers[0](x)`\n\n```\n[x](y)\n```\n\n<!-- invisible-code-block: python\nlayers[0](x)\n-->\n"
    assert collect_pages.for_the_site(links + code, "docs/install.md", collect_pages.sources()) == (
        f"the build, `pyproject.toml`, [FSDP2](zerocast/fsdp2/README.md), [home](https://example.com){code}"
    )


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/**/*.svg")), ids=lambda path: path.name)
def test_pictures_load_nothing(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert "http" not in text and "<script" not in text and "<title>" in text
