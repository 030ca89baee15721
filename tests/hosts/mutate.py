"""Whether the shared tests of hosts notice when a guard is gone: each guard is broken once, in a copy of the tree.

    python -m tests.hosts.mutate                    # every mutant, on each host that it is about
    python -m tests.hosts.mutate --only step --hosts FSDP2 Apex

Prints a table, mutants by hosts: `killed` by a test, or `survived`; `not found` where the text of a guard has changed, so that this
list must. Ends with status 1 unless all are killed. Only the tests of every run are asked, and those of this folder alone.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.hosts.under_test import HOSTS, find

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("csrc", "zerocast", "integrations", "tests", "pyproject.toml")
SUITE = [f"tests/hosts/test_{name}.py" for name in ("faults", "verify", "checkpoints")]
SECONDS = 400
ALL = tuple(HOSTS)


@dataclass(frozen=True)
class Mutant:
    """`before`, which is there once in `path`, becomes `after`; `hosts` have the guard."""

    guards: str
    path: str
    before: str
    after: str
    hosts: tuple[str, ...]


def _mutant(guards: str, path: str, before: str, after: str, *hosts: str) -> Mutant:
    return Mutant(guards, path, before, after, hosts or ALL)


WRITES = "contextlib.nullcontext():"
MUTANTS = [
    # What every host shares
    _mutant(
        "what raises while it writes is remembered",
        "zerocast/weight/write_guard.py",
        'self._writing, self.torn = True, f"{what} raised half-way: {remedy}"',
        "self._writing = True",
    ),
    _mutant(
        "what is partial is refused",
        "zerocast/weight/write_guard.py",
        "        if self.is_torn:\n",
        "        if False:\n",
    ),
    _mutant(
        "a complete write makes whole",
        "zerocast/weight/write_guard.py",
        "            self.torn = None\n",
        "            pass\n",
    ),
    _mutant(
        "verify compares bytes",
        "zerocast/verification/verify.py",
        "        wrong = int(differs.sum())\n",
        "        wrong = 0\n",
    ),
    _mutant(
        "verify says where",
        "zerocast/verification/verify.py",
        "column * size + place % b.shape[1]",
        "column * size",
    ),
    _mutant(
        "weights that are partial are not read",
        "zerocast/weight/weight.py",
        "        self.state.freshness.check_whole()\n",
        "",
        "ZeroAdamW",
        "Apex",
        "Megatron-Core",
    ),
    # ZeroAdamW
    _mutant(
        "a step that raises",
        "zerocast/optim/zero_adamw.py",
        'with self._weights.writing("an optimizer step"):',
        f"with {WRITES}",
        "ZeroAdamW",
    ),
    _mutant(
        "a load that raises",
        "zerocast/optim/zero_adamw.py",
        'with self._weights.writing("loading a checkpoint"):',
        f"with {WRITES}",
        "ZeroAdamW",
    ),
    _mutant(
        "a partial state is not saved",
        "zerocast/optim/zero_adamw.py",
        '        self._weights.check_whole()\n        self.averages.check_not_swapped("the state of an optimizer',
        '        self.averages.check_not_swapped("the state of an optimizer',
        "ZeroAdamW",
    ),
    _mutant(
        "nothing steps on",
        "zerocast/optim/zero_adamw.py",
        "        self._weights.check_whole()\n        check_gradients()\n",
        "        check_gradients()\n",
        "ZeroAdamW",
    ),
    _mutant(
        "gradients of a partial state are not clipped",
        "zerocast/optim/zero_adamw.py",
        "        self._weights.check_whole()\n        self._finish_gradients()\n        self._reducer.roll_call",
        "        self._finish_gradients()\n        self._reducer.roll_call",
        "ZeroAdamW",
    ),
    _mutant(
        "a load forgets gradients of a partial step",
        "zerocast/optim/zero_adamw.py",
        "        if self._weights.plan.freshness.is_torn:\n            self.zero_grad()\n",
        "",
        "ZeroAdamW",
    ),
    _mutant(
        "a state that does not fit changes nothing",
        "zerocast/optim/zero_adamw.py",
        "        self._state.check(state_dict)\n",
        "",
        "ZeroAdamW",
    ),
    # FSDP2
    _mutant(
        "a step that raises",
        "zerocast/fsdp2/fused_adamw.py",
        'with torn.writing("an optimizer step", [self, *self._casts]):',
        "if True:",
        "FSDP2",
    ),
    _mutant(
        "a load that raises",
        "zerocast/fsdp2/training_state.py",
        'with torn.writing("loading a checkpoint", owners):',
        f"with {WRITES}",
        "FSDP2",
    ),
    _mutant(
        "a partial state is not saved",
        "zerocast/fsdp2/training_state.py",
        "        torn.check_whole(self._owners())\n",
        "",
        "FSDP2",
    ),
    _mutant(
        "nothing steps on",
        "zerocast/fsdp2/fused_adamw.py",
        "        torn.check_whole([self])\n        loss = None",
        "        loss = None",
        "FSDP2",
    ),
    _mutant(
        "a partial model is not saved",
        "zerocast/fsdp2/prepare.py",
        "    torn.check_whole(casts_of(module))\n",
        "    pass\n",
        "FSDP2",
    ),
    _mutant(
        "a load forgets gradients of a partial step",
        "zerocast/fsdp2/training_state.py",
        "            for optimizer in self._optimizers:\n                optimizer.zero_grad()\n",
        "            pass\n",
        "FSDP2",
    ),
    _mutant(
        "a cast that raises takes delayed scaling back",
        "zerocast/fsdp2/casts.py",
        "        with self._delayed.or_as_before():\n",
        "        if True:\n",
        "FSDP2",
    ),
    _mutant(
        "gathers say what is partial",
        "zerocast/fsdp2/master.py",
        "        if self.casts.wholeness.is_torn:\n            return TORN\n",
        "",
        "FSDP2",
    ),
    _mutant(
        "a state that does not fit changes nothing",
        "zerocast/fsdp2/training_state.py",
        "        self._check(state)\n",
        "",
        "FSDP2",
    ),
    # Megatron-Core
    _mutant(
        "a step, a cast or a gather that raises",
        "integrations/megatron/guard.py",
        "            with self.writing(what, remedy):\n                return method(*args, **kwargs)",
        "            return method(*args, **kwargs)",
        "Megatron-Core",
    ),
    _mutant(
        "a load that raises",
        "integrations/megatron/guard.py",
        '            with self.writing("loading a checkpoint", RELOAD):\n',
        "            if True:\n",
        "Megatron-Core",
    ),
    _mutant(
        "a refresh that raises",
        "integrations/megatron/guard.py",
        '        with self.writing("a cast", AGAIN):\n',
        "        if True:\n",
        "Megatron-Core",
    ),
    _mutant(
        "a refresh is no remedy for masters",
        "integrations/megatron/guard.py",
        "        if self._remedy == RELOAD:\n            self.check_whole()\n",
        "",
        "Megatron-Core",
    ),
    _mutant(
        "nothing goes on from what is partial",
        "integrations/megatron/guard.py",
        "        for freshness in () if self._preparing else self._watched:\n            freshness.check_whole()\n",
        "        return\n",
        "Megatron-Core",
    ),
    # Apex
    _mutant(
        "a step that raises",
        "integrations/apex/optimizer.py",
        'with self._weights.writing("an optimizer step"):',
        f"with {WRITES}",
        "Apex",
    ),
    _mutant(
        "a load that raises",
        "integrations/apex/optimizer.py",
        'with self._weights.writing("loading a state"):',
        f"with {WRITES}",
        "Apex",
    ),
    _mutant(
        "nothing steps on, and no partial state is saved",
        "integrations/apex/weights.py",
        "        self.plan.freshness.check_whole()\n",
        "        pass\n",
        "Apex",
    ),
    _mutant(
        "a load forgets gradients of a partial step",
        "integrations/apex/optimizer.py",
        "        if self._weights.is_torn:\n            self.zero_grad()\n",
        "",
        "Apex",
    ),
    _mutant(
        "what a step that raised left to gather is dropped",
        "integrations/apex/optimizer.py",
        "        self._params_buckets.clear()",
        "        pass",
        "Apex",
    ),
    _mutant(
        "a state that does not fit changes nothing",
        "integrations/apex/optimizer.py",
        "        problem = checkpoint.problem_of(state_dict, self.param_groups)\n",
        "        problem = None\n",
        "Apex",
    ),
]


def copied(folder: Path) -> None:
    """The tree as it is, changes included."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


