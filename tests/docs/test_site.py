"""The built site in a real browser, from this machine alone: search, pictures, code that fits, nothing from elsewhere."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.browser import CHROMIUM, DRIVER, Browser, Server, browser, serving
from tests.docs.page import ROOT
from tests.docs.test_navigation import NAVIGATION, named

SITE = ROOT / "build/site"
MISSING = [
    *(["chromium"] if CHROMIUM is None else []),
    *(["chromedriver"] if DRIVER is None else []),
    *(["zensical (make docs)"] if find_spec("zensical") is None else []),
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # all pages, on a busy machine
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}"),
]

# The dialog of the search lies in a shadow tree of its own.
DIALOG = "[...document.querySelectorAll('*')].map(e => e.shadowRoot).find(e => e && e.querySelector('dialog'))"
WIDE_CODE = """[...document.querySelectorAll('article pre, article pre > code, article .highlight')]
    .filter(e => e.scrollWidth > e.clientWidth && getComputedStyle(e).overflowX != 'visible')
    .map(e => e.textContent.slice(0, 60))"""
PICTURES = "[...document.querySelectorAll('article img')]"


@pytest.fixture(scope="module")
def site() -> Iterator[Server]:
    """Built as `make docs` does it, and served on a free port."""
    for command in (["docs/collect_pages.py"], ["-m", "zensical", "build", "--clean", "--strict"]):
        built = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stdout + built.stderr
    with serving(SITE) as server:
        yield server


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def pages() -> list[str]:
    """The paths of all pages of the site."""
    return sorted(f"/{path.parent.relative_to(SITE)}/".replace("/./", "/") for path in SITE.rglob("index.html"))


def search(window: Browser, words: str) -> list[tuple[str, str]]:
    """Open the search, type, and return the path with its anchor, and the title, of each result, best first."""
    window.click(window.wait("document.querySelector('.md-search__button')"))
    window.type(window.wait(f"({DIALOG})?.querySelector('input')"), words)
    window.wait(f"({DIALOG}).querySelector('a')")
    script = f"[...({DIALOG}).querySelectorAll('a')].map(e => [e.pathname + e.hash, e.querySelector('h2').textContent])"
    return [(path, title) for path, title in window.run(script)]


@pytest.mark.parametrize(
    ("words", "page", "heading"),
    [
        ("GradScaler", "/quickstart/clipping/", "Clipping and GradScaler"),
        ("load_masters", "/reference/optim/", "zerocast.optim"),
        ("Connection reset by peer", "/operations/", "Operations: nodes that die"),
    ],
)
def test_search_finds_a_page_and_leads_there(
    site: Server, window: Browser, words: str, page: str, heading: str
) -> None:
    window.open(site.url)
    found = search(window, words)
    assert page in [path.partition("#")[0] for path, _ in found], found
    window.click(window.run(f"[...({DIALOG}).querySelectorAll('a')].find(e => e.pathname == arguments[0])", page))
    window.wait("location.pathname == arguments[0] && document.querySelector('article h1')", page)
    assert heading in window.run("document.querySelector('article h1').textContent")
    assert words.lower() in window.run("document.querySelector('article').textContent").lower()


def test_search_says_when_there_is_nothing(site: Server, window: Browser) -> None:
    window.open(site.url)
    window.click(window.wait("document.querySelector('.md-search__button')"))
    window.type(window.wait(f"({DIALOG})?.querySelector('input')"), "xyzzyplugh")
    assert window.wait(f"({DIALOG}).querySelector('[role=status]').textContent") == "No results"


def test_the_whole_navigation_is_shown_by_name(site: Server, window: Browser) -> None:
    """README files below a section are easily taken for its index, and their names left out."""
    window.open(site.url)
    links = "[...document.querySelectorAll('.md-nav--primary a.md-nav__link')].filter(e => !e.hash)"
    found = [(name, path) for name, path in window.run(f"{links}.map(e => [e.textContent.trim(), e.pathname])")]
    places = {
        page: f"/{page.removesuffix('.md').removesuffix('README')}".rstrip("/") + "/" for _, page in named(NAVIGATION)
    }
    assert found == [(name, places[page]) for name, page in named(NAVIGATION)]


def test_every_page_fits_and_loads_from_nowhere_else(site: Server, window: Browser) -> None:
    """In a window of 1280 pixels no code scrolls sideways, and every picture is drawn."""
    assert len(pages()) > 90
    wrong: dict[str, object] = {}
    for page in pages():
        window.open(site.url + page)
        window.wait("document.readyState == 'complete' && document.querySelector('article h1')")
        wide = window.run(WIDE_CODE)
        blank = window.run(f"{PICTURES}.filter(e => !e.complete || !e.naturalWidth).map(e => e.src)")
        if wide or blank:
            wrong[page] = wide, blank
    assert wrong == {}
    assert site.reported == [] and site.missing == []


def test_diagrams_are_drawings(site: Server, window: Browser) -> None:
    for name in ("shards", "cast", "speed", "columnwise", "life", "validity", "fsdp2", "checkpoints"):
        window.open(f"{site.url}/concepts/{name}/")
        window.wait(
            f"location.pathname == '/concepts/{name}/' && document.readyState == 'complete' && {PICTURES}.length"
        )
        assert window.run(f"{PICTURES}.map(e => [e.src.split('/').pop(), e.clientWidth > 600])") == [
            [f"{name}.svg", True]
        ]
        assert window.run("document.querySelectorAll('.mermaid').length") == 0


def test_what_a_page_asks_of_others_is_seen(window: Browser, tmp_path: Path) -> None:
    """Or the tests above would show nothing."""
    (tmp_path / "index.html").write_text(
        "<article><script src=https://unpkg.com/a.js></script><img src=http://a.example/b.png><img src=lost.svg>"
        f"<link rel=stylesheet href=//fonts.example/c.css><pre style='overflow:auto'>{'x' * 400}</pre></article>"
    )
    with serving(tmp_path) as server:
        window.open(server.url)
        window.wait("document.readyState == 'complete'")
        assert len(window.run(WIDE_CODE)) == 1
        assert len(window.run(f"{PICTURES}.filter(e => !e.naturalWidth)")) == 2
        hosts = {"https://unpkg.com/a.js", "http://a.example/b.png", "http://fonts.example/c.css"}
        window.wait("true")
        assert set(server.reported) == hosts and "/lost.svg" in server.missing
