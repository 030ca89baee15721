"""Damaged checkpoints and such as do not fit are refused with both values, nothing changed, and the one before still loads."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from tests import casts
from tests.optim.folders import names, saved
from tests.optim.probe import MIXED
from tests.optim.runs import Run, Trainer
from tests.optim.test_resume import snapshot
from zerocast import optim
from zerocast.optim import Checkpoints
from zerocast.sources import manifest


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


DAMAGE = {truncate: "bytes, and had", flip: "is damaged: its SHA-256 is", Path.unlink: "is missing; it had"}


def refuses(folder: str) -> tuple[str, int]:
    """What loading the damaged step says, the optimizer unchanged; and which step is loaded when none is asked for."""
    trainer, checkpoints = Trainer(Run()), Checkpoints(folder)
    before = snapshot(trainer)
    with pytest.raises(ValueError, match="when it was written") as caught:
        checkpoints.load(trainer.optimizer, step=2)
    casts.assert_same_bytes(snapshot(trainer), before)
    return str(caught.value), checkpoints.load(trainer.optimizer)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damaged_files(ranks, tmp_path, damage):
    """Every file of a checkpoint of two ranks in turn, read on one and on two; the one before is still there."""
    ranks(2)(saved, str(tmp_path / "whole"))
    files = [name for name in names(tmp_path / "whole" / "step_00000002") if name not in (manifest.NAME, ".metadata")]
    assert len(files) == 2
    for number, name in enumerate([*files, ".metadata"]):
        if name == ".metadata" and damage is Path.unlink:
            continue  # then it is no checkpoint
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        damage(folder / "step_00000002" / name)
        for said, step in [refuses(str(folder)), *ranks(2)(refuses, str(folder))]:
            assert DAMAGE[damage] in said
            assert f"step_00000002/{name}" in said
            assert step == 1


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"version": 1, "files": []}', '{"version": 9, "files": {}}', "[" * 100_000, '{"version": 1'],
    ids=repr,
)
def test_a_damaged_manifest(tmp_path, content):
    saved(str(tmp_path))
    (tmp_path / "step_00000002" / manifest.NAME).write_text(content)
    trainer = Trainer(Run())
    with pytest.raises(ValueError, match=r"manifest.json (is damaged|has version 9, this zerocast reads version 1)"):
        Checkpoints(tmp_path).load(trainer.optimizer, step=2)
    assert Checkpoints(tmp_path).load(trainer.optimizer) == 1


def test_a_manifest_names_no_file_elsewhere(tmp_path):
    saved(str(tmp_path))
    path = tmp_path / "step_00000002" / manifest.NAME
    content = json.loads(path.read_text())
    content["files"]["../../secret"] = {"bytes": 1, "sha256": ""}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"'\.\./\.\./secret' is no file of the checkpoint"):
        Checkpoints(tmp_path).load(Trainer(Run()).optimizer, step=2)


def test_all_damaged(tmp_path, caplog):
    saved(str(tmp_path))
    for folder in tmp_path.iterdir():
        flip(next(folder.glob("*.distcp")))
    with caplog.at_level(logging.WARNING, "zerocast"), pytest.raises(ValueError, match=r"step_00000001/.* is damaged"):
        Checkpoints(tmp_path).load(Trainer(Run()).optimizer)
    assert [r.getMessage()[:38] for r in caplog.records if r.name.startswith("zerocast")] == [
        "passing over the checkpoint of step 2:"
    ]


def test_what_does_not_fit_is_named_with_both_values(tmp_path):
    optim.save(Trainer(Run()).optimizer, tmp_path / "all")
    optim.save(Trainer(Run(MIXED[:-1])).optimizer, tmp_path / "fewer")
    with pytest.raises(ValueError, match=r"model\.bias is there and is no parameter of the optimizer here"):
        optim.load(Trainer(Run(MIXED[:-1])).optimizer, tmp_path / "all")
    with pytest.raises(ValueError, match=r"model\.bias is missing"):
        optim.load(Trainer(Run()).optimizer, tmp_path / "fewer")
