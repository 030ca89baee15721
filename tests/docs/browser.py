"""A browser without a window, driven over WebDriver: chromedriver and chromium from the distribution's packages."""

import contextlib
import http.server
import json
import re
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the name that the standard gives to references
# What a page may load: its own host, and what stands in the page itself. All else is reported, and not loaded.
POLICY = "default-src 'self' 'unsafe-inline' data: blob:; report-uri /reported"


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; browsers are told to load from nowhere else, and their reports are kept."""

    server: "Server"

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def do_POST(self) -> None:
        report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["csp-report"]
        self.server.reported.append(report["blocked-uri"])
        self.send_response(204)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.server.missing.append(self.path)
        super().send_error(code, message, explain)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    """A folder on a free port of this machine, and what its pages asked for in vain."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        self.reported: list[str] = []  # addresses of other hosts that pages asked for
        self.missing: list[str] = []  # paths that pages asked for and that are not there

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A folder on a free port of this machine."""
    with Server(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class Browser:
    """One window. Errors of the driver are RuntimeErrors with what it said."""

    def __init__(self, url: str, width: int, height: int, profile: str) -> None:
        self._url = url
        options = {
            "binary": CHROMIUM,
            "args": [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"],
        }
        wanted = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}
        self._session = f"/session/{self._ask('POST', '/session', {'capabilities': wanted})['sessionId']}"

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """The value of a JavaScript expression, in which `arguments` are those given."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": f"return {script}", "args": list(args)})

    def type(self, element: Any, keys: str) -> None:
        self._ask("POST", f"{self._session}/element/{element[ELEMENT]}/value", {"text": keys})

    def click(self, element: Any) -> None:
        self._ask("POST", f"{self._session}/element/{element[ELEMENT]}/click", {})

    def wait(self, script: str, *args: Any, timeout: float = 60.0) -> Any:
        """The first value of an expression that is true; AssertionError if there is none in time (s)."""
        end = time.monotonic() + timeout
        while not (found := self.run(script, *args)):
            assert time.monotonic() < end, f"not within {timeout} s: {script}"
            time.sleep(0.1)
        return found

    def close(self) -> None:
        self._ask("DELETE", self._session)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {json.load(error)['value']['message']}") from None


@contextlib.contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """A window of so many pixels, with an empty profile."""
    with contextlib.ExitStack() as stack:
        profile = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        driver = subprocess.Popen([str(DRIVER), "--port=0"], stdout=subprocess.PIPE, text=True)
        stack.callback(_end, driver)
        port = _first(driver, re.compile(r"successfully on port (\d+)"))
        window = Browser(f"http://127.0.0.1:{port}", width, height, profile)
        stack.callback(window.close)
        yield window


def _first(process: subprocess.Popen[str], pattern: re.Pattern[str]) -> str:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        if found := pattern.search(line):
            return found[1]
        said.append(line)
    raise RuntimeError(f"chromedriver ended: {''.join(said)}")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait(30)
