"""Whether tests notice when a guard is gone: each guard is broken once, in a copy of the tree.

The guards of a host are asked of the shared tests of hosts alone, those of plans of the tests that build and cast them.

    python -m tests.hosts.mutate                    # every mutant, on each host that it is about
    python -m tests.hosts.mutate --only step --hosts FSDP2 Apex

Prints a table, mutants by hosts: `killed` by a test, or `survived`; `not found` where the text of a guard has changed, so that this
list must. Ends with status 1 unless all are killed. Only the tests of every run are asked. `mutants.md` has the last table.
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
PLANS = "plans"
SUITE_OF_PLANS = ["tests/distributed/test_ownership.py", "tests/optim/test_gathered_scales.py"]
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


VALIDITY, DRIVER = "zerocast/weight/validity.py", "zerocast/cast/host.py"
VERIFY, ZERO = "zerocast/verification/verify.py", "zerocast/optim/zero_optimizer.py"
FUSED, STATE = "zerocast/fsdp2/fused_adamw.py", "zerocast/fsdp2/state.py"
PREPARE, MANAGER = "zerocast/fsdp2/prepare.py", "zerocast/fsdp2/manager.py"
METHODS, APEX = "integrations/megatron/guard.py", "integrations/apex/optimizer.py"
OWNERSHIP, AMAXES = "zerocast/distributed/ownership.py", "zerocast/cast/amaxes.py"
PARTITION, MOVED = "zerocast/cast/partition.py", "zerocast/optim/foreign_writes.py"
NO_GUARD = "if True:"
APEX_CHECK = "        self._plan.validity.check(Use.REDUCE)\n"
PARTIAL_PLAN = "        if self._plan.validity.partial:\n"
# Guards that lie in two places on purpose are not here: either alone is enough (saves and steps of FSDP2, a refresh).
MUTANTS = [
    # What every host shares
    _mutant(
        "what breaks off is remembered",
        VALIDITY,
        "            self.broke_off(what, masters=masters)\n",
        "            pass\n",
    ),
    _mutant(
        "what is partial is refused",
        VALIDITY,
        "                raise self.partial.again()\n",
        "                pass\n",
    ),
    _mutant(
        "a complete write makes whole",
        VALIDITY,
        "                writing.broke_off, writing.broke_off_masters = None, False\n",
        "                pass\n",
    ),
    _mutant("verify compares bytes", VERIFY, "        wrong = int(differs.sum())\n", "        wrong = 0\n"),
    _mutant("verify says where", VERIFY, "column) * size + part_byte", "column) * size"),
    _mutant(
        "partial weights are not read",
        "zerocast/weight/weight.py",
        "        self.state.validity.check(use, self)\n",
        "",
        "ZeroAdamW",
        "Megatron-Core",
        "Apex",
    ),
    # ZeroAdamW
    _mutant(
        "a step that raises", DRIVER, 'with self.plan.validity.transaction("an optimizer step"):', NO_GUARD, "ZeroAdamW"
    ),
    _mutant("a load that raises", ZERO, 'with self._plan.transaction("loading a checkpoint"):', NO_GUARD, "ZeroAdamW"),
    _mutant(
        "no partial state is saved",
        ZERO,
        "        self._validity.check(Use.SAVE)\n",
        "",
        "ZeroAdamW",
    ),
    _mutant(
        "nothing steps on",
        ZERO,
        "        self._validity.check(Use.STEP)\n        self._skipped.before_step()\n",
        "        self._skipped.before_step()\n",
        "ZeroAdamW",
    ),
    _mutant(
        "nothing is clipped for a partial state",
        ZERO,
        "        self._validity.check(Use.REDUCE)\n",
        "",
        "ZeroAdamW",
    ),
    _mutant(
        "a load forgets gradients of a partial step",
        ZERO,
        "        if self._validity.partial:\n            self.zero_grad()\n",
        "",
        "ZeroAdamW",
    ),
    _mutant(
        "a state that does not fit changes nothing", ZERO, "        self._state.check(state_dict)\n", "", "ZeroAdamW"
    ),
    # FSDP2
    _mutant("a step that raises", FUSED, 'with transaction(self.validities, "an optimizer step"):', NO_GUARD, "FSDP2"),
    _mutant("a load that raises", STATE, "with transaction(validities, what):", NO_GUARD, "FSDP2"),
    _mutant(
        "no partial model is saved",
        PREPARE,
        "        manager.check(Use.SAVE)\n\n\ndef _unwrap",
        "        pass\n\n\ndef _unwrap",
        "FSDP2",
    ),
    _mutant(
        "a load forgets gradients of a partial step",
        STATE,
        "            for optimizer in self._optimizers:\n                optimizer.zero_grad()\n",
        "            pass\n",
        "FSDP2",
    ),
    _mutant(
        "a cast that raises takes delayed scaling back",
        MANAGER,
        "                stack.enter_context(group.delayed.rollback())\n",
        "                pass\n",
        "FSDP2",
    ),
    _mutant(
        "delayed scaling is saved", STATE, "state_dict(self._model) if is_prepared(self._model) else {}", "{}", "FSDP2"
    ),
    _mutant("delayed scaling is loaded", STATE, 'self._model, state.get("zerocast", {})', "self._model, {}", "FSDP2"),
    _mutant("a state that does not fit changes nothing", STATE, "lambda: self._check(state)", "lambda: None", "FSDP2"),
    # Megatron-Core
    _mutant(
        "a step, a cast or a gather that raises",
        METHODS,
        "with self.validity.transaction(what, masters=masters):",
        NO_GUARD,
        "Megatron-Core",
    ),
    _mutant(
        "a load that raises",
        METHODS,
        'with self.validity.transaction("loading a checkpoint"):',
        NO_GUARD,
        "Megatron-Core",
    ),
    _mutant(
        "a refresh is no remedy for masters",
        METHODS,
        "        if self.validity.has_partial_masters:\n            self.check(Use.STEP)\n",
        "",
        "Megatron-Core",
    ),
    _mutant(
        "nothing goes on from what is partial",
        METHODS,
        "        if not self.is_preparing:\n            self.validity.check(use)\n",
        "        pass\n",
        "Megatron-Core",
    ),
    # Apex
    _mutant("a step that raises", APEX, 'with self._plan.transaction("an optimizer step"):', NO_GUARD, "Apex"),
    _mutant("a load that raises", APEX, 'with self._plan.transaction("loading a state"):', NO_GUARD, "Apex"),
    _mutant("a partial state has no norm", APEX, f"{APEX_CHECK}        norm: Tensor", "        norm: Tensor", "Apex"),
    _mutant(
        "a load forgets gradients of a partial step", APEX, f"{PARTIAL_PLAN}            self.zero_grad()\n", "", "Apex"
    ),
    _mutant(
        "a step that raised leaves nothing to gather",
        APEX,
        "        self._params_buckets.clear()",
        "        pass",
        "Apex",
    ),
    _mutant(
        "a state that does not fit changes nothing",
        APEX,
        "problem = checkpoint.problem_of(state_dict, self.param_groups)",
        "problem = None",
        "Apex",
    ),
    # Plans on any number of ranks
    _mutant("owners overlap", OWNERSHIP, "        if second.start < first.stop:\n", "        if False:\n", PLANS),
    _mutant(
        "an overlap beside a gap of the same size",
        OWNERSHIP,
        "    differs = (sums != whole_sums([item.numel for item in items])).any(1)",
        "    differs = (sums[:, 0] != whole_sums([item.numel for item in items])[:, 0])",
        PLANS,
    ),
    _mutant(
        "ranks that own everything do not send all spans",
        OWNERSHIP,
        "        if sums[index, 0] > items[index].numel:\n            break\n",
        "",
        PLANS,
    ),
    _mutant(
        "spans that end inside a byte are exchanged",
        OWNERSHIP,
        "index in doubtful or span.start % item.unit or span.stop % item.unit",
        "index in doubtful",
        PLANS,
    ),
    _mutant(
        "spans lie between the cuts of gathered scales",
        PARTITION,
        "    if not {span.start, span.stop} <= {0, weight.numel(), *cuts}:\n",
        "    if False:\n",
        PLANS,
    ),
    _mutant(
        "scales can be cut where they are",
        PARTITION,
        "    if not entries or any(cut % n for n in entries.values() for cut in (cuts.start, cuts.step)):\n",
        "    if False:\n",
        PLANS,
    ),
    _mutant(
        "amaxes of cut blocks are reduced",
        AMAXES,
        "            self.buffer[self._targets] = self.buffer[self._sources]\n",
        "            pass\n",
        PLANS,
    ),
    _mutant(
        "reduced amaxes of cut blocks are taken",
        AMAXES,
        "            self.buffer[self._sources] = self.buffer[self._targets]\n",
        "            pass\n",
        PLANS,
    ),
    _mutant(
        "only cut blocks are reduced",
        AMAXES,
        "        inside = places % (width if height == 1 else height * columns) != 0\n",
        "        inside = places >= 0\n",
        PLANS,
    ),
    _mutant(
        "each cut row has a place of its own",
        AMAXES,
        "layout.reserve(rows.numel) for rows",
        "layout.reserve(rows.across) for rows",
        PLANS,
    ),
    _mutant(
        "ranks agree on the dtype of amaxes",
        AMAXES,
        "weight for index in cast if _has_amaxes(shards[index])]\n        # Amaxes",
        "weight for index in cast if shards[index].span.numel]\n        # Amaxes",
        PLANS,
    ),
    _mutant(
        "moved scales are brought back",
        MOVED,
        "            if tensor is None or tensor.data_ptr() != place.data_ptr():\n",
        "            if tensor is None:\n",
        PLANS,
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
    """Whether the tests of a host, or of plans, pass in a copy of the tree. What hangs does not."""
    suite = SUITE_OF_PLANS if host == PLANS else ["-k", host, *SUITE]
    line = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *suite]
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


def _is_named(mutant: Mutant, only: Sequence[str]) -> bool:
    return any(one in f"{mutant.guards} {mutant.path}" for one in only)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="+", choices=(*ALL, PLANS), default=(*ALL, PLANS))
    parser.add_argument("--only", nargs="+", default=[""], help="mutants whose guard and path hold one of these")
    chosen = parser.parse_args(arguments)
    hosts = [host for host in chosen.hosts if host == PLANS or not find(host).why_not]
    mutants = [m for m in MUTANTS if _is_named(m, chosen.only) and {*m.hosts} & {*hosts}]
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
