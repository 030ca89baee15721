"""Files that somebody damaged: an error with a message, or what is loaded is what is there; nothing is run, nothing hangs."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from tests import casts
from tests.checkpoint.storage import SOURCES, new_values
from tests.fuzz.call_limits import LENGTHS, SAID, fuzz
from tests.optim.probe import MIXED
from tests.optim.runs import Run, Trainer, snapshot
from zerocast import optim
from zerocast.checkpoint import manifest
from zerocast.checkpoint.sources import open_source

RUN = Run(tuple(spec for spec in MIXED if spec.name in ("delayed", "nv", "bias")))
MISTAKES = ("flip", "byte", "cut", "more", "hole", "swap", "empty")
Damage = tuple[int, str, int, int]  # which file, what, where, how much
DAMAGES = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(MISTAKES), st.integers(0, 2**20), st.integers(1, 255)),
    min_size=1,
    max_size=3,
)
REFUSED = (*SAID, OSError, pickle.UnpicklingError)


def damage(files: list[Path], one: Damage) -> None:
    number, mistake, place, much = one
    file = files[number % len(files)]
    content = bytearray(file.read_bytes())
    place %= len(content) or 1
    if mistake in ("flip", "byte") and content:
        content[place] = content[place] ^ (1 << much % 8) if mistake == "flip" else much
    elif mistake == "cut":
        del content[place:]
    elif mistake == "more":
        content[place:place] = bytes([much]) * much
    elif mistake == "hole":
        content[place : place + much] = bytes(len(content[place : place + much]))
    elif mistake == "swap" and len(content) > 2 * much:
        content[:much], content[-much:] = content[-much:], content[:much]
    elif mistake == "empty":
        content.clear()
    file.write_bytes(content)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    trainer = Trainer(RUN)
    trainer.step(0)
    optim.save(trainer.optimizer, tmp_path / "whole")
    return tmp_path / "whole"


def attempt(folder: Path, trainer: Trainer, hashed: bool) -> bool:
    """Return whether a checkpoint loads. One that is refused with hashes changes nothing."""
    before = snapshot(trainer) if hashed else {}
    try:
        optim.load(trainer.optimizer, folder)
    except REFUSED as error:
        assert str(error).strip()
        if hashed:
            casts.assert_same_bytes(snapshot(trainer), before)
        return False
    return True


@pytest.mark.notices(
    "a bit flips in any file of a checkpoint, its manifest included",
    where="Checkpoints",
    answer="ValueError, before anything changes",
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seconds", LENGTHS)
@pytest.mark.parametrize("hashed", [True, False])
def test_checkpoints(tmp_path: Path, whole: Path, seconds: float, hashed: bool) -> None:
    """A damaged checkpoint with its manifest is refused or loads to the bit. Without, it is an error or some values."""
    trainer, wanted = Trainer(RUN), Trainer(RUN)
    optim.load(wanted.optimizer, whole)
    expected = snapshot(wanted)

    def check(mistakes: list[Damage]) -> None:
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        if not hashed:
            (folder / manifest.NAME).unlink()
        for one in mistakes:
            damage(sorted(folder.iterdir()), one)
        if attempt(folder, trainer, hashed) and hashed:
            casts.assert_same_bytes(snapshot(trainer), expected)

    fuzz(seconds, DAMAGES, check)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seconds", LENGTHS)
@pytest.mark.parametrize("kind", ["file", "old_file", "safetensors", "safetensors_folder", "dcp"])
def test_sources(tmp_path: Path, seconds: float, kind: str) -> None:
    """Everything that is said to be there can be read, or an error says why not."""
    (tmp_path / "whole").mkdir()
    SOURCES[kind](new_values({"matrix": (24, 16), "scalar": (), "vector": (5,)}, torch.float32), tmp_path / "whole")

    def check(mistakes: list[Damage]) -> None:
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", folder)
        for one in mistakes:
            damage(sorted(folder.iterdir()), one)
        path = next(iter(folder.iterdir())) if "file" in kind or kind == "safetensors" else folder
        try:
            source = open_source(path)
            for name, entry in source.entries.items():
                if entry.numel < 2**20:
                    assert tuple(source.read(name, [0] * len(entry.shape), entry.shape).shape) == entry.shape
        except REFUSED as error:
            assert str(error).strip()

    fuzz(seconds / 3, DAMAGES, check)


@pytest.mark.parametrize("seconds", LENGTHS)
def test_manifests(tmp_path: Path, seconds: float) -> None:
    """A manifest may be JSON of any shape."""
    inner = st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
        lambda one: st.one_of(st.lists(one, max_size=3), st.dictionaries(st.text(max_size=4), one, max_size=3)),
    )
    names = st.sampled_from(("files", "formats", "step", "torch"))

    (tmp_path / ".metadata").touch()

    def check(content: Any) -> None:
        (tmp_path / manifest.NAME).write_text(json.dumps(content))
        try:
            manifest.Manifest.read(tmp_path)
        except ValueError as error:
            assert "is damaged" in str(error)

    fuzz(seconds / 3, st.one_of(inner, st.dictionaries(names, st.one_of(st.just(1), inner))), check)
