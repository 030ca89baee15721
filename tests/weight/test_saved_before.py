"""Files that name modules where they were before they moved into rooms still load, and mean the same."""

import pickle
from pathlib import Path

import pytest
import torch

import zerocast
from tests import casts
from tests.matrices import lcg_matrix

SAVED = Path(__file__).parent / "saved"
FORMATS = tuple(torch.load(SAVED / "before_rooms.pt", weights_only=True)["weights"])  # those that there were


def test_every_format_that_there_was() -> None:
    assert set(FORMATS) < set(casts.FORMATS)


@pytest.mark.parametrize(("number", "fmt"), list(enumerate(FORMATS)))
def test_weights(number: int, fmt: str) -> None:
    """Saved with `torch.save` before the move: `casts.cast_whole` of the matrix of that number, for each format."""
    saved = torch.load(SAVED / "before_rooms.pt", weights_only=True)["weights"][fmt]
    expected = casts.cast_whole(fmt, torch.from_numpy(lcg_matrix(32, 64, number)))
    casts.assert_same_bytes(casts.bytes_of(saved), casts.bytes_of(expected))


def test_recipes_and_formats() -> None:
    saved = pickle.loads((SAVED / "before_rooms.pkl").read_bytes())
    assert saved["recipe"] == zerocast.Recipe({"*.mlp.*": "nvfp4"}, default="identity")
    assert saved["formats"] == [zerocast.get_format(fmt) for fmt in FORMATS]


@pytest.mark.parametrize("pickled", ["earlier", "now"])
def test_prepared_modules(pickled: str) -> None:
    """A module that was prepared for FSDP2, with `verify_every`, is a plain one in a pickle, and can be prepared again."""
    content = (SAVED / "prepared_before_redesign.pkl").read_bytes()
    recipe = zerocast.Recipe({"*weight": "nvfp4"})
    if pickled == "now":
        content = pickle.dumps(zerocast.fsdp2.prepare(pickle.loads(content), recipe, verify_every=2))
    model = pickle.loads(content)
    assert type(model[0].weight.data) is torch.Tensor
    assert torch.equal(model(torch.ones(1, 16)), torch.full((1, 16), 8.0))
    model.load_state_dict(model.state_dict())
    zerocast.fsdp2.prepare(model, recipe)


def test_what_is_saved_now_names_no_room(tmp_path: Path) -> None:
    """So that rooms can be rebuilt again."""
    torch.save(casts.cast_whole("nvfp4", torch.from_numpy(lcg_matrix(32, 64, 0))), tmp_path / "w.pt", pickle_protocol=2)
    assert b"zerocast.weight.weight" not in (tmp_path / "w.pt").read_bytes()


def test_public_paths() -> None:
    import zerocast.export
    import zerocast.recipe
    from zerocast.export import export_safetensors
    from zerocast.recipe import Recipe

    assert zerocast.export.export_safetensors is export_safetensors
    assert Recipe is zerocast.Recipe
