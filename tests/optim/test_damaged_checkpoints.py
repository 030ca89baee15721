"""Damaged checkpoints and such as do not fit are refused with both values, nothing changed, and the one before still loads."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from tests import casts
from tests.optim.checkpoint_folders import FEW, names, saved
from tests.optim.runs import Run, Trainer, snapshot
from zerocast import optim
from zerocast.checkpoint import manifest
from zerocast.optim import Checkpoints


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


DAMAGE = {truncate: "bytes, and had", flip: "is damaged: its SHA-256 is", Path.unlink: "is missing; it had"}


def refuses(folder: str) -> tuple[str, int]:
    """What loading the damaged step says, the optimizer unchanged; and which step is loaded when none is asked for."""
    trainer, checkpoints = Trainer(FEW), Checkpoints(folder)
    before = snapshot(trainer)
    with pytest.raises(ValueError, match="step_00000002") as caught:
        checkpoints.load(trainer.optimizer, step=2)
    casts.assert_same_bytes(snapshot(trainer), before)
    return str(caught.value), checkpoints.load(trainer.optimizer)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damaged_files(ranks, tmp_path, damage):
    """Every file of a checkpoint of two ranks in turn; the one before is still there."""
    ranks(2)(saved, str(tmp_path / "whole"))
    files = [name for name in names(tmp_path / "whole" / "step_00000002") if name not in (manifest.NAME, ".metadata")]
    assert len(files) == 2
    for number, name in enumerate([*files, ".metadata"]):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        damage(folder / "step_00000002" / name)
        # A rank reads what the other one wrote; with the first file, one process reads what two have.
        readers = ranks(2)(refuses, str(folder)) if number else [refuses(str(folder))]
        for said, step in readers:
            assert DAMAGE[damage] in said
            assert f"step_00000002/{name}" in said
            assert step == 1


def test_a_damaged_manifest(tmp_path):
    saved(str(tmp_path))
    trainer, path = Trainer(FEW), tmp_path / "step_00000002" / manifest.NAME
    changed = path.read_text().replace('"step": 2', '"step": 3')
    for content in ("", "[]", "{}", '{"files": []}', '{"files": {}}', "[" * 100_000, '{"step": 3', changed):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
            Checkpoints(tmp_path).load(trainer.optimizer, step=2)
        assert Checkpoints(tmp_path).load(trainer.optimizer) == 1


def test_a_manifest_names_no_file_elsewhere(tmp_path):
    saved(str(tmp_path))
    path = tmp_path / "step_00000002" / manifest.NAME
    content = json.loads(path.read_text())
    content["files"]["../../secret"] = {"bytes": 1, "sha256": ""}
    del content["sha256"]
    path.write_text(json.dumps({**content, "sha256": manifest.digest(content)}))
    with pytest.raises(ValueError, match=r"'\.\./\.\./secret' is not a file of the checkpoint"):
        Checkpoints(tmp_path).load(Trainer(FEW).optimizer, step=2)


@pytest.mark.notices(
    "manifest.json is deleted",
    where="Checkpoints",
    answer="counts as damaged: an error if it is asked for, else the previous one is loaded",
)
def test_no_manifest(ranks, tmp_path, caplog):
    """These folders always have one. A folder of another program loads without, and the log says that nothing is checked."""
    saved(str(tmp_path))
    (tmp_path / "step_00000002" / manifest.NAME).unlink()
    for said, step in [refuses(str(tmp_path)), *ranks(2)(refuses, str(tmp_path))]:
        assert "step_00000002/manifest.json is missing, so the files of the checkpoint cannot be checked" in said
        assert step == 1
    with caplog.at_level(logging.WARNING, "zerocast"):
        optim.load(Trainer(FEW).optimizer, tmp_path / "step_00000002")
    assert "step_00000002 has no manifest.json: its files are not checked" in caplog.text


def test_exchanged_folders(tmp_path):
    saved(str(tmp_path))
    first, second, aside = tmp_path / "step_00000001", tmp_path / "step_00000002", tmp_path / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    with pytest.raises(ValueError, match=r"manifest.json has step 1, expected 2"):
        Checkpoints(tmp_path).load(Trainer(FEW).optimizer, step=2)
    with pytest.raises(ValueError, match=r"manifest.json has step 2, expected 1"):
        Checkpoints(tmp_path).load(Trainer(FEW).optimizer)


def test_all_damaged(tmp_path, caplog):
    saved(str(tmp_path))
    caplog.clear()
    for folder in tmp_path.iterdir():
        flip(next(folder.glob("*.distcp")))
    with caplog.at_level(logging.WARNING, "zerocast"), pytest.raises(ValueError, match=r"step_00000001/.* is damaged"):
        Checkpoints(tmp_path).load(Trainer(FEW).optimizer)
    assert [r.getMessage()[:34] for r in caplog.records if r.name.startswith("zerocast")] == [
        "skipping the checkpoint of step 2:"
    ]


def test_what_does_not_fit_is_named_with_both_values(tmp_path):
    fewer = Run(FEW.specs[:-1])
    optim.save(Trainer(FEW).optimizer, tmp_path / "all")
    optim.save(Trainer(fewer).optimizer, tmp_path / "fewer")
    with pytest.raises(ValueError, match=r"model\.bias is in the checkpoint, but not a parameter of this optimizer"):
        optim.load(Trainer(fewer).optimizer, tmp_path / "all")
    with pytest.raises(ValueError, match=r"model\.bias is missing"):
        optim.load(Trainer(FEW).optimizer, tmp_path / "fewer")
