"""A release has one version, and a first page whose links work where nothing but that page is shown."""

import functools
import os
import re
import subprocess
import sys

import zerocast
from tests.docs.page import ROOT

URL = "https://host.example/team/project"
BUILT_FROM = {"GITHUB_SERVER_URL": "https://host.example", "GITHUB_REPOSITORY": "team/project"}


@functools.cache
def first_page(by_a_release: bool = False, folder: str = ".") -> str:
    """Return what setup.py says of the version, and the first page of the package."""
    command = [sys.executable, "setup.py", "--quiet", "--version", "--long-description"]
    env = {name: value for name, value in os.environ.items() if name not in BUILT_FROM}
    env |= BUILT_FROM if by_a_release else {}
    return subprocess.run(command, cwd=ROOT / folder, env=env, capture_output=True, text=True, check=True).stdout


def test_version_is_written_once_and_cited():
    assert f"{zerocast.__version__}\n" in first_page()
    assert f"{zerocast.__version__}\n" in first_page(folder="kernels")
    assert f"version: {zerocast.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_links_of_a_released_page_are_absolute_and_lead_to_files():
    text = re.sub(r"```.*?```", "", first_page(by_a_release=True), flags=re.DOTALL)
    links = re.findall(r"\]\(([^()]*)\)", text)
    files = [link.removeprefix(f"{URL}/").split("/", 2)[2].partition("#")[0] for link in links if link.startswith(URL)]
    assert len(files) > 25 and all((ROOT / file).exists() for file in files)
    assert all(link.startswith(("https://", "#")) for link in links)


def test_a_page_built_elsewhere_keeps_its_links():
    assert (ROOT / "README.md").read_text() in first_page()
