"""Whether tests notice small mistakes: a random sample of mutants of the product, each in a copy of the tree.

    python -m tests.mutants --seed 1 --budget 25                    # minutes; run it again to go on
    python -m tests.mutants --seed 1 --budget 25 --only zerocast/optim

A line of code is drawn, and one of the changes that `sites.py` knows for it. Tests are asked nearest first, those of its room, then
those that name it, until one fails, hangs, or the time of a mutant is over. Prints a line a mutant: killed, and by which test, or
survived. A survivor is a gap in the tests, dead code, or a change that nothing can see; a reader says which.

csrc/cuda, csrc/api/cuda.cpp and zerocast/backends/cuda are left out, since they need a GPU. Answers are kept in build/mutants, by
seed, for as long as the product does not change.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.sites import Site, sites

ROOMS = {
    "integrations/huggingface": "trainers",
    "integrations/lightning": "trainers",
    "csrc": "backends",
    "zerocast/inspection.py": "cli",
    "zerocast/footprint": "cli",
}


def nearest_tests(root: Path, path: str, function: str = "") -> list[str]:
    """Return the files of tests, nearest first: those of the room of the file, then those that name its module, each by the
    words that they share with the names of the file and of the mutated function.
    """
    room = root / "tests" / _room(path)
    stem = Path(path).parent.name if Path(path).stem == "__init__" else Path(path).stem
    words = {word for word in re.split(r"[_\W]+", f"{stem} {function}".lower()) if len(word) > 2}
    shared = {}
    for test in sorted((root / "tests").rglob("test_*.py")):
        text = test.read_text().lower()
        if room in test.parents or re.search(rf"\b{re.escape(stem.lower())}\b", text):
            shared[test] = sum((word in text) + 3 * (word in test.stem) for word in words)
    chosen = sorted(shared, key=lambda test: (room not in test.parents, -shared[test], test))
    return [str(test.relative_to(root)) for test in chosen]


def _room(path: str) -> str:
    for folder, room in ROOMS.items():
        if f"{path}/".startswith(f"{folder}/"):
            return room
    return Path(path).parts[1]


def enclosing_function(path: str, source: bytes, line: int) -> str:
    """Return the name of the innermost function or class that holds a line of a Python file; empty without one."""
    if not path.endswith(".py"):
        return ""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds) and node.lineno <= line <= node.end_lineno
    ]
    return max(around, key=lambda node: node.lineno).name if around else ""


ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("zerocast", "integrations", "csrc")
SUFFIXES = {".py", ".cpp", ".h", ".inc"}
NEEDS_GPU = ("csrc/cuda/", "csrc/api/cuda.cpp", "zerocast/backends/cuda/")
FIRST_MODULES = 5  # are asked in a run of their own: to collect more of them takes longer than most mutants live
MAX_MODULES = 25
SECONDS_OF_A_TEST = 120
SECONDS_OF_A_BUILD = 600
MAX_BYTES = (
    8 << 30
)  # of data in this process and in each that it starts: a wrong size must not take the memory of the machine
SURVIVED, KILLED, HUNG, CRASHED, BROKEN = (
    "survived",
    "killed",
    "hung",
    "ended the process",
    "does not import or compile",
)
NOT_BY_MUTANT = "fails without a mutant too"
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*\])?)(?: - .*)?$", re.MULTILINE)
RUNNING = re.compile(r"^(tests/\S+::.*?) *(?=$|\+\+|Fatal)", re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """The outcome of a mutant."""

    path: str
    line: int
    what: str
    status: str
    by: str  # the test that killed it; else how many passed, and whether all that are near could be asked
    seconds: float

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.what}  {self.status}: {self.by}  ({self.seconds:.0f} s)"


def tracked(*folders: str) -> list[str]:
    """Return the files of the tree that git does not ignore, by path."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return sorted(name for name in {*listed} if name and (ROOT / name).is_file())


