"""Checkpoints in stores that fsspec opens by a URL: memory, and a store without renames that goes away at any change."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed as dist

import zerocast
from tests import casts
from tests.checkpoint import storage
from tests.checkpoint.crash.saves import Folder, value
from tests.checkpoint.storage import PlainStore, store_going_away
from tests.serve.test_export import read as read_export
from tests.workers import Ranks, error_of, on_ranks
from zerocast import ZeroAdamW, optim
from zerocast.checkpoint.lineage import Runs
from zerocast.checkpoint.store import as_location
from zerocast.checkpoint.store_folder import folder_at
from zerocast.cli import main
from zerocast.export import export_safetensors
from zerocast.optim import Checkpoints

URL = "plain://runs/one"


class Training:
    """A model and its optimizer, the same wherever they are made."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Linear(48, 32))
        zerocast.quantize_(self.model, zerocast.Recipe({"*.weight": "nvfp4"}))
        self.optimizer = ZeroAdamW(self.model.named_parameters(), lr=1e-2)

    def train(self, steps: int, first: int = 0) -> "Training":
        for step in range(first, first + steps):
            rank = dist.get_rank() if dist.is_initialized() else 0
            inputs = torch.full((4, 32), 0.1 * (step + 1) + 0.01 * rank)
            self.model(inputs).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder in the memory of this process."""
    yield "memory://checkpoints/run"
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """The folder that plain:// URLs refer to."""
    storage.register_plain_store(tmp_path)
    return tmp_path