def passes(host: str, folder: Path) -> bool:
    """Whether the tests of a host pass in a copy of the tree. What hangs does not."""
    line = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "-k", host, *SUITE]
    known = os.environ | {"PYTHONPATH": str(folder)}
    try:
        ran = subprocess.run(line, cwd=folder, env=known, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    if ran.returncode not in (0, 1):
        raise RuntimeError(f"pytest on {host}: {ran.stdout[-3000:]}{ran.stderr[-3000:]}")
    return ran.returncode == 0


def outcome(mutant: Mutant, host: str, folder: Path) -> str:
    """What becomes of a mutant on one host."""
    path, source = folder / mutant.path, ROOT / mutant.path
    original = source.read_text() if source.exists() else ""
    if original.count(mutant.before) != 1:
        return "not found"
    path.write_text(original.replace(mutant.before, mutant.after))
    try:
        return "survived" if passes(host, folder) else "killed"
    finally:
        path.write_text(original)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--only", default="", help="mutants whose guard or path holds this")
    chosen = parser.parse_args(arguments)
    hosts = [host for host in chosen.hosts if not find(host).why_not]
    mutants = [m for m in MUTANTS if chosen.only in f"{m.guards} {m.path}" and {*m.hosts} & {*hosts}]
    _print("guard", "file", *hosts)
    _print(*["---"] * (2 + len(hosts)))
    found = []
    with tempfile.TemporaryDirectory(prefix="zerocast-mutants-") as name:
        copied(Path(name))
        for host in hosts:
            if not passes(host, Path(name)):
                raise RuntimeError(f"the tests of {host} fail without any mutant")
        for mutant in mutants:
            row = [outcome(mutant, host, Path(name)) if host in mutant.hosts else "" for host in hosts]
            _print(mutant.guards, f"`{mutant.path}`", *row)
            found += [one for one in row if one]
    _print(f"{found.count('killed')} of {len(found)} killed", *[""] * (1 + len(hosts)))
    return 0 if {*found} <= {"killed"} else 1


def _print(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