class Copy:
    """A copy of the tree, in which one file at a time is changed and tests are run."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self._environment = os.environ | {
            "PYTHONPATH": str(folder),
            "ZEROCAST_TEST_SEED": str(seed),
            "ZEROCAST_CUDA": "0",
        }
        extensions = [path.relative_to(ROOT) for path in (ROOT / "zerocast/backends").glob("_C*.so")]
        self._extensions = {name: (ROOT / name).read_bytes() for name in extensions}
        for name in [*tracked(), *extensions]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)

    def ask(self, site: Site, modules: Sequence[str], seconds: float) -> Answer:
        """Return what the tests of these modules say of a mutant, in so many seconds."""
        start, target = time.monotonic(), self.folder / site.path
        original = target.read_bytes()
        target.write_bytes(site.apply(original))
        try:
            status, by = self._answer(site, modules, start + seconds)
        finally:
            target.write_bytes(original)
        return Answer(site.path, site.line, site.what, status, by, time.monotonic() - start)

    def _answer(self, site: Site, modules: Sequence[str], deadline: float) -> tuple[str, str]:
        if not site.path.endswith(".py"):
            began = time.monotonic()
            if self._run(["setup.py", "--quiet", "build_ext", "--inplace"], SECONDS_OF_A_BUILD)[0] != 0:
                return BROKEN, "its build"
            deadline += time.monotonic() - began
        try:
            return self._test(modules, deadline)
        finally:
            if not site.path.endswith(".py"):
                for name, content in self._extensions.items():
                    (self.folder / name).write_bytes(content)

    def _test(self, modules: Sequence[str], deadline: float) -> tuple[str, str]:
        passed = 0
        for part in (modules[:FIRST_MODULES], modules[FIRST_MODULES:MAX_MODULES]):
            if part:
                code, output = self.pytest(part, deadline - time.monotonic())
                passed += output.count(" PASSED")
                if code is None:
                    return SURVIVED, f"{passed} tests passed in the time, and others were not asked"
                if code not in (0, 5):
                    return killer(code, output)
        return SURVIVED, f"{passed} tests passed"

    def pytest(self, tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """Run tests until one fails. Returns the exit status, None if they were stopped, and what they printed."""
        options = ["-v", "-x", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow", "--hypothesis-seed=0"]
        hanging = [f"--timeout={SECONDS_OF_A_TEST}", "--timeout-method=thread"]
        return self._run(["-m", "pytest", *options, *hanging, *tests], seconds)

    def _run(self, command: Sequence[str], seconds: float) -> tuple[int | None, str]:
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(max(seconds, 1.0))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # The ranks of a test that was stopped or has crashed are still there.
                _end_session(process)
            output.seek(0)
            return code, output.read()


def _end_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def killer(code: int, output: str) -> tuple[str, str]:
    """Return how, and by which test, a run of pytest that has not passed has killed a mutant."""
    failures = FAILURE.findall(output)
    if "+++ Timeout +++" in output:
        return HUNG, RUNNING.findall(output)[-1]
    if failures and "::" in failures[0]:
        return KILLED, failures[0]
    if failures or "ImportError while loading conftest" in output:
        return BROKEN, failures[0] if failures else "conftest"
    running = RUNNING.findall(output)
    return CRASHED, f"{running[-1] if running else 'pytest'}, status {code}"


def draw(seed: int, only: str, count: int) -> list[Site]:
    """Return mutants of random lines of code, each line with the same chance, one a line."""
    lines: dict[tuple[str, int], list[Site]] = {}
    for name in tracked(*PRODUCT):
        wanted = name.startswith(only) and not name.startswith(NEEDS_GPU) and Path(name).suffix in SUFFIXES
        for site in sites(name, (ROOT / name).read_bytes()) if wanted else []:
            lines.setdefault((site.path, site.line), []).append(site)
    generator = random.Random(seed)
    return [generator.choice(lines[line]) for line in generator.sample(sorted(lines), min(count, len(lines)))]


class Answers:
    """The answers of earlier runs with this seed, kept in a file. A change of the product discards them."""

    def __init__(self, seed: int, only: str) -> None:
        tree = hashlib.sha256(only.encode())
        for name in tracked(*PRODUCT):
            tree.update((ROOT / name).read_bytes())
        self._path = ROOT / "build" / "mutants" / f"{seed}-{tree.hexdigest()[:16]}.jsonl"
        self.known = (
            [Answer(**json.loads(line)) for line in self._path.read_text().splitlines()] if self._path.exists() else []
        )

    def add(self, answer: Answer) -> None:
        self.known.append(answer)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(answer)) + "\n")


def sound(copy: Copy, answers: Sequence[Answer], at_once: int) -> Iterator[Answer]:
    """Yield the answers. Those by a test that fails without a mutant as well say nothing, and get a status that tells so."""
    killers = sorted({answer.by for answer in answers if answer.status == KILLED})
    options = ["--maxfail=0", "-n", str(at_once)]
    _, output = copy.pytest([*options, *killers], SECONDS_OF_A_TEST * len(killers)) if killers else (0, "")
    failing = {*FAILURE.findall(output)}
    for answer in answers:
        yield replace(answer, status=NOT_BY_MUTANT) if answer.by in failing else answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the answers and their number; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--budget", type=float, required=True, help="minutes of this run")
    parser.add_argument("--count", type=int, default=200, help="mutants in the sample")
    parser.add_argument("--only", default="", help="a folder or file of the product")
    parser.add_argument(
        "--at-once", type=int, default=1, help="mutants that are asked at the same time, each in a copy"
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="for the tests of one mutant")
    chosen = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * chosen.budget
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    sample, answers = draw(chosen.seed, chosen.only, chosen.count), Answers(chosen.seed, chosen.only)
    known = {(answer.path, answer.line) for answer in answers.known}
    for answer in answers.known:
        print(answer, flush=True)
    missing = [site for site in sample if (site.path, site.line) not in known]
    with tempfile.TemporaryDirectory(prefix="zerocast-mutants-") as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for place in range(chosen.at_once):
            copies.put(Copy(Path(folder) / str(place), chosen.seed))

        def ask(site: Site) -> Answer | None:
            if time.monotonic() >= deadline:
                return None
            function = enclosing_function(site.path, (ROOT / site.path).read_bytes(), site.line)
            tests, copy = nearest_tests(ROOT, site.path, function), copies.get()
            try:
                return copy.ask(site, tests, chosen.seconds)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(chosen.at_once) as pool:
            for asked in as_completed([pool.submit(ask, site) for site in missing]):
                answer = asked.result()
                if answer is not None:
                    answers.add(answer)
                    print(answer, flush=True)
        final = list(sound(copies.get(), answers.known, chosen.at_once))
    print("\nNot killed:")
    print(*(answer for answer in final if answer.status in (SURVIVED, NOT_BY_MUTANT)), sep="\n")
    counts = Counter(answer.status for answer in final)
    killed = sum(counts[status] for status in (KILLED, HUNG, CRASHED, BROKEN))
    print(f"\n{killed} of {len(final)} killed, of a sample of {len(sample)}; {dict(counts)}")
    return 0 if killed == len(sample) else 1


if __name__ == "__main__":
    sys.exit(main())