def test_commands_take_urls(memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optim.save(Training().train(2).optimizer, memory)
    assert main(["inspect", memory, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["checkpoint"] == memory and report["checked_files"] == 2 and report["step"] == 2
    assert main(["export", memory, str(tmp_path / "out"), "--to", "safetensors"]) == 0
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    capsys.readouterr()
    for kind in ("safetensors", "checkpoint"):
        assert main(["export", memory, f"memory://out/{kind}", "--to", kind, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)["files"]
        stored = fsspec.filesystem("memory").ls(f"/out/{kind}")
        assert said == {entry["name"].rpartition("/")[2]: entry["size"] for entry in stored}
    assert main(["export", memory, "memory://out/safetensors", "--to", "safetensors"]) == 2
    assert "memory://out/safetensors is not empty: export into a new folder" in capsys.readouterr().err
    assert main(["inspect", "memory://nothing"]) == 2
    assert "memory://nothing does not exist" in capsys.readouterr().err


def resumed(folder: str, saved: list[int], steps: int) -> tuple[list[int], str]:
    """Go on from the last checkpoint, and save after these steps."""
    storage.register_plain_store(folder)
    run = Training()
    with Checkpoints(URL, keep=2) as checkpoints:
        first = checkpoints.load(run.optimizer, model=run.model) if checkpoints.steps() else 0
        for step in range(first, steps):
            run.train(1, first=step)
            if step + 1 in saved:
                checkpoints.save(run.optimizer, step + 1, model=run.model)
    return checkpoints.steps(), value(run.optimizer)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_resume_without_renames_is_the_run(ranks: Ranks, tmp_path: Path, world: int) -> None:
    whole = ranks(world)(resumed, str(tmp_path / "whole"), [], 5)
    broken = ranks(world)(resumed, str(tmp_path / "run"), [1, 2, 3], 4)
    assert [steps for steps, _ in broken] == [[2, 3]] * world
    files = {path.name for path in (tmp_path / "run" / "runs" / "one" / "step_00000003").iterdir()}
    assert files == {".metadata", "manifest.json", *(f"__{rank}_0.distcp" for rank in range(world))}
    again = ranks(world)(resumed, str(tmp_path / "run"), [5], 5)
    assert [value for _, value in again] == [value for _, value in whole]


def loaded(folder: str) -> dict[str, str]:
    storage.register_plain_store(folder)
    run = Training()
    Checkpoints(URL).load(run.optimizer)
    return {name: casts.sha(tensor) for name, tensor in optim.full_state_dict(run.model, run.optimizer).items()}


def test_other_numbers_of_ranks_load(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2)(resumed, str(tmp_path), [2], 2)
    found = [ranks(world)(loaded, str(tmp_path))[0] for world in (1, 2, 3)]
    assert found[0] and found[0] == found[1] == found[2]


class Stored(Folder):
    """Checkpoints in a store, saved as another process would, which knows nothing of this one's runs."""

    def _checkpoints(self, root: Path, asynchronous: bool = False) -> Checkpoints:
        Runs._of_folders.clear()
        return Checkpoints(URL, self.keep)

    def _check_names(self, root: Path, kept: list[int]) -> None:
        """A folder that was replaced may have its second name."""
        folders = [path for path in (root / "runs" / "one").iterdir() if any(path.iterdir())]
        assert len(folders) == len(kept), folders


STORED = {
    "the first": Stored((), (1, 1), 2),
    "the next, the one before goes": Stored(((1, 1), (2, 2)), (3, 3), 2),
    "in place of itself": Stored(((1, 1),), (1, 2), 2),
    "in place of itself again": Stored(((1, 1), (1, 2)), (1, 3), 2),
    "in place of itself, beside others": Stored(((1, 1), (2, 2)), (2, 3), 2),
}
FAST = ("the next, the one before goes", "in place of itself, beside others")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in STORED]
)
def test_the_store_goes_away_at_any_change(tmp_path: Path, name: str) -> None:
    """The checkpoints of before are left, or those with the new one once its marker is gone; the next saves work."""
    case, before = STORED[name], tmp_path / "before"
    before.mkdir()
    storage.register_plain_store(before)
    case.prepare(before)

    def interrupted(root: Path, after: int | None, leaves_half: bool) -> str:
        shutil.copytree(before, root)
        storage.register_plain_store(root)
        with store_going_away(after, leaves_half):
            return error_of(lambda: case.save(root, str))

    assert interrupted(tmp_path / "whole", None, False) == ""
    changes = list(PlainStore.changes)
    whole = changes.index("delete .zerocast-writer")
    assert changes[whole - 1] == "write manifest.json"
    for after, change in enumerate(changes):
        # Nothing can be half deleted.
        for leaves_half in (False, True) if change.startswith("write") else (False,):
            root = tmp_path / f"{after}_{leaves_half}"
            said = interrupted(root, after, leaves_half)
            try:
                if after <= whole:
                    assert "was not written" in said and "the store is gone" in said
                case.check(root, after > whole)
                # A file that is half written is in the way of the next saves at least as much as a whole one.
                if leaves_half or not change.startswith("write"):
                    case.goes_on(root)
            except Exception as error:
                where = f"{after} of {changes}, {'half' if leaves_half else 'whole'}"
                raise AssertionError(f"{where}: {error!r}; it said {said}") from error


def tensors_of(folder: Path) -> dict[str, bytes]:
    """The bytes of the tensors of an export."""
    found = read_export(folder)
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


@pytest.mark.parametrize("leaves_half", [False, True])
def test_the_store_goes_away_during_an_export(tmp_path: Path, leaves_half: bool) -> None:
    """The export is whole or has no index, and the next one takes its place."""
    model = Training().model
    storage.register_plain_store(tmp_path / "whole")
    with store_going_away(None, False):
        files = export_safetensors(model, URL, "modelopt", 500)
        changes = list(PlainStore.changes)
    assert changes[0] == "write .zerocast-writer" and len(changes) == len(files) + 2 > 5
    assert changes[-2:] == ["write model.safetensors.index.json", "delete .zerocast-writer"]
    export_safetensors(model, tmp_path / "local", "modelopt", 500)
    wanted = tensors_of(tmp_path / "local")
    assert tensors_of(tmp_path / "whole" / "runs" / "one") == wanted
    for after in range(len(changes)):
        root = tmp_path / str(after)
        storage.register_plain_store(root)
        with store_going_away(after, leaves_half):
            said = error_of(lambda: export_safetensors(model, URL, "modelopt", 500))
        assert "the store is gone" in said
        index = root / "runs" / "one" / "model.safetensors.index.json"
        if index.exists() and not (leaves_half and after == len(changes) - 2):
            assert tensors_of(index.parent) == wanted
        export_safetensors(model, URL, "modelopt", 500)
        assert tensors_of(index.parent) == wanted


def test_files_that_differ(plain: Path) -> None:
    checkpoints, run = Checkpoints(URL), Training().train(1)
    checkpoints.save(run.optimizer, 1)
    good = value(run.optimizer)
    checkpoints.save(run.train(1, first=1).optimizer, 2)
    folder = plain / "runs" / "one" / "step_00000002"
    kept = {file.name: file.read_bytes() for file in folder.iterdir()}
    flipped = bytes([kept["__0_0.distcp"][0] ^ 1]) + kept["__0_0.distcp"][1:]
    damages: list[tuple[str, bytes | None, str]] = [
        ("__0_0.distcp", flipped, "__0_0.distcp is damaged: its SHA-256 is"),
        ("__0_0.distcp", None, "__0_0.distcp is missing; it had"),
        ("manifest.json", kept["manifest.json"][:-9], "manifest.json is damaged"),
        ("manifest.json", None, "manifest.json is missing, so the files of the checkpoint cannot be checked"),
    ]
    for name, content, said in damages:
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
        reader = Training()
        with pytest.raises(ValueError, match=said):
            checkpoints.load(reader.optimizer, 2)
        assert checkpoints.load(reader.optimizer) == 1 and value(reader.optimizer) == good
        (folder / name).write_bytes(kept[name])
    (folder / "__7_0.distcp").write_bytes(b"of nobody")  # is not read
    reader = Training()
    assert checkpoints.load(reader.optimizer) == 2 and value(reader.optimizer) == value(run.optimizer)


def test_a_folder_without_a_manifest_is_refused(plain: Path) -> None:
    run = Training().train(1)
    optim.save(run.optimizer, URL)
    (plain / "runs" / "one" / "manifest.json").unlink()
    for call in (optim.load, optim.load_masters):
        with pytest.raises(ValueError, match=r"one has no manifest.json, which marks a complete checkpoint"):
            call(Training().optimizer, URL)
    with pytest.raises(RuntimeError, match="already exists"):
        optim.save(run.optimizer, URL)  # no marker says that it is of an interrupted save
    with pytest.raises(FileNotFoundError, match=r"plain://nothing/\.metadata does not exist"):
        optim.load(run.optimizer, "plain://nothing")


@pytest.mark.usefixtures("plain")
def test_a_second_run_that_writes_into_the_folder() -> None:
    """The one that was there first says so, and leaves the other's files."""
    first, second = (folder_at(as_location(URL), token) for token in ("a", "b"))
    first.begin()
    second.begin()
    first.abandon()
    with pytest.raises(RuntimeError, match="another process writes into plain://runs/one"):
        first.commit()
    assert second.partial == second.path


@on_ranks(2)
def test_a_store_that_each_rank_has_for_itself() -> None:
    said = error_of(lambda: optim.save(Training().optimizer, "memory://run"))
    assert "__1_0.distcp has no bytes as rank 0 sees it" in said
    assert "all ranks must write into one shared folder" in said


def test_local_urls_are_paths(tmp_path: Path) -> None:
    run = Training().train(1)
    Checkpoints(f"file://{tmp_path}/run").save(run.optimizer, 1)
    assert Checkpoints(tmp_path / "run").load(Training().optimizer) == 1
    assert Checkpoints(f"file://{tmp_path}/run").path(1) == tmp_path / "run" / "step_00000001"


def test_urls_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="memory:/run was a URL before it became a Path, which drops a slash"):
        optim.save(run.optimizer, Path("memory://run"))
    with pytest.raises(ValueError, match="is a chain of URLs"):
        Checkpoints("simplecache::memory://run")
    with pytest.raises(ValueError, match="Protocol not known: nosuch"):
        Checkpoints("nosuch://run")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ModuleNotFoundError, match="memory://run is a URL, which fsspec opens: pip install fsspec"):
        Checkpoints("memory://run")
    optim.save(run.optimizer, "here:now")  # which no store is called
    assert list(tmp_path.iterdir()) == [tmp_path / "here:now"]
