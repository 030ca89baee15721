"""Checkpoints of every host: what is loaded was saved, what follows would have followed, and what does not fit raises."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.hosts.under_test import different, find, param, variants
from tests.selection import worlds
from tests.workers import CASE_SECONDS, Ranks, error_of
from zerocast import verify


def interrupted(host: str, variant: str, folder: str) -> list[str]:
    """Load into a run with another history. Return what differs from an uninterrupted run right after it, and
    two steps later.
    """
    with find(host).inside(variant):
        straight, resumed = find(host)(folder, variant), find(host)(folder, variant)
        for number in range(3):
            straight.step(number)
        straight.save(3)
        resumed.step(7)
        assert resumed.load() == 3
        found = [f"{name}, loaded" for name in different(straight.everything(), resumed.everything())]
        for number in (3, 4):
            straight.step(number)
            resumed.step(number)
        return found + different(straight.everything(), resumed.everything())


@pytest.mark.parametrize("world", worlds(2, slow=(1, 3)))
@pytest.mark.parametrize(("host", "variant"), variants("ZeroAdamW stage 1"))
def test_resume_is_exact(ranks: Ranks, tmp_path: Path, host: str, variant: str, world: int) -> None:
    assert ranks(world)(interrupted, host, variant, str(tmp_path)) == [[]] * world


def saved(host: str, variant: str, folder: str) -> dict[str, Tensor]:
    """Save after three steps. Return the state then."""
    with find(host).inside(variant):
        run = find(host)(folder, variant)
        for number in range(3):
            run.step(number)
        run.save(3)
        return run.whole()


def loaded(host: str, variant: str, folder: str) -> tuple[dict[str, Tensor], list[str]]:
    """Load into a run that has trained. Return its state, and what verify says of its bytes then and a step later."""
    with find(host).inside(variant):
        run = find(host)(folder, variant)
        run.step(7)
        run.load()
        whole, found = run.whole(), [str(d) for d in verify(run.verified).differences]
        run.step(3)
        return whole, found + [str(d) for d in verify(run.verified).differences]


@pytest.mark.parametrize(
    ("before", "after"), [(2, 3), *(pytest.param(*p, marks=pytest.mark.slow) for p in ((3, 1), (1, 2), (4, 2)))]
)
@pytest.mark.parametrize(
    ("host", "variant"),
    [
        *(param(host, find(host).VARIANTS[0]) for host in ("ZeroAdamW", "FSDP2", "Apex")),
        *(param(host, "8-bit moments", slow=True) for host in ("ZeroAdamW", "FSDP2")),
    ],
)
def test_other_numbers_of_ranks(ranks: Ranks, tmp_path: Path, host: str, variant: str, before: int, after: int) -> None:
    """Other numbers of ranks load a checkpoint. Megatron's own checkpoints do that in
    tests/megatron/test_checkpoints.py.
    """
    check_other_ranks(ranks, str(tmp_path), host, variant, before, after)


def check_other_ranks(
    ranks: Ranks, folder: str, host: str, variant: str, before: int, after: int, seconds: float = CASE_SECONDS
) -> None:
    """Check that masters, moments, steps and delayed scaling are those that were saved, and that the bytes are
    their cast.
    """
    expected = ranks(before)(saved, host, variant, folder, timeout=seconds)[0]
    for whole, wrong in ranks(after)(loaded, host, variant, folder, timeout=seconds):
        assert wrong == []
        assert whole.keys() == expected.keys()
        assert [name for name, value in expected.items() if not torch.equal(value, whole[name])] == []


OUTSIDER = """
import sys
sys.path[:] = [entry for entry in sys.path if entry.rstrip("/") not in (sys.argv[1], "")]
sys.modules["zerocast"] = None  # importing it fails
import torch, torch.distributed.checkpoint as dcp
for path in sys.argv[2:]:
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {name: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype) for name, entry in metadata.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    torch.save(state, path + ".pt")
"""
DELAYED = {"ZeroAdamW": "delayed", "FSDP2": "blocks.1.1.weight"}  # hosts with `Checkpoints`, and a weight of each


def test_tools_without_zerocast_read_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    """A process that cannot import zerocast reads plain tensors under the fixed keys."""
    folders = {host: tmp_path / host / "step_00000003" for host in DELAYED}
    wanted = {host: ranks(3)(saved, host, find(host).VARIANTS[0], str(tmp_path / host))[0] for host in DELAYED}
    command = [sys.executable, "-I", "-c", OUTSIDER, str(Path(__file__).parents[2]), *map(str, folders.values())]
    subprocess.run(command, check=True, timeout=120)
    for host, folder in folders.items():
        state, name = torch.load(f"{folder}.pt", weights_only=True), DELAYED[host]
        masters = {key: value for key, value in wanted[host].items() if key.startswith("model.")}
        assert f"model.{name}" in masters
        assert all(torch.equal(state[key], value) for key, value in masters.items())
        keys = [f"optim.state.{name}.{key}" for key in ("exp_avg", "exp_avg_sq", "step")]
        keys += [f"zerocast.{name}.{key}" for key in ("amax_history", "cast_scale", "scale")]
        assert all(state[key].isfinite().all() for key in keys)
        assert not [file for file in folder.iterdir() if b"zerocast.fsdp2" in file.read_bytes()]


def that_do_not_fit(host: str, folder: str) -> tuple[list[str], list[str]]:
    """Return the errors of states that do not fit, and what loading them changed."""
    variant = find(host).VARIANTS[0]
    with find(host).inside(variant):
        run, said = find(host)(folder, variant), []
        run.step(0)
        before = run.everything()
        for call in run.states_that_do_not_fit().values():
            with pytest.raises(ValueError, match=r".") as caught:
                call()
            said.append(str(caught.value))
        return said, different(before, run.everything())


@pytest.mark.notices(
    "a state lacks a name, or has another shape",
    where=("ZeroAdamW", "FSDP2", "Apex"),
    answer="raises on all ranks, nothing changed",
)
@pytest.mark.parametrize("host", [param(host) for host in ("ZeroAdamW", "FSDP2", "Apex")])
def test_states_that_do_not_fit(ranks: Ranks, tmp_path: Path, host: str) -> None:
    for said, changed in ranks(2)(that_do_not_fit, host, str(tmp_path)):
        assert changed == []
        assert "lacks" in said[0] and "(3,)" in said[1]


def kept_during_a_step(host: str, variant: str, taken: int, folder: str) -> tuple[str, list[str], list[str]]:
    """Keep a state, and a copy of it, while a run takes a step. Return the error of loading the state, what that
    changed, and what loading the copy has not restored.
    """
    with find(host).inside(variant):
        run = find(host)(folder, variant)
        for number in range(taken):
            run.step(number)
        kept, wanted = run.loadable.state_dict(), run.whole()
        copied = copy.deepcopy(kept)
        run.step(taken)
        before = run.everything()
        said = error_of(lambda: run.loadable.load_state_dict(kept))
        changed = different(before, run.everything())
        run.loadable.load_state_dict(copied)
        return said, changed, different(wanted, run.whole())


@pytest.mark.notices(
    "a result of `state_dict()`, whose tensors are views, is loaded after steps have changed them",
    where=("ZeroAdamW", "FSDP2"),
    answer="raises on all ranks, nothing changed",
)
@pytest.mark.parametrize("taken", [0, 2])
@pytest.mark.parametrize(
    ("host", "variant"),
    [
        param("ZeroAdamW", "eager"),
        param("ZeroAdamW", "8-bit moments", slow=True),
        param("FSDP2", "FusedAdamW", slow=True),
        param("FSDP2", "AdamW"),
        param("FSDP2", "8-bit moments"),
    ],
)
def test_states_that_are_kept_during_a_step(ranks: Ranks, tmp_path: Path, host: str, variant: str, taken: int) -> None:
    for said, changed, lost in ranks(2)(kept_during_a_step, host, variant, taken, str(tmp_path)):
        assert f"the state is that of step {taken}, but its tensors are views" in said
        assert (changed, lost) == ([], [])
